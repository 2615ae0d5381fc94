"""Statistics of units that compete, from sums: how they specialise, agree and repeat each other."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student


class Estimate(NamedTuple):
  """A value, and bounds that hold it with probability 0.95; NaN where unknown."""

  value: float
  low: float
  high: float


def mutual_information(joint: np.ndarray) -> np.ndarray:
  r"""Mutual information of category and unit, in bits.

  .. math:: I = \sum_{c,i} p(i, c) \log_2 \frac{p(i, c)}{p(i)\,p(c)}, \qquad
     p(i, c) = \operatorname{mean}_j C_{ij} [\mathrm{category}_j = c]

  Args:
    joint: sums of weights, float [..., categories, units]; scaled to sum 1 here.

  Returns:
    float64 [...]; 0 where the table is empty.
  """
  joint = np.asarray(joint, np.float64)
  total = joint.sum(axis=(-2, -1), keepdims=True)
  p = joint / np.where(total > 0, total, 1)
  apart = p.sum(axis=-1, keepdims=True) * p.sum(axis=-2, keepdims=True)
  ratio = np.where(p > 0, p, 1) / np.where(p > 0, apart, 1)
  return np.maximum(0.0, (p * np.log2(ratio)).sum(axis=(-2, -1)))


def entropy(p: np.ndarray) -> float:
  """Entropy of a distribution, or of sums that are proportional to one, in bits."""
  p = np.asarray(p, np.float64) / max(float(np.sum(p)), 1e-300)
  return float(-(p * np.log2(np.where(p > 0, p, 1))).sum())


def spearman(first: np.ndarray, second: np.ndarray) -> float:
  """Rank correlation of two lists, ties at their mean rank; NaN if one of them does not vary.

  Source: Spearman 1904.
  """
  ranks = [rankdata(np.ravel(values)) for values in (first, second)]
  one, two = (rank - rank.mean() for rank in ranks)
  scale = np.sqrt((one @ one) * (two @ two))
  return float(one @ two / scale) if scale > 0 else np.nan


def estimate_from_blocks(value: float, blocks: Sequence[float]) -> Estimate:
  """A statistic with Student's interval from the same one within blocks of sentences.

  Args:
    value: over all sentences.
    blocks: within each block; blocks are of about equal size and share no sentence.
  """
  found = np.asarray(blocks, np.float64)
  found = found[np.isfinite(found)]
  if len(found) < 2:
    return Estimate(value, np.nan, np.nan)
  error = float(found.std(ddof=1)) / math.sqrt(len(found))
  reach = float(student.ppf(0.975, len(found) - 1)) * error
  return Estimate(value, value - reach, value + reach)


def correlation(second: np.ndarray, total: np.ndarray, count: float) -> np.ndarray:
  """Pearson correlation of columns, from their sums.

  Args:
    second: sums of products, [columns, columns].
    total: sums, [columns].
    count: rows that were added up.

  Returns:
    float64 [columns, columns]; NaN for columns that do not vary.
  """
  covariance = _covariance(second, total, count)
  scale = np.sqrt(np.clip(np.diag(covariance), 0, None))
  scale = np.where(scale > 1e-7 * np.abs(total) / max(count, 1), scale, np.nan)
  return covariance / scale[:, None] / scale[None, :]


def linear_cka(second: np.ndarray, total: np.ndarray, count: float, units: int) -> np.ndarray:
  r"""Similarity of the outputs of units, whatever basis each writes in.

  .. math:: \mathrm{CKA}(X, Y) = \frac{\|Y^T X\|_F^2}{\|X^T X\|_F \, \|Y^T Y\|_F}

  over centred outputs X, Y [tokens, dim]: 0 if nothing of one can be predicted linearly from the
  other, 1 if one is a rotation and scaling of the other. Every head writes in coordinates of its
  own until the output projection, so entries themselves cannot be compared.

  Args:
    second: sums of products of all units' outputs side by side, [units * dim, units * dim].
    total: their sums, [units * dim].
    count: tokens that were added up.
    units: how many.

  Returns:
    float64 [units, units], 1 on the diagonal; NaN for a unit that never varies.

  Source: Kornblith et al. 2019, section 3, with a linear kernel.
  """
  covariance = _covariance(second, total, count)
  dim = covariance.shape[0] // units
  blocks = covariance.reshape(units, dim, units, dim)
  squares = np.einsum("iajb,iajb->ij", blocks, blocks)
  scale = np.sqrt(np.diag(squares))
  scale = np.where(scale > 0, scale, np.nan)
  return squares / scale[:, None] / scale[None, :]


def _covariance(second: np.ndarray, total: np.ndarray, count: float) -> np.ndarray:
  mean = np.asarray(total, np.float64) / max(count, 1)
  return np.asarray(second, np.float64) / max(count, 1) - np.outer(mean, mean)
