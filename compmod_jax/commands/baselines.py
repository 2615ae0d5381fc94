"""Scores what needs no training: what a trained model must be better than.

    python -m train.baselines --config configs/nmt_cah.py --split test

Of translation, two baselines on raw text: every word replaced by its entry in a dictionary (the
grammar's own, or one learnt from the training pairs), and the translation of the most similar
training sentence. Of question answering, what `compmod_jax.data.qa.baselines` has: the share of
exact answers from the question alone, the last sentence and other tricks, beside chance; and of
every set what the words answer that question, options and passage share (`data.qa.overlap`).
Of few-shot classification, the nearest mean of the raw examples of each class.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from compmod_jax.commands import cli
from compmod_jax.commands.config_option import parse
from compmod_jax.commands.evaluate import write_json
from compmod_jax.core.errors import check
from compmod_jax.data.base import HasSplits, Pairs
from compmod_jax.tasks.few_shot import FewShotConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, translation_task

if TYPE_CHECKING:
  from compmod_jax.data.qa.mixed import Mixed
  from compmod_jax.data.qa.question import Format, Question

COLUMNS = ("split", "sentences", "bleu", "interval", "chrf", "exact_match")
HEADINGS = ("split", "sentences", "BLEU", "95 % interval", "chrF", "exact match")
_LEARNT = 2_000  # training questions of a format that the regression on shared words learns from
_CHECKED = 240  # validation questions of each set that its penalty is chosen on
_SHORT = {
  "multiple_choice": "choice",
  "yes_no": "yes/no",
  "extractive": "extr.",
  "abstractive": "abstr.",
}


@dataclasses.dataclass(frozen=True)
class Args:
  """Scores baselines that need no training."""

  config: Experiment
  """The experiment whose data are used."""
  splits: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--split"])] = ()
  """Names of splits; none: all but the training split."""
  questions: int = 20_000
  """Training questions of each set that the baselines of question answering learn from, at most."""
  json: Path | None = None
  """Also write all numbers to this file."""


def main(argv: list[str]) -> None:
  """Scores the baselines and prints a table."""
  args = parse(Args, argv)
  check(args.questions >= 1, f"--questions is {args.questions}; it must be at least 1.")
  task = args.config.task
  if isinstance(task, AnsweringConfig):
    rows = answer_rows(task.data, args.splits, args.questions)
    print(answer_table(rows))
  elif isinstance(task, FewShotConfig):
    rows = episode_rows(task, args.splits)
    print(episode_table(rows))
  else:
    rows = score(translation_task(args.config).data, args.splits)
    print(table(rows))
  if args.json is not None:
    command = cli.command("baselines", argv)
    write_json(args.json, {"name": args.config.name, "command": command, "rows": rows})


def episode_rows(task: FewShotConfig, splits: Sequence[str]) -> list[dict[str, Any]]:
  """Scores of the nearest mean of raw examples; see `analysis.nearest_examples`.

  Args:
    task: the classes, and the episodes on which models are scored.
    splits: names; none for all but the training split.

  Raises:
    UserError: an unknown split, or data that cannot be read.
  """
  from compmod_jax.analysis.nearest_examples import nearest_mean_scores
  from compmod_jax.data.class_episodes import ClassEpisodes

  dataset = ClassEpisodes(task)
  splits = splits or [split for split in dataset.splits() if split != "train"]
  ways = dict.fromkeys((task.episodes.ways, *task.also_ways))
  return nearest_mean_scores(dataset, splits, tuple(ways), task.evaluate_episodes)


def episode_table(rows: Sequence[dict[str, Any]]) -> str:
  """The scores as aligned plain text."""
  shown = [("baseline", "split", "ways", "episodes", "accuracy", "95 % interval")]
  for row in rows:
    low, mid, high = (
      f"{100 * row[name]:.1f}" for name in ("accuracy_low", "accuracy", "accuracy_high")
    )
    sizes = str(row["ways"]), f"{row['episodes']:,}"
    shown.append((row["baseline"], row["split"], *sizes, mid, f"{low} to {high}"))
  return "\n".join([*_aligned(shown), "Accuracy in per cent."])


def score(data: HasSplits, splits: Sequence[str] = ()) -> list[dict[str, Any]]:
  """Scores of every baseline on every split, as `score_outputs` names them.

  Args:
    data: a data configuration.
    splits: names; none for all but the training split.

  Raises:
    UserError: an unknown split, or data that cannot be read.
  """
  from compmod_jax.core.errors import check_choice
  from compmod_jax.metrics.text import score_outputs

  splits = splits or [split for split in data.splits() if split != "train"]
  for split in splits:
    check_choice("--splits", split, data.splits())
  pairs = {split: data.load(split) for split in splits}
  train = data.load("train")
  return [
    {
      "baseline": name,
      "split": split,
      "sentences": len(pairs[split]),
      **score_outputs(translate(list(pairs[split].source)), list(pairs[split].target)),
    }
    for name, translate in _baselines(data, train).items()
    for split in splits
  ]


def _baselines(data: HasSplits, train: Pairs) -> dict[str, Callable[[list[str]], list[str]]]:
  """Name -> from sources to outputs."""
  from compmod_jax.analysis.baselines import (
    learn_dictionary,
    nearest_training_sentence,
    word_by_word,
  )
  from compmod_jax.data.synthetic.grammar import GrammarData, dictionary

  sources, targets = list(train.source), list(train.target)
  if isinstance(data, GrammarData):
    name, words = "word by word, the grammar's dictionary", dictionary(data.direction)
  else:
    name, words = "word by word, learnt dictionary", learn_dictionary(sources, targets)
  return {
    name: lambda texts: word_by_word(words, texts),
    "nearest training sentence": lambda texts: nearest_training_sentence(sources, targets, texts),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """The scores as aligned plain text, with the signatures below."""
  from compmod_jax.analysis.report.results import cells, signatures

  shown: list[tuple[str, ...]] = [("baseline", *HEADINGS)]
  for row in rows:
    texts = cells(row, "-", "-")  # type: ignore[arg-type]
    shown.append((row["baseline"], *(texts[column] for column in COLUMNS)))
  lines = _aligned(shown)
  first = [row for row in rows if row["baseline"] == rows[0]["baseline"]]
  found = signatures({"name": "baselines", "splits": first})  # type: ignore[typeddict-item]
  return "\n".join([*lines, *(f"{metric}: {text}" for metric, text, _ in found)])


def _aligned(shown: Sequence[Sequence[str]]) -> list[str]:
  """Lines of a table, the first two columns to the left, with a rule below the headings."""
  widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
  lines = [
    "  ".join(
      cell.ljust(width) if column < 2 else cell.rjust(width)
      for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in shown
  ]
  lines.insert(1, "-" * sum(widths, 2 * len(widths) - 2))
  return lines


def answer_rows(data: "Mixed", splits: Sequence[str], most: int) -> list[dict[str, Any]]:
  """Exact answers of every baseline on every split, in per cent, and what guessing gives.

  Args:
    data: the sets of questions.
    splits: names; none for all but the training split.
    most: training questions of each set to learn from.

  Returns:
    Rows with `baseline`, `split`, `questions` and `exact_match/FORMAT`, or as models are scored,
    `exact_match/FORMAT/FACTS`, where questions tell how many facts they need.

  Raises:
    UserError: an unknown split, or data that cannot be read.
  """
  from compmod_jax.data.qa.baselines import scores
  from compmod_jax.data.synthetic.worlds import CLASSES, WorldsData

  splits = splits or [split for split in data.splits() if split != "train"]
  tests = {split: _questions(data, split) for split in splits}
  train = _questions(data, "train", most)
  kinds = CLASSES if all(isinstance(one, WorldsData) for one in data.seeds) else None
  learnt = train if kinds is None else _like_tests(data, most)
  rows = []
  for split, asked in tests.items():
    found: dict[str, dict[str, Any]] = {}
    for facts, group in _by_facts(asked):
      for one in scores(train, group, kinds):
        cell = f"exact_match/{one.format}" + (f"/{facts}" if facts else "")
        for name, share in (("chance", one.chance), (one.baseline, one.score)):
          row = {"baseline": name, "split": split, "questions": len(asked)}
          found.setdefault(name, row)[cell] = 100 * share
    rows += found.values()
    rows += _overlap_rows(data, split, learnt, worlds=kinds is not None)
  return rows


def _like_tests(data: "Mixed", most: int) -> "list[Question]":
  """Training questions on worlds, with the options of test questions, and one on each story."""
  from compmod_jax.data.synthetic.worlds import WorldsData

  found: list[Question] = []
  for one, name in data.sets("train"):
    assert isinstance(one, WorldsData)
    alike = dataclasses.replace(one, easy_options=0.0, asked=1)
    found += alike.load(name).items[: min(most, 4 * _LEARNT)]
  return found


def _overlap_rows(
  data: "Mixed", split: str, train: "list[Question]", *, worlds: bool
) -> list[dict[str, Any]]:
  """What shared words answer, of every set of a split; trained and chosen on all sets together."""
  from compmod_jax.data.qa.mixed import name_of
  from compmod_jax.data.qa.overlap import gold_answers, overlap_answers

  formats: list[Format] = ["multiple_choice", "yes_no"]
  if worlds:
    formats.append("extractive")
  known = [
    question
    for format in formats
    for question in itertools.islice((q for q in train if q.format == format), _LEARNT)
  ]
  checked = [
    question
    for one, name in data.sets("valid" if "valid" in data.splits() else split)
    if name == "valid"
    for question in one.load(name).items[:_CHECKED]
  ]
  sets = data.sets(split)
  rows: dict[tuple[str, str], dict[str, Any]] = {}
  rights: dict[tuple[str, str, str], list[bool]] = {}
  asked, where = [], []
  for one, name in sets:
    questions = one.load(name).items[:]
    asked += questions
    place = split if len(sets) == 1 else f"{split} {name_of(one)}"
    where += [(place, len(questions))] * len(questions)
  places = {id(question): place for question, place in zip(asked, where, strict=True)}
  for baseline, question, answer in overlap_answers(known, checked, asked, formats):
    place, count = places[id(question)]
    facts = question.info.get("facts", 0)
    cell = f"exact_match/{question.format}" + (f"/{facts}" if facts else "")
    row = {"baseline": baseline, "split": place, "questions": count}
    rows.setdefault((place, baseline), row)
    rights.setdefault((place, baseline, cell), []).append(answer in gold_answers(question))
  for (place, baseline, cell), right in rights.items():
    rows[place, baseline][cell] = 100 * sum(right) / len(right)
  return list(rows.values())


def _questions(data: "Mixed", split: str, most: int | None = None) -> "list[Question]":
  return [q for one, name in data.sets(split) for q in one.load(name).items[:most]]


def _by_facts(questions: "Sequence[Question]") -> "Iterable[tuple[int, list[Question]]]":
  """The questions that need this number of facts; 0 for those that do not tell."""

  def facts(question: "Question") -> int:
    return question.info.get("facts", 0)

  for number, group in itertools.groupby(sorted(questions, key=facts), facts):
    yield number, list(group)


def answer_table(rows: Sequence[dict[str, Any]]) -> str:
  """The scores as aligned plain text."""
  names = dict.fromkeys(name for row in rows for name in row if name.startswith("exact_match/"))
  cells = (name.split("/")[1:] for name in names)
  headings = (" ".join((_SHORT[format], *facts)) for format, *facts in cells)
  shown = [("baseline", "split", "questions", *headings)]
  for row in rows:
    scores = (f"{row[name]:.1f}" if name in row else "-" for name in names)
    shown.append((row["baseline"], row["split"], f"{row['questions']:,}", *scores))
  return "\n".join([*_aligned(shown), "Exact answers in per cent, by format and number of facts."])
