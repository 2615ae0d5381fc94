"""Two trained models on the same sentences: what is better, where, and which sentences changed."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from compmod_jax.analysis.compare import routes
from compmod_jax.analysis.compare.groups import subsets_of
from compmod_jax.analysis.reading import MaskedReader, Reader, reader
from compmod_jax.analysis.scoring import decoded, sentence_losses, translates
from compmod_jax.analysis.subject import Subject, drawn
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.metrics.bootstrap import Comparison, paired_bootstrap
from compmod_jax.metrics.statistics import (
  MetricName,
  Statistics,
  loss_statistics,
  sentence_statistics,
)

_LEAST = 10  # fewer examples of a group are no ground for an interval


@dataclasses.dataclass(frozen=True)
class Compare:
  """How two models are compared."""

  sentences: int = 2000
  """Examples of the split that are read, drawn at random; 0: all."""
  decode: int = 500
  """Examples that are also decoded, for BLEU and chrF; 0: none."""
  samples: int = 2000
  """Resampled test sets of the bootstrap."""
  shown: int = 20
  """Sentences that changed most, which are shown."""
  seed: int = 0
  """Seed of everything that is drawn."""

  def __post_init__(self):
    check_least(self, "--", sentences=0, decode=0, samples=100, shown=0)


class Measured(NamedTuple):
  """Statistics of some examples in both models.

  Attributes:
    numbers: of the examples, ascending.
    first: one row an example.
    second: the same.
  """

  numbers: np.ndarray
  first: Statistics
  second: Statistics


class Scores(NamedTuple):
  """One measure of both models on a group.

  Attributes:
    first: score of the first.
    second: score of the second.
    comparison: second less first.
    examples: on how many.
  """

  first: float
  second: float
  comparison: Comparison
  examples: int


class Group(NamedTuple):
  """A subset of the sentences.

  Attributes:
    kind: what subsets of this kind differ in: `all`, `source words`, or a gold annotation.
    name: which subset.
    numbers: of its examples.
    values: measure -> scores; without measures that too few of its examples have.
  """

  kind: str
  name: str
  numbers: np.ndarray
  values: dict[str, Scores]


class Changed(NamedTuple):
  """One sentence that changed.

  Attributes:
    number: of the example.
    before: the first model's output; None if nothing was decoded.
    after: the second model's.
    values: measure -> value of the sentence in both models.
    routing: what routes it differently, largest first.
  """

  number: int
  before: str | None
  after: str | None
  values: dict[str, tuple[float, float]]
  routing: list[routes.Difference]


class Compared(NamedTuple):
  """How two models differ.

  Attributes:
    per: what a loss is per: "token", or "word" where the models have different tokens.
    groups: the whole first.
    changed: the sentences that changed most, most first.
    matchings: of routed units; empty where not both route the same tokens.
    decoded: how many examples were decoded.
    signatures: sacreBLEU's, by measure.
  """

  per: str
  groups: list[Group]
  changed: list[Changed]
  matchings: list[routes.Matching]
  decoded: int
  signatures: dict[str, str]


def compare(
  first: Subject, second: Subject, names: tuple[str, str], settings: Compare = Compare()
) -> Compared:
  """Compares two models.

  Args:
    first: one model; how many sentences are read is in `settings`.
    second: another one, on the same split.
    names: what error messages call them.
    settings: how.

  Raises:
    UserError: the models do not have the same data, or do not predict the same tokens of them.
  """
  ours, theirs = reader(first.task), reader(second.task)
  check_same_data(first, second, ours, theirs, names)
  first, second = (dataclasses.replace(one, sentences=0) for one in (first, second))
  both = np.intersect1d(first.numbers, second.numbers)
  chosen = drawn(both, settings.sentences, settings.seed)
  first, second = (dataclasses.replace(one, chosen=chosen) for one in (first, second))
  return _compare(first, second, ours, theirs, settings)


def check_same_data(
  first: Subject, second: Subject, ours: Reader, theirs: Reader, names: tuple[str, str]
) -> None:
  """Raises a `UserError` unless both models have the same examples in the split."""
  remedy = "Compare runs on the same data."
  for task, name in ((first.task, names[0]), (second.task, names[1])):
    errors.check(
      first.split in task.dataset.splits(),
      f"--split is {first.split!r}, but {name} has only {', '.join(task.dataset.splits())}."
      f" {remedy}",
    )
  errors.check(
    ours.streams == theirs.streams,
    f"{names[0]} is {first.task.describe()} {names[1]} is {second.task.describe()} They have"
    f" different tasks. {remedy}",
  )
  for stream in ours.streams:
    texts = [read.texts(stream, first.split) for read in (ours, theirs)]
    errors.check(
      len(texts[0]) == len(texts[1]),
      f"The split {first.split!r} has {len(texts[0])} examples in {names[0]} and {len(texts[1])} in"
      f" {names[1]}. {remedy}",
    )
    for number, (one, other) in enumerate(zip(*texts, strict=True)):
      errors.check(
        one == other,
        f"Example {number} of the split {first.split!r} ({stream}) is {one[:60]!r} in {names[0]}"
        f" and {other[:60]!r} in {names[1]}. {remedy}",
      )
  if isinstance(ours, MaskedReader) and isinstance(theirs, MaskedReader):
    configs = [read.task.dataset.config for read in (ours, theirs)]
    masks = [f"{one.masking} and task.mask_seed = {one.mask_seed}" for one in configs]
    errors.check(
      masks[0] == masks[1],
      f"The models predict different tokens: {names[0]} has {masks[0]}, {names[1]} has {masks[1]}."
      " Compare runs with the same masks.",
    )


def _compare(
  first: Subject, second: Subject, ours: Reader, theirs: Reader, settings: Compare
) -> Compared:
  chosen, same = first.numbers, _same_tokens(ours, theirs)
  measured = {"loss": _losses(first, second, ours, theirs, same)}
  outputs: dict[int, tuple[str, str]] = {}
  if settings.decode and translates(first, ours) and translates(second, theirs):
    numbers = drawn(chosen, settings.decode, settings.seed)
    outputs, scores = _scores(first, second, ours, theirs, numbers)
    measured |= scores
  groups = [
    _group(kind, name, numbers, measured, settings)
    for kind, name, numbers in subsets_of(first, ours)
  ]
  matchings = []
  if same and (modules := routes.shared_modules(first, second)):
    matchings = routes.match(first, second, modules)
  changed = _changed(measured, outputs, settings.shown)
  if matchings and changed:
    numbers = [change.number for change in changed]
    one, other = (dataclasses.replace(model, chosen=numbers) for model in (first, second))
    routing = routes.differences(one, other, ours, matchings)
    changed = [change._replace(routing=routing[change.number]) for change in changed]
  signatures = {name: both.first.signature for name, both in measured.items() if name != "loss"}
  per = "token" if same else "word"
  return Compared(per, groups, changed, matchings, len(outputs), signatures)


def _same_tokens(ours: Reader, theirs: Reader) -> bool:
  prints = [
    [read.tokenizer(stream).fingerprint for stream in read.streams] for read in (ours, theirs)
  ]
  return prints[0] == prints[1]


def _losses(first: Subject, second: Subject, ours: Reader, theirs: Reader, same: bool) -> Measured:
  """Losses of all chosen sentences, per token where both have the same tokens, else per word."""
  one, counts = sentence_losses(first, ours)(first.params, {})
  other, others = sentence_losses(second, theirs)(second.params, {})
  numbers = first.numbers
  if same:
    differ = np.flatnonzero(counts != others)
    errors.check(
      not len(differ),
      f"The models predict different tokens: {len(differ)} of {len(numbers)} examples have other"
      " numbers of them in the second, so that losses do not compare. Compare runs that predict the"
      " same tokens.",
    )
  else:
    texts = ours.texts(ours.streams[-1], first.split)
    counts = np.array([len(texts[int(number)].split()) + 1.0 for number in numbers])
  return Measured(numbers, loss_statistics(one, counts), loss_statistics(other, counts))


def _scores(
  first: Subject, second: Subject, ours: Reader, theirs: Reader, numbers: np.ndarray
) -> tuple[dict[int, tuple[str, str]], dict[str, Measured]]:
  """Number -> both outputs; and measure -> statistics."""
  before, references = decoded(first, ours, numbers, name="with the first model")
  after, _ = decoded(second, theirs, numbers, name="with the second model")
  names: tuple[MetricName, ...] = ("bleu", "chrf", "exact_match")
  measured = {
    name: Measured(
      numbers,
      sentence_statistics(name, before, references),
      sentence_statistics(name, after, references),
    )
    for name in names
  }
  outputs = zip(numbers.tolist(), zip(before, after, strict=True), strict=True)
  return dict(outputs), measured


def _group(
  kind: str, name: str, numbers: np.ndarray, measured: Mapping[str, Measured], settings: Compare
) -> Group:
  """Scores of a group."""
  values = {}
  for measure, both in measured.items():
    inside = np.flatnonzero(np.isin(both.numbers, numbers))
    if measure == "loss":  # examples without a token have none
      inside = inside[both.first.rows[inside, 1] > 0]
    if len(inside) >= (1 if kind == "all" else _LEAST):
      one, other = both.first.part(inside), both.second.part(inside)
      found = paired_bootstrap(one, other, seed=settings.seed, samples=settings.samples)
      values[measure] = Scores(one.score().value, other.score().value, found, len(inside))
  return Group(kind, name, numbers, values)


def _changed(
  measured: Mapping[str, Measured], outputs: Mapping[int, tuple[str, str]], shown: int
) -> list[Changed]:
  """The sentences whose chrF (or loss, where nothing was decoded) changed most."""
  every = {
    name: {
      int(number): (float(one), float(other))
      for number, one, other in zip(
        both.numbers,
        both.first.values(both.first.rows),
        both.second.values(both.second.rows),
        strict=True,
      )
    }
    for name, both in measured.items()
    if name in ("loss", "chrf")
  }
  decisive = every.get("chrf", every["loss"])
  change = {number: abs(other - one) for number, (one, other) in decisive.items()}
  # Examples without a token have no loss, and have not changed: their NaN is not above 0.
  those = [number for number in change if change[number] > 0]
  order = sorted(those, key=lambda number: (-change[number], number))
  return [
    Changed(
      number,
      *outputs.get(number, (None, None)),
      {name: values[number] for name, values in every.items()},
      [],
    )
    for number in order[:shown]
  ]
