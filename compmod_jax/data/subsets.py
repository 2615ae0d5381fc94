"""The training data in two disjoint parts, a large and a small one.

Source: Kolios 2023, section 5.4: 149 and 11.2 of 160.2 thousand examples, 7 % in the small part.
"""

from typing import Literal, get_args

import numpy as np

from compmod_jax.core.errors import check, check_choice

Subset = Literal["all", "large", "small"]
SUBSETS: tuple[str, ...] = get_args(Subset)

# Keeps the split apart from the epochs' orders, which are drawn from the same seed.
_STREAM = 0x5B117


def subset_numbers(part: str, count: int, *, small_share: float, seed: int) -> np.ndarray:
  """Numbers of a part's examples, ascending; a function of these arguments alone.

  Args:
    part: "all", "large" or "small"; the last two have no example in common and are "all" together.
    count: number of training examples.
    small_share: share of them in the small part, between 0 and 1.
    seed: of the run, >= 0.

  Raises:
    UserError: no such part, or one of the two would be empty.
  """
  check_choice("phases.part", part, SUBSETS)
  if part == "all":
    return np.arange(count)
  small = round(small_share * count)
  check(
    0 < small < count,
    f"small_share is {small_share}, which gives {small} of {count} training examples to the small"
    " part; both parts need at least one. Choose another share.",
  )
  order = np.random.default_rng([seed, _STREAM]).permutation(count)
  return np.sort(order[:small] if part == "small" else order[small:])
