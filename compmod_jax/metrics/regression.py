"""How well numbers are predicted."""

import numpy as np
from jaxtyping import Float


def determination(
  squares: Float[np.ndarray, "*targets"], values: Float[np.ndarray, "examples *targets"]
) -> Float[np.ndarray, "*targets"]:
  r"""The coefficient of determination: 1 is perfect, 0 what the mean of all values would have.

  .. math:: R^2 = 1 - \frac{\sum_i (\hat y_i - y_i)^2}{\sum_i (y_i - \bar y)^2}

  Args:
    squares: the squared errors, summed over examples.
    values: what was to be predicted.
  """
  values = np.asarray(values, np.float64)
  return 1 - squares / np.square(values - values.mean(axis=0)).sum(axis=0)
