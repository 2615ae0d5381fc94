"""Names of scopes (`jax.named_scope`) that tell those who count what a program costs what it holds.

Names change nothing of what is computed. They stand in a program as it is traced and, as the name
of an operation, in what XLA makes of it.
"""

SELECTION = "selection_by_product"
"""Products with matrices of zeros and ones, which place rows: no work of the model."""
IF_NEEDED = "only_if_needed"
"""Loops that run no turn unless the data ask for more than is planned for."""
