r"""Labels of target words, predicted beside the words themselves.

.. math:: L = L_{\mathrm{words}} + w \sum_a \frac{1}{N} \sum_t -\ln p_a(y_{a,t} \mid y_{<t}, x)

where :math:`p_a` is a softmax over a linear function of the decoder's last state, from which the
next word is predicted, too. What the labels are, the data say: of SCAN, how far the functions of a
command have come. They are not read, so that outputs are searched for as without them.

Source: Jiang and Bansal 2021, "Inducing Transformer's Compositional Generalization Ability via
Auxiliary Sequence Prediction Tasks".
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import OFF
from compmod_jax.core.losses import CrossEntropy, Term, cross_entropy
from compmod_jax.data.base import DataError, Pairs
from compmod_jax.data.examples import Examples, Ragged
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import (
  Batch,
  Carry,
  Metrics,
  Objective,
  Params,
  Scoring,
  StepContext,
  TaskModel,
  Terms,
)

SITE = "target_labels"
"""Site of the logits of all labels, [batch, time, sum of their numbers]."""
COLUMN = "labels/"
"""What names of their columns begin with; a column has 1 for label 0, and 0 where there is none."""


@runtime_checkable
class HasLabels(Protocol):
  """A data configuration of pairs that knows more of a target than its words."""

  @property
  def label_counts(self) -> Mapping[str, int]:
    """Name -> number of different labels."""
    ...

  def labels(self, source: str) -> Mapping[str, Sequence[int]]:
    """Name -> label, from 0, of every word of the source's target."""
    ...


def label_counts(data: object, model: object) -> Mapping[str, int]:
  """The labels that are learned: name -> how many different ones.

  Args:
    data: the data configuration.
    model: the model's configuration.

  Raises:
    UserError: the data have no labels, or the model's outputs do not fit them.
  """
  check(
    isinstance(data, HasLabels) and bool(data.label_counts),
    f"task.label_weight is given, but {type(data).__name__} has no labels of target words. Use"
    " ScanData without a scratchpad, or leave it at 0.",
  )
  assert isinstance(data, HasLabels)
  wanted, found = tuple(data.label_counts.values()), getattr(model, SITE, ())
  check(
    found == wanted,
    f"model.{SITE} is {found}, but task.label_weight is given and the data have {wanted} different"
    f" labels ({', '.join(data.label_counts)}). Use a TransformerConfig with {SITE} = {wanted}.",
  )
  return data.label_counts


def with_labels(examples: Examples, pairs: Pairs, data: HasLabels) -> Examples:
  """Examples with a column for each kind of labels; ends of sentences have none.

  Raises:
    DataError: labels are not as many as the tokens of a target.
  """
  columns: dict[str, list[list[int]]] = {name: [] for name in data.label_counts}
  for number, target in zip(examples.index, examples.columns["target"], strict=True):
    for name, labels in data.labels(pairs.source[int(number)]).items():
      if len(labels) != len(target) - 1:
        raise DataError(
          f"{pairs.where(int(number))} has {len(labels)} labels {name!r} and"
          f" {len(target) - 1} target tokens; every token needs one. Use a target tokenizer of"
          " the kind 'words', or mend the pair."
        )
      columns[name].append([1 + label for label in labels])
  made = {COLUMN + name: Ragged(column) for name, column in columns.items()}
  return dataclasses.replace(examples, columns={**examples.columns, **made})


@dataclasses.dataclass(frozen=True, eq=False)
class WithTargetLabels:
  """Adds the cross-entropy in nats per label of each kind of labels, and their accuracies.

  Attributes:
    objective: on the same batch, whose model has the site `target_labels`.
    counts: name -> number of different labels, in the order of the model's outputs.
    weight: of every kind.
  """

  objective: Objective
  counts: Mapping[str, int]
  weight: float

  def weights(self, config: ModelConfig) -> dict[str, float]:
    """Those of the objective inside, and the same one for each kind of labels."""
    return self.objective.weights(config) | {COLUMN + name: self.weight for name in self.counts}

  def __call__(
    self, model: TaskModel[Any], params: Params, carry: Carry, batch: Batch, context: StepContext
  ) -> tuple[Terms, Carry, Metrics]:
    """See `Objective`."""
    outside = context.intermediates
    intermediates = outside.also([SITE])
    terms, carry, metrics = self.objective(
      model, params, carry, batch, context._replace(intermediates=intermediates)
    )
    outside.merge(intermediates.captured, intermediates.seen)
    for name, found in _losses(intermediates.captured[SITE], batch, self.counts).items():
      terms |= {COLUMN + name: Term(found.nll, found.count, weight=self.weight)}
      metrics |= {f"{COLUMN}{name}_accuracy": (found.correct, found.count)}
    return terms, carry, metrics


def _losses(logits: jax.Array, batch: Batch, counts: Mapping[str, int]) -> dict[str, CrossEntropy]:
  """Losses of every kind of labels."""
  found, start = {}, 0
  for name, count in counts.items():
    labels = batch[COLUMN + name]
    mine = jax.lax.slice_in_dim(logits, start, start + count, axis=-1)
    found[name] = cross_entropy(mine, labels - 1, labels > 0)
    start += count
  return found


@dataclasses.dataclass(frozen=True, eq=False)
class TargetLabelScores:
  """Share of the labels of target words that are right, given the words before.

  Attributes:
    counts: as those of `WithTargetLabels`.
  """

  counts: Mapping[str, int]
  metric: str = ""
  units: str = "Labels: share of target words whose label is right, given the words before."

  def __call__(self, scoring: Scoring[Any]) -> Iterator[tuple[str, float]]:
    """See `Evaluator`."""
    found = scoring.sums(self._sums)
    for name, correct, count in zip(self.counts, found[::2], found[1::2], strict=True):
      yield f"{COLUMN}{name}_accuracy", correct / max(count, 1)

  def _sums(self, model: TaskModel[Any], params: Params, batch: Batch) -> tuple[jax.Array, ...]:
    """Right predictions and labels of one kind after the other."""
    intermediates = OFF.also([SITE])
    model.forward(params, batch, intermediates=intermediates)
    losses = _losses(intermediates.captured[SITE], batch, self.counts)
    return tuple(number for one in losses.values() for number in (one.correct, one.count))
