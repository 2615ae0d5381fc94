"""Several sets of questions as one source: those to train on, and those that are only scored."""

import dataclasses
import itertools

from compmod_jax.core import errors
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.pairs import PairQuestions
from compmod_jax.data.qa.tfds_sets import TfdsQA
from compmod_jax.data.synthetic.worlds import WorldsData

QuestionData = WorldsData | QASet | TfdsQA | PairQuestions
UNSEEN = "unseen"


@dataclasses.dataclass(frozen=True)
class Mixed:
  """Sets of questions that are drawn from with equal probability, and scored one by one."""

  seeds: tuple[QuestionData, ...] = (WorldsData(),)
  """Sets to train on; their other splits are scored."""
  unseen: tuple[QuestionData, ...] = ()
  """Sets that are only scored, at the end, as the split `unseen`: on their test split, or on valid
  where they have none."""

  def __post_init__(self):
    errors.check(bool(self.seeds), "task.data.seeds is empty; give at least one set to train on.")
    names = [name_of(data) for data in (*self.seeds, *self.unseen)]
    errors.check(
      len(set(names)) == len(names),
      f"The sets of task.data are called {', '.join(names)}; scores need different names.",
    )

  def splits(self) -> tuple[str, ...]:
    """All splits that any set has, and `unseen` if there are unseen sets."""
    names = dict.fromkeys(itertools.chain(*(data.splits() for data in self.seeds)))
    return (*names, UNSEEN) if self.unseen else tuple(names)

  def sets(self, split: str) -> list[tuple[QuestionData, str]]:
    """The sets that a split consists of, and what each of them calls it.

    Raises:
      UserError: an unknown split.
    """
    errors.check_choice("split", split, self.splits())
    if split == UNSEEN:
      return [(data, "test" if "test" in data.splits() else "valid") for data in self.unseen]
    return [(data, split) for data in self.seeds if split in data.splits()]

  def describe(self) -> str:
    """What the sets are, in a sentence."""
    if len(self.seeds) == 1:
      return self.seeds[0].describe().rstrip(".")
    return f"questions of {', '.join(map(name_of, self.seeds))}, each drawn as often"


def name_of(data: QuestionData) -> str:
  """What tables call a set."""
  return "worlds" if isinstance(data, WorldsData) else data.name
