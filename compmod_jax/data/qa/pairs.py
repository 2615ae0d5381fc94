"""Pairs of a source and a target, read as questions and answers."""

import dataclasses

from compmod_jax.core.errors import check
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.question import Question, Questions
from compmod_jax.data.sources.text_to_text import PairData
from compmod_jax.data.synthetic.scan import ScanData
from compmod_jax.metrics.qa import normalise


@dataclasses.dataclass(frozen=True)
class PairQuestions:
  """Data of the translation task as a set of extractive questions: the target answers the source.

  So models that answer questions are scored on what encoder-decoders are scored on. Exact match is
  that of questions, which leaves out case, punctuation and articles (`metrics.qa.normalise`); data
  of which that would make different words the same are refused.
  """

  name: str = "pairs"
  """What tables call the set."""
  data: PairData = dataclasses.field(default_factory=ScanData)
  """The pairs."""

  def __post_init__(self) -> None:
    check(bool(self.name), "name is empty; name the set.")

  def splits(self) -> tuple[str, ...]:
    """Those of the pairs."""
    return self.data.splits()

  def load(self, split: str) -> Questions:
    """The questions of a split.

    Raises:
      UserError: unknown split.
      DataError: a source or a target is empty, or words of targets differ only in what exact match
        leaves out.
    """
    pairs = self.data.load(split)
    known: dict[str, str] = {}
    for number, (source, target) in enumerate(zip(pairs.source, pairs.target, strict=True)):
      if not source.strip() or not target.strip():
        raise DataError(f"{pairs.where(number)} has an empty side; every question has an answer.")
      for word in target.split():
        other = known.setdefault(normalise(word), word)
        if other != word or not normalise(word):
          raise DataError(
            f"{pairs.where(number)} has the word {word!r}, which exact match of questions does not"
            f" tell from {'nothing' if other == word else repr(other)}. Use the translation task."
          )
    items = [
      Question("extractive", source, answers=(target,), info=pairs.info[i] if pairs.info else {})
      for i, (source, target) in enumerate(zip(pairs.source, pairs.target, strict=True))
    ]
    return Questions(items, pairs.where)

  def describe(self) -> str:
    """What is asked, in a sentence."""
    return f"Sources of pairs as questions ({type(self.data).__name__})."
