"""Scores a trained model on splits of its data: the numbers that training reported.

    python -m train.evaluate --workdir runs/nmt_cah --split test

Prints perplexity per token and per word, BLEU with its 95 % bootstrap interval, chrF and exact
match, with sacreBLEU's signatures. Without `--splits`, all splits but the training split.
"""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from train import cli
from train.progress import Progress
from train.trained import ModelArgs, Opened, open_model

if TYPE_CHECKING:
  from compmod_jax.tasks.base import Evaluation


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Scores a trained model on splits of its data."""

  splits: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--split"])] = ()
  """Names of splits; none: all but the training split."""
  lowercase: bool = False
  """Also BLEU after lower-casing both sides, for comparison with older publications only."""
  json: Path | None = None
  """Also write all numbers to this file."""
  quiet: bool = False
  """Show no progress."""


def main(argv: list[str]) -> None:
  """Evaluates and prints a table."""
  args = cli.options(Args, argv)
  opened = open_model(args)
  found = _evaluate(opened, args)
  lowercase = {}
  if args.lowercase:
    from compmod_jax.metrics import bleu_lowercase

    lowercase = {
      split: bleu_lowercase(result.outputs, result.references) for split, result in found.items()
    }
  print(_heading(opened))
  print(_table(found))
  for split, score in lowercase.items():
    print(f"{split}: {score}")
  if args.json is not None:
    record = _record(opened, found, shlex.join(["python", "-m", "train.evaluate", *argv]))
    for row in record["splits"]:
      if row["split"] in lowercase:
        score = lowercase[row["split"]]
        row |= {"bleu_lowercase": score.value, "lowercase_signature": score.signature}
    write_json(args.json, record)


def _evaluate(opened: Opened, args: Args) -> "dict[str, Evaluation]":
  from compmod_jax.errors import check_choice
  from train.finish import evaluate_splits

  task = opened.model.task
  splits = args.splits or task.final_splits()
  for split in splits:
    check_choice("--splits", split, task.split_names())
  progress = Progress(0, quiet=args.quiet)

  def status(text: str, done: int | None = None, total: int | None = None) -> None:
    progress.status(text, done, total)

  try:
    return evaluate_splits(task, opened.params, splits, sharing=opened.sharing, status=status)
  finally:
    progress.close()


def _heading(opened: Opened) -> str:
  decode, folder = opened.model.task.decode, opened.model.folder
  model = f"{folder} (step {opened.model.meta.get('step', '?')})"
  if decode is None:
    return f"{model}\n"
  how = {"beam": f"beam search with {decode.beams} beams", "greedy": "greedy search"}
  how = how.get(decode.method, f"one draw at temperature {decode.temperature:g}")
  penalty = f", length penalty {decode.length_penalty:g}" if decode.method == "beam" else ""
  return f"{model}, {how}{penalty}\n"


def _table(found: "dict[str, Evaluation]") -> str:
  from compmod_jax.analysis.results import table
  from train.finish import split_result

  rows = [split_result(split, result) for split, result in found.items()]
  return table({"name": "evaluation", "splits": rows})


def _record(opened: Opened, found: "dict[str, Evaluation]", command: str) -> dict[str, Any]:
  """All numbers, and what they belong to."""
  from train.provenance import provenance

  meta, decode = opened.model.meta, opened.model.task.decode
  return {
    "name": meta.get("name", ""),
    "command": command,
    "model": str(opened.model.folder),
    "step": meta.get("step"),
    "decode": None if decode is None else dataclasses.asdict(decode),
    "splits": [{"split": split, **result.values} for split, result in found.items()],
    "provenance": provenance(),
  }


def write_json(path: Path, record: dict[str, Any]) -> None:
  """Writes a record as strict JSON.

  Raises:
    UserError: the file cannot be written.
  """
  from compmod_jax.analysis.results import plain
  from compmod_jax.errors import UserError

  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(record), indent=2) + "\n")
  except OSError as error:
    raise UserError(
      f"--json {path} cannot be written: {error.strerror}. Choose another file."
    ) from error


if __name__ == "__main__":
  cli.run(main)
