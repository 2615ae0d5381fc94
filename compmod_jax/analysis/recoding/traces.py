"""How a recurrent language model reads single sentences, with recoding and without.

The figures of Ulmer 2019, chapters 5 and 6: surprisal word by word, the recoded value between two
words, the error before and after recoding, and what recoding at one step does to later ones.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.subject import Subject
from compmod_jax.api import RecurrentModel, load
from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check
from compmod_jax.data.minimal_pairs import treebank_style
from compmod_jax.data.sources.text import read_lines
from compmod_jax.mechanisms.recoding.config import WITHOUT_UNIT
from compmod_jax.metrics.significance import Mean, mean_interval, unpaired_p
from compmod_jax.tasks.language_model import LanguageModel
from compmod_jax.tasks.scorer import Scored

BITS = 1 / np.log(2)


class Member(NamedTuple):
  """A run: its task, its parameters and the name that it shares with runs of other seeds."""

  name: str
  task: LanguageModel
  params: PyTree


class Reading(NamedTuple):
  """How all runs of a name read all sentences.

  Attributes:
    name: of the runs.
    scored: run -> sentence -> scores.
    recodes: whether they recode.
    unit: of the error signal, "nats" or "no unit".
  """

  name: str
  scored: list[list[Scored]]
  recodes: bool
  unit: str = "nats"

  def values(self, sentence: int, field: str) -> np.ndarray:
    """A quantity of every run at every token of a sentence, [runs, tokens]; bits for `nll`."""
    found = np.stack([getattr(run[sentence], field) for run in self.scored])
    return found * BITS if field.startswith("nll") else found


class Later(NamedTuple):
  """What recoding one step alone does to the steps after it.

  Attributes:
    away: steps after the one that is recoded; 0 is that step, after recoding.
    error: change of the error, mean over sentences, steps and runs, with its interval over
      sentences.
    surprisal: the same of the surprisal, in bits.
  """

  away: int
  error: Mean
  surprisal: Mean


class Traced(NamedTuple):
  """How runs read sentences.

  Attributes:
    sentences: as they were read.
    readings: of every name of runs.
    later: name of runs that recode -> what recoding one step does to later ones.
  """

  sentences: list[str]
  readings: list[Reading]
  later: dict[str, list[Later]]


@dataclasses.dataclass(frozen=True)
class Traces:
  """How a language model reads single sentences: surprisal word by word, errors before and after
  recoding, and what recoding at one step alone does to the steps after it."""

  text: tuple[str, ...] = ()
  """Sentences."""
  file: Path | None = None
  """A file of more sentences, one a line."""
  beside: tuple[str, ...] = ()
  """More runs, as NAME=WORKDIR; runs of one name are seeds of one setting. The first run is called
  `this`, or what `name` says."""
  name: str = "this"
  """Name of the run that `--workdir` gives."""
  treebank: bool = False
  """Bring sentences into the form of the Penn Treebank set."""
  shown: int = 4
  """Number of sentences that have a figure of their own."""
  reach: int = 5
  """Steps after a recoded one that are looked at."""

  def __post_init__(self):
    check(
      bool(self.text) or self.file is not None, "There is nothing to read; give --text or --file."
    )
    check_least(self, "--", reach=1)

  def measure(self, subject: Subject) -> Traced:
    """Reads the sentences with all runs.

    Raises:
      UserError: a run is no language model, or reads text in other tokens than the first.
    """
    members = self._members(subject)
    sentences = self._sentences(members[0].task)
    readings = _read(members, sentences, subject)
    later = {}
    for name in dict.fromkeys(member.name for member in members):
      some = [m for m in members if m.name == name and _recodes(m.task)]
      if some:
        later[name] = _later(some, sentences, self.reach, subject)
    return Traced(sentences, readings, later)

  def _members(self, subject: Subject) -> list[Member]:
    if not isinstance(subject.task, LanguageModel):
      raise UserError("The model is no recurrent language model; traces are of those.")
    members = [Member(self.name, subject.task, subject.params)]
    for given in self.beside:
      name, equals, workdir = given.partition("=")
      check(bool(equals and name), f"--beside has {given!r}; give NAME=WORKDIR.")
      model = load(workdir)
      if not isinstance(model, RecurrentModel):
        raise UserError(f"The model in {workdir} is no recurrent language model.")
      check(
        model.tokenizer.fingerprint == members[0].task.dataset.tokenizer.fingerprint,
        f"The model in {workdir} reads other tokens than the first; compare runs on one data set.",
      )
      members.append(Member(name, model.task, model.params))
    return members

  def _sentences(self, task: LanguageModel) -> list[str]:
    lines = [*self.text]
    if self.file is not None:
      lines += [line for line in read_lines(self.file) if line.strip()]
    if not self.treebank:
      return [" ".join(line.split()) for line in lines]
    return treebank_style(lines, task.dataset.tokenizer)


def _recodes(task: LanguageModel) -> bool:
  return task.model.config.recoding.applies(train=False)


def unit_of(task: LanguageModel) -> str:
  """The unit of a model's error signal, as the axes of figures name it."""
  return "no unit" if task.model.config.recoding.signal in WITHOUT_UNIT else "nats"


def _read(members: Sequence[Member], sentences: list[str], subject: Subject) -> list[Reading]:
  found: dict[str, Reading] = {}
  for member in members:
    recodes = _recodes(member.task)
    reading = found.setdefault(member.name, Reading(member.name, [], recodes, unit_of(member.task)))
    check(
      reading.recodes == recodes,
      f"Runs of the name {member.name!r} differ: some recode, some do not. Give them two names.",
    )
    scored = member.task.generator.scorer(
      member.task.model, member.params, sentences, status=subject.status
    )
    reading.scored.append(scored)
  return list(found.values())


def _scored(task: LanguageModel, params: PyTree, sentences: list[str]) -> list[Scored]:
  return task.generator.scorer(task.model, params, sentences)


def _later(
  members: Sequence[Member], sentences: list[str], reach: int, subject: Subject
) -> list[Later]:
  """Recodes every step of every sentence alone and looks at the steps that follow."""
  errors: dict[int, list[np.ndarray]] = {away: [] for away in range(reach + 1)}
  bits: dict[int, list[np.ndarray]] = {away: [] for away in range(reach + 1)}
  for member in members:
    none = _scored(member.task.recoding(size=0.0, step="constant"), member.params, sentences)
    longest = max(len(one.nll) for one in none)
    sums = np.zeros((2, reach + 1, len(sentences)))
    counts = np.zeros((reach + 1, len(sentences)))
    for step in range(longest):
      some = _scored(member.task.recoding(only=(step,)), member.params, sentences)
      for number, (one, plain) in enumerate(zip(some, none, strict=True)):
        if step >= len(plain.nll):
          continue
        for away in range(min(reach + 1, len(plain.nll) - step)):
          at = step + away
          after = (one.error_after, one.nll_after) if away == 0 else (one.error, one.nll)
          sums[0, away, number] += after[0][at] - plain.error[at]
          sums[1, away, number] += (after[1][at] - plain.nll[at]) * BITS
          counts[away, number] += 1
      subject.status("recoding one step alone", step + 1, longest)
    for away in range(reach + 1):
      seen = counts[away] > 0
      errors[away].append(sums[0, away, seen] / counts[away, seen])
      bits[away].append(sums[1, away, seen] / counts[away, seen])
  # No sentence may be so long that a step has as many after it.
  return [
    Later(
      away,
      mean_interval(np.mean(errors[away], axis=0).tolist()),
      mean_interval(np.mean(bits[away], axis=0).tolist()),
    )
    for away in range(reach + 1)
    if errors[away][0].size
  ]


def differs(first: Reading, other: Reading, sentence: int, field: str = "nll") -> np.ndarray:
  """p-values of a difference between two settings at every token; NaN for single runs.

  A two-tailed t-test over seeds with unequal variances (Welch 1947), not corrected for the number
  of tokens, as in the thesis.
  """
  one, two = first.values(sentence, field), other.values(sentence, field)
  pairs = zip(one.T.tolist(), two.T.tolist(), strict=True)
  return np.array([unpaired_p(*pair) for pair in pairs])


def unknown_tokens(reading: Reading) -> tuple[int, int]:
  """(unknown words, all tokens) of the sentences; the same for all runs."""
  sentences = reading.scored[0]
  return sum(one.unknown for one in sentences), sum(len(one.tokens) for one in sentences)


def rises(reading: Reading) -> Mapping[str, float]:
  """How often recoding raises the error at its own step, and how far it moves it.

  Theorem 1 says: never, for a step of at most 2 / L. Over all tokens of all sentences and runs.
  """
  before = np.concatenate([one.error for run in reading.scored for one in run])
  after = np.concatenate([one.error_after for run in reading.scored for one in run])
  return {
    "tokens": len(before),
    "raised": float(np.mean(after > before + 1e-6)),
    "before": float(np.mean(before)),
    "after": float(np.mean(after)),
  }
