"""Translates standard input, line by line, to standard output.

    python -m train.predict --workdir runs/nmt_cah < source.txt > translation.txt

Line n of the output is the translation of line n of the input, blank lines included. What else is
to be said goes to standard error.

    --scores     each line is: score, tab, translation
    --nbest n    n lines for each input line, best first: number of the input line (from 1), tab,
                 score, tab, translation; where fewer were found, the rest have the score -inf

A score is the log-probability in nats over length ** length_penalty. With `--method sample`, what
is drawn depends on `--seed` and `--chunk`.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from train import cli
from train.progress import Progress
from train.trained import ModelArgs, Opened, open_model

if TYPE_CHECKING:
  from compmod_jax.tasks.translator import Hypothesis


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Translates standard input, line by line, to standard output."""

  nbest: int = 1
  """Translations of each line; more than 1 also writes line numbers and scores."""
  scores: bool = False
  """Write the score and a tab before each translation."""
  seed: int = 0
  """Of the method sample."""
  chunk: int = 1000
  """Lines that are read before they are translated and written; 1 at a terminal."""
  quiet: bool = False
  """Show no progress; warnings are shown."""


def main(argv: list[str]) -> None:
  """Translates standard input."""
  args = cli.options(Args, argv)
  opened = open_model(args, n_best=args.nbest)
  terminal = sys.stdin.isatty()
  progress = Progress(0, quiet=args.quiet or terminal or sys.stdout.isatty())
  output = sys.stdout.buffer
  first = 0
  try:
    for lines in _chunks(sys.stdin.buffer, 1 if terminal else max(1, args.chunk)):
      sentences = _read(lines, first, opened)
      found = _translate(opened, sentences, args.seed, first, progress)
      for number, hypotheses in enumerate(found, start=first + 1):
        output.write(_format(number, hypotheses, args).encode())
      output.flush()
      first += len(lines)
    progress.status("translated lines", first, first)
  finally:
    progress.close()


def _chunks(stream: IO[bytes], size: int) -> Iterator[list[bytes]]:
  # Binary, because text streams also end lines at carriage returns.
  while lines := list(itertools.islice(stream, size)):
    yield lines


def _read(lines: list[bytes], first: int, opened: Opened) -> list[str]:
  """The sentences of a chunk; warns of what could not be read or will be cut."""
  sentences = []
  damaged = []
  for number, line in enumerate(lines, start=first + 1):
    try:
      text = line.decode()
    except UnicodeDecodeError:
      text = line.decode(errors="replace")
      damaged.append(number)
    sentences.append((text.removeprefix("\ufeff") if number == 1 else text).strip())
  _warn(damaged, "is not UTF-8; what could not be read was replaced")
  ceiling = opened.model.task.batch.longest - 1
  encoded = opened.model.source_tokenizer.encode_batch(sentences)
  long = [first + i for i, ids in enumerate(encoded, start=1) if len(ids) > ceiling]
  _warn(long, f"has more than {ceiling} tokens, as no training sentence had; the rest was cut off")
  return sentences


def _warn(numbers: list[int], what: str) -> None:
  if numbers:
    more = f" (and {len(numbers) - 1} more: {numbers[1:6]})" if len(numbers) > 1 else ""
    print(f"warning: line {numbers[0]} {what}{more}", file=sys.stderr, flush=True)


def _translate(
  opened: Opened, sentences: list[str], seed: int, first: int, progress: Progress
) -> "list[list[Hypothesis]]":
  import jax

  return opened.model.task.translator(
    opened.params,
    sentences,
    opened.model.task.decode,
    sharing=opened.sharing,
    rng=jax.random.fold_in(jax.random.key(seed), first),
    status=lambda text, done=0, total=None: progress.status(
      "translated lines", first + (done or 0), None
    ),
  )


def _format(number: int, hypotheses: "list[Hypothesis]", args: Args) -> str:
  """The output lines of an input line."""
  rows = [(hypothesis.score, _one_line(hypothesis.text)) for hypothesis in hypotheses]
  rows += [(float("-inf"), "")] * (args.nbest - len(rows))
  if args.nbest > 1:
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in rows)
  return "".join(f"{score:.4f}\t{text}\n" if args.scores else f"{text}\n" for score, text in rows)


def _one_line(text: str) -> str:
  """The text without what would break a line or a column apart."""
  return text.translate(dict.fromkeys(map(ord, "\n\r\t"), " "))


if __name__ == "__main__":
  cli.run(main)
