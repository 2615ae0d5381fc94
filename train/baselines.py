"""Scores what needs no training: what a trained model must be better than.

    python -m train.baselines --config configs/nmt_cah.py --split test

Two baselines on raw text: every word replaced by its entry in a dictionary (the grammar's own, or
one learnt from the training pairs), and the translation of the most similar training sentence.
"""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from train import cli
from train.evaluate import write_json
from train.experiment import Experiment, parse, translation_task

COLUMNS = ("split", "sentences", "bleu", "interval", "chrf", "exact_match")
HEADINGS = ("split", "sentences", "BLEU", "95 % interval", "chrF", "exact match")


@dataclasses.dataclass(frozen=True)
class Args:
  """Scores baselines that need no training."""

  config: Experiment
  """The experiment whose data are used."""
  splits: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--split"])] = ()
  """Names of splits; none: all but the training split."""
  json: Path | None = None
  """Also write all numbers to this file."""


def main(argv: list[str]) -> None:
  """Scores the baselines and prints a table."""
  args = parse(Args, argv)
  task = translation_task(args.config)
  rows = score(task.data, args.splits)
  print(table(rows))
  if args.json is not None:
    command = shlex.join(["python", "-m", "train.baselines", *argv])
    write_json(args.json, {"name": args.config.name, "command": command, "rows": rows})


def score(data: Any, splits: Sequence[str] = ()) -> list[dict[str, Any]]:
  """Scores of every baseline on every split, as `score_outputs` names them.

  Args:
    data: a data configuration.
    splits: names; none for all but the training split.

  Raises:
    UserError: an unknown split, or data that cannot be read.
  """
  from compmod_jax.errors import check_choice
  from compmod_jax.metrics import score_outputs

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


def _baselines(data: Any, train: Any) -> dict[str, Callable[[list[str]], list[str]]]:
  """Name -> from sources to outputs."""
  from compmod_jax.analysis.baselines import (
    learn_dictionary,
    nearest_training_sentence,
    word_by_word,
  )
  from compmod_jax.data.grammar import GrammarData, dictionary

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
  from compmod_jax.analysis.results import cells, signatures

  shown: list[tuple[str, ...]] = [("baseline", *HEADINGS)]
  for row in rows:
    texts = cells(row, "-", "-")  # type: ignore[arg-type]
    shown.append((row["baseline"], *(texts[column] for column in COLUMNS)))
  widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
  lines = [
    "  ".join(
      cell.ljust(width) if column < 2 else cell.rjust(width)
      for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in shown
  ]
  lines.insert(1, "-" * sum(widths, 2 * len(widths) - 2))
  first = [row for row in rows if row["baseline"] == rows[0]["baseline"]]
  found = signatures({"name": "baselines", "splits": first})  # type: ignore[typeddict-item]
  return "\n".join([*lines, *(f"{metric}: {text}" for metric, text, _ in found)])


if __name__ == "__main__":
  cli.run(main)
