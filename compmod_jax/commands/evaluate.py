"""Scores a trained model on splits of its data: the numbers that training reported.

    python -m train.evaluate --workdir runs/nmt_cah --split test

Prints perplexity per token and per word, BLEU with its 95 % bootstrap interval, chrF and exact
match, with sacreBLEU's signatures, the mean entropy of the predictions in nats and sentences a
second. Without `--split`, all splits but the training split.

A language model is scored on any text, with its own tokenizer, in windows that begin every N
tokens:

    python -m train.evaluate --workdir runs/lm --files ptb.valid.txt --unit line --stride 32

Data that are drawn can be drawn anew:

    python -m train.evaluate --workdir runs/pcfg_set --split test --data_fields seed=1 scored=500
"""

import dataclasses
import glob
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from compmod_jax.commands import cli
from compmod_jax.commands.options import ModelArgs, Opened, changed_fields, open_model
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.training.distributed.multihost import Multihost, joined
from compmod_jax.training.progress import Progress

if TYPE_CHECKING:
  from compmod_jax.tasks.base import Evaluation, Task


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Scores a trained model on splits of its data."""

  splits: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--split"])] = ()
  """Names of splits; none: all but the training split."""
  files: tuple[Path, ...] = ()
  """Text files on which a language model is scored in place of the splits of its data. Of two with
  one name, the results have the paths."""
  unit: Literal["paragraph", "file", "line"] = "line"
  """What a document of these files is: a line, what blank lines part, or a whole file."""
  data_fields: tuple[str, ...] = ()
  """Fields of the data's configuration that differ from training, as NAME=VALUE, for example
  seed=1. What such data share with those of training is not looked for."""
  stride: int | None = None
  """Decoders: windows begin every N tokens, and the last ones of each count; 0: a window."""
  lowercase: bool = False
  """Also BLEU after lower-casing both sides, for comparison with older publications only."""
  json: Path | None = None
  """Also write all numbers to this file."""
  quiet: bool = False
  """Show no progress."""
  multihost: Multihost = Multihost()
  """Several processes that evaluate together, on the devices of all (docs/pods.md)."""


def main(argv: list[str]) -> None:
  """Evaluates and prints a table."""
  args = cli.options(Args, argv)
  without = {"--split": args.splits, "--data_fields": args.data_fields}
  others = " and ".join(name for name, values in without.items() if values)
  check(
    not (args.files and others),
    f"--files is given with {others}, but files are scored in place of the model's own data. Leave"
    f" out --files, or {others}.",
  )
  with joined(args.multihost) as group:
    if not group.primary:
      args = dataclasses.replace(args, quiet=True)
    opened = open_model(args)
    found = _evaluate(opened, args)
    if group.primary:
      _tell(opened, found, args, cli.command("evaluate", argv))


def _tell(opened: Opened, found: "dict[str, Evaluation]", args: Args, command: str) -> None:
  """Prints the table, and writes what is to be written."""
  lowercase = {}
  if args.lowercase:
    from compmod_jax.metrics.text import bleu_lowercase

    lowercase = {
      split: bleu_lowercase(result.outputs, result.references) for split, result in found.items()
    }
  print(_heading(opened))
  print(_table(found))
  for split, score in lowercase.items():
    print(f"{split}: {score}")
  if args.json is not None:
    record = _record(opened, found, command)
    for row in record["splits"]:
      if row["split"] in lowercase:
        score = lowercase[row["split"]]
        row |= {"bleu_lowercase": score.value, "lowercase_signature": score.signature}
    write_json(args.json, record)


def _evaluate(opened: Opened, args: Args) -> "dict[str, Evaluation]":
  from compmod_jax.training.final_evaluation import evaluate_splits

  check(
    not args.lowercase or opened.model.task.generator.decode is not None,
    f"--lowercase is of BLEU, but the model in {opened.model.folder} has no outputs when a split is"
    " scored. Leave it out.",
  )
  task = _with_data(_with_stride(opened.model.task, args.stride), args.data_fields)
  splits = args.splits or task.dataset.final_splits()
  for split in splits:
    check_choice("--split", split, task.dataset.splits())
  progress = Progress(0, quiet=args.quiet)

  def status(text: str, done: int | None = None, total: int | None = None) -> None:
    progress.status(text, done, total)

  def scored(task: "Task", splits: tuple[str, ...]) -> "dict[str, Evaluation]":
    found = {}
    for split in splits:
      began = time.monotonic()
      one = evaluate_splits(task, opened.params, (split,), sharing=opened.sharing, status=status)
      count = one[split].values.get("sentences")
      if count:
        one[split].values["sentences_per_second"] = count / (time.monotonic() - began)
      found |= one
    return found

  try:
    if not args.files:
      return scored(task, splits)
    files = list(dict.fromkeys(args.files))
    names = [file.name for file in files]
    tasks = {
      file.name if names.count(file.name) == 1 else str(file): _on_file(task, file, args.unit)
      for file in files
    }
    return {name: scored(one, ("valid",))["valid"] for name, one in tasks.items()}
  finally:
    progress.close()


def _with_stride(task: "Task", stride: int | None) -> "Task":
  """The task whose windows begin at every multiple of this number of tokens.

  Raises:
    UserError: it has no windows, or a window is shorter.
  """
  if stride is None:
    return task
  check(
    hasattr(task.dataset.config, "stride"),
    "--stride is for decoders, whose text is scored in windows; leave it out for this model.",
  )
  return _rebuilt(task, stride=stride)


def _with_data(task: "Task", fields: tuple[str, ...]) -> "Task":
  """The task on data whose configuration differs in these fields.

  Raises:
    UserError: the data have no fields, or none of this name, or it cannot have this value.
  """
  if not fields:
    return task
  check(
    hasattr(task.dataset.config, "data"),
    "--data_fields: the configuration of this model's task has no data of its own. Leave it out.",
  )
  return _rebuilt(task, data=changed_fields(task.dataset.config.data, fields, "--data_fields"))


def _on_file(task: "Task", file: Path, unit: Literal["paragraph", "file", "line"]) -> "Task":
  """The task of a language model on another text.

  Raises:
    UserError: there is no such file, or the task is not on running text.
  """
  from compmod_jax.data.sources.documents import TextDocuments
  from compmod_jax.data.text_tokenizer import DocumentData

  check(file.is_file(), f"--files: there is no file {file}. Give the paths of text files.")
  check(
    isinstance(getattr(task.dataset.config, "data", None), DocumentData),
    "--files is for language models, but this model was trained on something else than running"
    " text. Leave it out.",
  )
  data = TextDocuments(folder=str(file.parent), valid=(glob.escape(file.name),), unit=unit)
  return _rebuilt(task, data=data)


def _rebuilt(task: "Task", **changes: object) -> "Task":
  """The task with another configuration, the model and the tokenizer as they are."""
  config = dataclasses.replace(task.dataset.config, **changes)
  return config.build(task.model.config, files=task.dataset.files()).edited(task.model.edits)


def _heading(opened: Opened) -> str:
  decode, folder = opened.model.task.generator.decode, opened.model.folder
  model = f"{folder} (step {opened.model.meta.get('step', '?')})"
  if decode is None:
    return f"{model}\n"
  return f"{model}, {decode.describe()}\n"


def _table(found: "dict[str, Evaluation]") -> str:
  from compmod_jax.analysis.report.results import table
  from compmod_jax.training.final_evaluation import split_result

  rows = [split_result(split, result) for split, result in found.items()]
  return table({"name": "evaluation", "splits": rows})


def _record(opened: Opened, found: "dict[str, Evaluation]", command: str) -> dict[str, Any]:
  """All numbers, and what they belong to."""
  from compmod_jax.training.provenance import provenance

  meta, decode = opened.model.meta, opened.model.task.generator.decode
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
  from compmod_jax.analysis.report.results import plain
  from compmod_jax.core import durable

  data = (json.dumps(plain(record), indent=2) + "\n").encode()
  try:
    if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/stdout
      path.write_bytes(data)
    else:
      durable.write(path, [data])
  except OSError as error:
    raise UserError(
      f"--json {path} cannot be written: {error.strerror}. Choose another file."
    ) from error
