"""Scores a language model on minimal pairs: is the grammatical sentence the likelier one?

    python -m train.minimal_pairs --workdir runs/lm --format gulordava \\
      --file '$COMPMOD_DATA/agreement/generated.tab'
    python -m train.minimal_pairs --workdir runs/lm --format blimp --file blimp.jsonl.gz
    python -m train.minimal_pairs --workdir runs/lm_recoding --format grammar

Formats: gulordava and linzen (number agreement of verbs), blimp, and grammar (the attractors of the
project's own). Prints the accuracy of every group with its 95 % interval, the share of tokens that
are unknown to the model, and the accuracy on those pairs alone that have none.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from compmod_jax.commands import cli
from compmod_jax.commands.evaluate import write_json
from compmod_jax.commands.options import ModelArgs, open_model
from compmod_jax.core.errors import UserError, check
from compmod_jax.training.progress import Progress


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Scores a language model on minimal pairs."""

  format: Literal["gulordava", "linzen", "blimp", "grammar"] = "grammar"
  """What the file is."""
  file: str = ""
  """The file; none for the grammar."""
  treebank: bool = False
  """Bring sentences into the form of the Penn Treebank set: lower case, contractions apart."""
  json: Path | None = None
  """Also write all numbers to this file, each pair's too."""
  quiet: bool = False
  """Show no progress."""


def main(argv: list[str]) -> None:
  """Scores and prints a table."""
  args = cli.options(Args, argv)
  check(
    (args.format == "grammar") == (not args.file),
    f"--format is {args.format} and --file is {args.file!r}; name a file of that format, and none"
    " for the grammar.",
  )
  from compmod_jax.analysis.minimal_pairs import accuracies

  judged = _judge(args)
  found = accuracies(judged)
  print(_table([dataclasses.asdict(one) for one in found]))
  if args.json is not None:
    _write(args, found, judged)


def _judge(args: Args) -> list:
  from compmod_jax.analysis.minimal_pairs import judge
  from compmod_jax.api import RecurrentModel
  from compmod_jax.data.minimal_pairs import attractors, read_minimal_pairs, treebank_style
  from compmod_jax.data.synthetic.grammar import GrammarData

  opened = open_model(args)
  model = opened.model
  if not isinstance(model, RecurrentModel):
    raise UserError(f"The model in {model.folder} is no language model; minimal pairs need one.")
  if args.format == "grammar":
    data = getattr(model.task.dataset.config.data, "grammar", GrammarData())
    pairs = attractors(data)
  else:
    pairs = read_minimal_pairs(args.format, args.file)
  texts = [text for pair in pairs for text in (pair.good, pair.bad)]
  if args.treebank:
    texts = treebank_style(texts, model.tokenizer)
  labels = None
  if model.task.model.classifier is not None:
    labels = [pair.label for pair in pairs for _ in range(2) if pair.label is not None]
    check(
      len(labels) == len(texts),
      "The model recodes by weak supervision, but these pairs have no labels; use --recoding"
      " signal=none, or the grammar's pairs.",
    )
  progress = Progress(0, quiet=args.quiet)

  def status(text: str, done: int | None = None, total: int | None = None) -> None:
    progress.status(text, done, total)

  try:
    scored = model.task.generator.scorer(
      model.task.model, opened.params, texts, labels=labels, sharing=opened.sharing, status=status
    )
  finally:
    progress.close()
  triples = zip(pairs, scored[::2], scored[1::2], strict=True)
  return [judge(pair, good, bad) for pair, good, bad in triples]


def _table(rows: list[dict]) -> str:
  width = max(len(row["group"]) for row in rows)
  lines = [f"{'':{width}}   pairs  accuracy  95 % interval  unknown   known  accuracy  nats"]
  for row in rows:
    known = "" if math.isnan(row["known_accuracy"]) else f"{100 * row['known_accuracy']:.1f} %"
    lines.append(
      f"{row['group']:{width}}  {row['pairs']:6,}  {100 * row['accuracy']:6.1f} %"
      f"  {100 * row['low']:5.1f} - {100 * row['high']:5.1f}  {row['unknown']:5.1f} %"
      f"  {row['known']:6,}  {known:>8}"
      f"  {row['difference']:+.2f}"
    )
  return "\n".join(lines)


def _write(args: Args, found: list, judged: list) -> None:
  from compmod_jax.training.provenance import provenance

  record = {
    "format": args.format,
    "groups": [dataclasses.asdict(one) for one in found],
    "pairs": [
      {
        "where": one.pair.where,
        "difference": one.difference,
        "unknown": one.unknown,
        "tokens": one.tokens,
      }
      for one in judged
    ],
    "provenance": provenance(),
  }
  assert args.json is not None
  write_json(args.json, record)
