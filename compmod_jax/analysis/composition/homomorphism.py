r"""Homomorphism error: whether a word can be exchanged in a representation as it is in a sentence.

A representation r composes sentences of words if exchanging the word a for b changes r(s) by an
operation :math:`f_{ab}` that depends on the two words and not on the rest of the sentence:

.. math:: r(s_{a \to b}) = f_{ab}(r(s)) \quad \text{for all } s

For every pair of words the operation is estimated from pairs of training sentences. On pairs of
other sentences its error is, relative to no operation at all,

.. math:: E = \frac{\sum_s \|r(s_{a \to b}) - f_{ab}(r(s))\|^2}{\sum_s \|r(s_{a \to b}) - r(s)\|^2}

so that 0 is a homomorphism and 1 what the identity achieves. Here r(s) is the sum of the residual
stream over the positions of s, after one layer. Two families of operations:

- additive, :math:`f_{ab}(r) = r + v_{ab}`. If r(s) is the sum of vectors of the words of s, the
  tree reconstruction error of Andreas 2019 (Measuring Compositionality in Representation Learning),
  with words as primitives that are added, is 0; :math:`v_{ab}` is the difference of two of these
  vectors, and E = 0;
- linear, :math:`f_{ab}(r) = r + v_{ab} + W_{ab}^T (r - \bar r_{ab})`, by ridge regression: the
  learned linear operators of An and Du 2026 (Representational Homomorphism Predicts and Improves
  Compositional Generalization), for the exchange of a word in place of its application. It includes
  the additive one.

Beside them stands the mean of :math:`r(s_{a \to b})` over training pairs, which ignores s, and as a
control both families with training pairs that are assigned to pairs of words at random: what is
gained without the words. If r is random, E is 1 for additive operations, and 1/2 for the mean and
for linear operations of any words, which then can but predict the mean.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.analysis.composition.pairs import Pair
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.types import Params
from compmod_jax.tasks.base import Batch

MEAN, ADDITIVE, LINEAR = "mean", "additive", "linear"
_PENALTIES = np.inf, 10.0, 1.0, 0.1, 0.01, 0.001


class Changes(NamedTuple):
  """Representations of pairs of sentences.

  Attributes:
    words: the two words of every pair.
    base: representation of the sentence with the first, [pairs, dim].
    source: with the second, [pairs, dim].
  """

  words: list[tuple[int, int]]
  base: np.ndarray
  source: np.ndarray


class Errors(NamedTuple):
  """Squared errors of every pair, [pairs].

  Attributes:
    words: of the pairs.
    identity: errors of no operation, which are the squared distances of the two representations.
    found: `MEAN`, `ADDITIVE` or `LINEAR` -> error.
    shuffled: `ADDITIVE` or `LINEAR` -> error of operations for words at random.
  """

  words: list[tuple[int, int]]
  identity: np.ndarray
  found: dict[str, np.ndarray]
  shuffled: dict[str, np.ndarray]


def representations(
  subject: Subject, sites: Sequence[str], pairs: Sequence[Pair]
) -> dict[str, Changes]:
  """Sums over positions of activations [batch, time, dim]: site -> those of the pairs.

  Args:
    subject: the model and the split.
    sites: of the stream that pairs are of.
    pairs: of its sentences.
  """

  @jax.jit
  def run(params: Params, batch: Batch) -> dict[str, jax.Array]:
    intermediates = Intermediates(capture=frozenset(sites))
    subject.task.model.forward(params, batch, intermediates=intermediates)
    real = subject.task.model.valid_mask(sites[0], batch)[..., None]
    return {
      site: jnp.sum(jnp.where(real, value.astype(jnp.float32), 0), axis=1)
      for site, value in intermediates.captured.items()
    }

  needed = np.unique([(pair.base, pair.source) for pair in pairs])
  read = dataclasses.replace(subject, chosen=needed)
  rows, numbers = list[dict[str, np.ndarray]](), list[np.ndarray]()
  for done, batch in enumerate(read.batches):
    rows.append(jax.device_get(run(subject.params, subject.place(batch))))
    numbers.append(np.asarray(batch["index"]))
    subject.status(f"representations on {subject.split}", done + 1, len(read.batches))
  place = {number: row for row, number in enumerate(np.concatenate(numbers).tolist())}
  base, source = ([place[number] for number in one] for one in (
    [pair.base for pair in pairs], [pair.source for pair in pairs]
  ))  # fmt: skip
  found = {}
  for site in sites:
    every = np.concatenate([part[site] for part in rows]).astype(np.float64)
    found[site] = Changes([pair.words for pair in pairs], every[base], every[source])
  return found


def homomorphism_errors(train: Changes, test: Changes, chance: np.random.Generator) -> Errors:
  """Errors on test pairs whose two words differ in a training pair, too; in the order of words.

  Args:
    train: pairs from which operations are estimated.
    test: others, whose words stand in the same order.
    chance: what assigns training pairs to words for the control.
  """
  mixed = [train.words[place] for place in chance.permutation(len(train.words))]
  known = sorted(set(train.words) & set(test.words))
  asked = {words: np.array([one == words for one in test.words], bool) for words in known}
  every = [place for words in known for place in np.flatnonzero(asked[words])]
  base, source = test.base[every], test.source[every]

  def of(names: Sequence[str], given: list[tuple[int, int]]) -> dict[str, np.ndarray]:
    found: dict[str, list[np.ndarray]] = {name: [base[:0]] for name in names}
    for words in known:
      members = np.array([one == words for one in given], bool)
      answers = predict(train.base[members], train.source[members], test.base[asked[words]])
      for name in names:
        found[name].append(answers[name])
    return {
      name: np.square(source - np.concatenate(parts)).sum(axis=1) for name, parts in found.items()
    }

  return Errors(
    [test.words[place] for place in every],
    np.square(source - base).sum(axis=1),
    of((MEAN, ADDITIVE, LINEAR), train.words),
    of((ADDITIVE, LINEAR), mixed),
  )


def predict(base: np.ndarray, source: np.ndarray, asked: np.ndarray) -> dict[str, np.ndarray]:
  """What operations, estimated from pairs of the same two words, make of other representations.

  Args:
    base: representations of sentences with the first word, [pairs, dim].
    source: of those with the second, [pairs, dim].
    asked: others with the first, [others, dim].

  Returns:
    `MEAN`, `ADDITIVE` or `LINEAR` -> those with the second, [others, dim].
  """
  centre, shift = base.mean(axis=0), (source - base).mean(axis=0)
  added = asked + shift
  matrix = ridge(base - centre, source - base - shift)
  return {
    MEAN: np.broadcast_to(source.mean(axis=0), asked.shape),
    ADDITIVE: added,
    LINEAR: added + (asked - centre) @ matrix,
  }


def ridge(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  r"""The matrix W that minimises :math:`\|x W - y\|^2 + \lambda \|W\|^2`, [dim, outputs].

  Of several penalties, relative to the mean square of the singular values of x, the one with the
  least error on examples that are left out one at a time; an infinite one, W = 0, is among them.

  Args:
    x: [examples, dim], with mean 0 over examples.
    y: [examples, outputs], with mean 0.
  """
  left, values, right = np.linalg.svd(x, full_matrices=False)
  squares, parts = np.square(values), left.T @ y
  best, matrix = np.inf, np.zeros((x.shape[1], y.shape[1]))
  if len(x) < 3 or not squares.any():
    return matrix
  for penalty in _PENALTIES:
    shrunk = squares / (squares + penalty * squares.mean())
    leverage = 1 / len(x) + np.square(left) @ shrunk  # the mean over examples was estimated, too
    rest = (y - (left * shrunk) @ parts) / np.maximum(1 - leverage, 1e-6)[:, None]
    if (error := np.square(rest).sum()) < best:
      best = error
      matrix = (right.T * (values / (squares + penalty * squares.mean()))) @ parts
  return matrix
