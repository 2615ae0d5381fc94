"""Running text to train on, beside other texts that are only scored."""

import dataclasses

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.sources.documents import (
  Documents,
  GrammarDocuments,
  TextDocuments,
  TfdsDocuments,
)


@dataclasses.dataclass(frozen=True)
class Unseen:
  """A text that no model is trained on."""

  name: str
  """The name of its split."""
  data: TextDocuments
  """Where its files are."""
  split: str = "valid"
  """Which split of `data` is scored."""


@dataclasses.dataclass(frozen=True)
class WithUnseen:
  """Documents to train on, and others that are only scored, at the end: zero-shot."""

  data: GrammarDocuments | TextDocuments | TfdsDocuments = GrammarDocuments()
  """What is trained on."""
  unseen: tuple[Unseen, ...] = ()
  """What else is scored, each as a split of its own."""

  def __post_init__(self) -> None:
    names = self.splits()
    check(
      len(set(names)) == len(names),
      f"The splits would be called {', '.join(names)}; give each text of data.unseen another.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`: those of `data`, and a split for every unseen text."""
    return (*self.data.splits(), *(text.name for text in self.unseen))

  def describe(self) -> str:
    """What the documents are, in a few words."""
    return self.data.describe()

  def load(self, split: str) -> Documents:
    """The documents of a split.

    Raises:
      UserError: unknown split, or what the data it belongs to raise.
    """
    check_choice("split", split, self.splits())
    for text in self.unseen:
      if text.name == split:
        return text.data.load(text.split)
    return self.data.load(split)
