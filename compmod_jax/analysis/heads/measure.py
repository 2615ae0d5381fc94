"""What heads and experts do: the analyses of Kolios 2023, section 5.4, on a split of a data set."""

import dataclasses
from typing import NamedTuple

from compmod_jax.analysis.heads.findings import Finding, findings
from compmod_jax.analysis.heads.sums import Sampling, collect, untrained
from compmod_jax.analysis.labels import Labels, labels_of
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least


class Measured(NamedTuple):
  """What heads and experts do.

  Attributes:
    labels: stream -> the categories of its tokens.
    findings: of every module.
  """

  labels: dict[str, list[Labels]]
  findings: list[Finding]


@dataclasses.dataclass(frozen=True)
class Heads:
  """What heads and experts do: weights and norms by position, word and part of speech; how far they
  specialise, beside shuffled categories; whether norms cancel weights; which ones are redundant."""

  words: tuple[str, ...] = ()
  """Words that are categories of their own, whatever their case."""
  frequent: int = 12
  """Number of the most frequent other words that are categories."""
  positions: int = 12
  """Number of first positions that are categories."""
  shuffles: int = 20
  """Shuffles of the categories, as a control."""
  untrained: bool = True
  """Also measure the same model with fresh parameters, as another control."""

  def __post_init__(self):
    check_least(self, "--", frequent=0, positions=1, shuffles=1)

  def measure(self, subject: Subject) -> Measured:
    """Measures the model on a split, and the same model with fresh parameters.

    Raises:
      UserError: the split has nothing to read, or gold tags do not fit its words.
    """
    read = reader(subject.task)
    errors.check(
      bool(subject.modules),
      "The model has neither heads nor experts: none of its sites ends in heads or experts.",
    )
    config = subject.task.model.config
    errors.check(
      not any(config.auxiliary_at(module.outputs) for module in subject.modules),
      "The model has auxiliary tokens, which are no words and have no category; this analysis does"
      " not read them. Use `python -m train.analyse roles`, which does.",
    )
    labels = {
      stream: labels_of(
        subject,
        read,
        stream,
        words=self.words,
        frequent=self.frequent,
        positions=self.positions,
      )
      for stream in read.streams
    }
    sampling = Sampling(shuffles=self.shuffles, seed=subject.seed)
    totals = collect(subject, read, labels, sampling)
    routed = [module for module in subject.modules if module.routed]
    before = []
    if self.untrained and routed:
      fresh = dataclasses.replace(sampling, shuffles=0)
      before = collect(subject, read, labels, fresh, params=untrained(subject), modules=routed)
    return Measured(labels, findings(totals, before))
