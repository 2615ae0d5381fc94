"""What attention heads do: where they look, how alike they are, and how much they matter."""

from compmod_jax.analysis.roles.measure import Measured, Roles
from compmod_jax.analysis.roles.report import make_page

__all__ = ["Measured", "Roles", "make_page"]
