"""A complete two-level factorial: what each factor changes, alone and together with others."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from compmod_jax.core.errors import check
from compmod_jax.metrics.significance import Mean, holm


class Effect(NamedTuple):
  """What a factor changes, or an interaction of several.

  Attributes:
    factors: one for a main effect, several for an interaction.
    size: with half its 95 % interval, and the number of runs that it is the contrast of.
    p: two-sided p-value of an effect of zero; NaN without degrees of freedom.
    corrected: the same, corrected for the number of effects (Holm).
    published: the same contrast of published figures, if there is one for each setting.
  """

  factors: tuple[str, ...]
  size: Mean
  p: float
  corrected: float
  published: float | None = None

  @property
  def name(self) -> str:
    """The factors, for example "encoder x cross"."""
    return " x ".join(self.factors)


class Factorial(NamedTuple):
  """An analysis of variance of a complete two-level factorial in blocks.

  Attributes:
    effects: main effects first, then interactions of two factors, of three, ...
    deviation: standard deviation of what effects and blocks leave unexplained.
    freedom: its degrees of freedom, (settings - 1) * (blocks - 1).
  """

  effects: tuple[Effect, ...]
  deviation: float
  freedom: int


# A setting is the set of factors that are on.
Setting = frozenset[str]


def analyse(
  values: Mapping[Setting, Mapping[int, float]],
  factors: Sequence[str],
  published: Mapping[Setting, float] | None = None,
  level: float = 0.95,
) -> Factorial:
  r"""Effects of factors by least squares, runs of one seed being a block.

  .. math:: y_{xb} = \mu + \beta_b + \sum_T \tfrac12 e_T \prod_{i \in T} x_i + \epsilon_{xb}

  with :math:`x_i = \pm 1`, T over all sets of factors, and independent normal errors of one
  variance. All contrasts are orthogonal, so that

  .. math:: e_T = \bar y(\textstyle\prod x_i = 1) - \bar y(\prod x_i = -1), \quad
    e_T \pm t_f \, 2 s / \sqrt{N}

  A main effect is the mean with the factor less the mean without it; an interaction of two is half
  of what the second changes in the effect of the first.

  Args:
    values: setting -> block -> value; every set of factors, each in the same blocks.
    factors: names.
    published: setting -> figure to compare with.
    level: coverage of the intervals, between 0 and 1.

  Raises:
    UserError: a setting is missing, or has other blocks than the rest.

  Source: Box, Hunter and Hunter 2005, Statistics for Experimenters, chapters 4 and 5.
  """
  sets = [
    frozenset(on) for n in range(len(factors) + 1) for on in itertools.combinations(factors, n)
  ]
  check(
    set(values) == set(sets),
    f"values has {len(values)} settings of {len(factors)} factors; a complete factorial needs all"
    f" {len(sets)}.",
  )
  blocks = sorted(next(iter(values.values())))
  for setting, by_block in values.items():
    check(
      sorted(by_block) == blocks and blocks,
      f"values[{sorted(setting)}] has the blocks {sorted(by_block)}, another setting {blocks};"
      " every setting needs a run in each block, and there must be one.",
    )
  table = np.array([[values[setting][block] for block in blocks] for setting in sets])
  names = [on for n in range(1, len(factors) + 1) for on in itertools.combinations(factors, n)]
  signs = [np.array([_sign(on, setting) for setting in sets]) for on in names]
  # Contrasts of orthogonal signs: the least squares solution.
  sizes = [float((sign[:, None] * table).mean() * 2) for sign in signs]
  # What settings and blocks explain, taken out of the runs themselves: no difference of large sums.
  rest = table - table.mean(0, keepdims=True) - table.mean(1, keepdims=True) + table.mean()
  freedom = (len(sets) - 1) * (len(blocks) - 1)
  deviation = math.sqrt(float((rest**2).sum()) / freedom) if freedom else math.nan
  error = 2 * deviation / math.sqrt(table.size)
  half = float(stats.t.ppf((1 + level) / 2, freedom)) * error if freedom else math.nan
  p_values = [_p(size, error, freedom) for size in sizes]
  others = [_contrast(sign, sets, published or {}) for sign in signs]
  return Factorial(
    tuple(
      Effect(on, Mean(size, half, table.size), p, corrected, other)
      for on, size, p, corrected, other in zip(
        names, sizes, p_values, holm(p_values), others, strict=True
      )
    ),
    deviation,
    freedom,
  )


def _sign(factors: Sequence[str], setting: Setting) -> int:
  return math.prod(1 if factor in setting else -1 for factor in factors)


def _p(size: float, error: float, freedom: int) -> float:
  if not freedom:
    return math.nan
  if error == 0:
    return 1.0 if size == 0 else 0.0
  return float(2 * stats.t.sf(abs(size) / error, freedom))


def _contrast(
  signs: np.ndarray, sets: Sequence[Setting], figures: Mapping[Setting, float]
) -> float | None:
  if not all(setting in figures for setting in sets):
    return None
  return float((signs * np.array([figures[setting] for setting in sets])).mean() * 2)
