"""Runs a model on standard input, line by line, to standard output.

    python -m train.predict --workdir runs/nmt_cah < source.txt > translation.txt
    echo "The <mask> sleeps." | python -m train.predict --workdir runs/mlm_cah --top 3

Line n of the output belongs to line n of the input, whatever that holds: lines that are blank or
cannot be read included. Warnings go to standard error. Of a line, the first mebibyte is read.

A translation model puts out the translation:

    --scores     each line is: score, tab, translation
    --nbest n    n lines for each input line, best first: number of the input line (from 1), tab,
                 score, tab, translation; where fewer were found, the rest have the score -inf

A score is the log-probability in nats over length ** length_penalty. With `--method sample`, what
is drawn depends on `--seed` and `--chunk`.

A masked language model puts out the line with its best guess in place of every `<mask>` and then,
for each of them, a tab and its candidates, best first: `word probability`, parted by commas.

    --top k      so many candidates; 0: the filled line alone

A model that answers questions reads one from every line, typed or as JSON, and puts out its answer;
--scores and --nbest are as for translations:

    echo "Anna is in the hall. | Where is Anna?" | python -m train.predict --workdir runs/nemot_qa
    python -m train.predict --workdir runs/nemot_qa < questions.jsonl > answers.txt
"""

import codecs
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from compmod_jax.errors import UserError, check
from train import cli
from train.progress import Progress
from train.trained import ModelArgs, Opened, open_model

if TYPE_CHECKING:
  from compmod_jax.api import AnsweringModel, MaskedModel, TranslationModel
  from compmod_jax.decoding import DecodeConfig
  from compmod_jax.tasks.answerer import Answer
  from compmod_jax.tasks.translator import Hypothesis

# Bytes of a line that are read, and of the lines that are held at once: input may have no end.
_LINE = 1 << 20
_CHUNK = 16 << 20
# What `str.splitlines` takes for the end of a line, and the tab, which parts columns.
_ENDS = dict.fromkeys(map(ord, "\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
_NO_SCORE = (
  "has an output without a finite score: activations of the model overflow, and it means nothing"
)
_WARNED = 300  # most characters of a warning about a line

# From the sentences of a chunk, the number of lines before it and the display to output lines.
Worker = Callable[[list[str], int, Progress], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Runs a model on standard input, line by line, to standard output."""

  nbest: int = 1
  """Translations of each line; more than 1 also writes line numbers and scores."""
  scores: bool = False
  """Write the score and a tab before each translation."""
  top: int = 5
  """Candidates that are written for each <mask> that a masked language model fills in."""
  seed: int = 0
  """Of the method sample."""
  chunk: int = 1000
  """Lines that are read before they are translated and written; 1 at a terminal."""
  quiet: bool = False
  """Show no progress; warnings are shown."""


def main(argv: list[str]) -> None:
  """Reads standard input and writes what the model makes of it."""
  args = cli.options(Args, argv)
  check(args.top >= 0, f"--top is {args.top}; it must not be negative.")
  opened = open_model(args)
  terminal = sys.stdin.isatty()
  progress = Progress(0, quiet=args.quiet or terminal or sys.stdout.isatty())
  try:
    lines = put_out(opened, args, sys.stdin.buffer, sys.stdout.buffer, progress, terminal=terminal)
    progress.status("finished lines", lines, lines)
  finally:
    progress.close()


def put_out(
  opened: Opened,
  args: Args,
  source: IO[bytes],
  sink: IO[bytes],
  progress: Progress,
  *,
  terminal: bool = False,
) -> int:
  """Writes what a model makes of every line of `source` to `sink`; returns how many lines it read.

  Args:
    opened: the model.
    args: options; `workdir` is not looked at.
    source: lines that end with a line feed.
    sink: gets a line, or with `nbest` as many lines, for each of them.
    progress: shows how many lines are finished.
    terminal: whether a person types the lines, each of which is then answered at once.
  """
  work = _worker(opened, args)
  first = 0
  for lines in _chunks(source, 1 if terminal else max(1, args.chunk)):
    for text in work(_read(lines, first), first, progress):
      sink.write(text.encode(errors="replace"))
    sink.flush()
    first += len(lines)
  return first


class _Line(NamedTuple):
  """The bytes of a line, and whether those after `_LINE` were left out."""

  data: bytes
  cut: bool


def _chunks(stream: IO[bytes], size: int) -> Iterator[list[_Line]]:
  """Lists of at most `size` lines; fewer where lines are long."""
  chunk, held = list[_Line](), 0
  # Binary, because text streams also end lines at carriage returns.
  while data := stream.readline(_LINE + 1):
    cut = len(data) > _LINE and not data.endswith(b"\n")
    rest = data
    while cut and rest and not rest.endswith(b"\n"):
      rest = stream.readline(_LINE)
    chunk.append(_Line(data[:_LINE], cut))
    held += len(data)
    if len(chunk) == size or held >= _CHUNK:
      yield chunk
      chunk, held = [], 0
  if chunk:
    yield chunk


def _read(lines: list[_Line], first: int) -> list[str]:
  """The sentences of a chunk; warns of what could not be read."""
  sentences = []
  damaged, long = [], []
  for number, (data, cut) in enumerate(lines, start=first + 1):
    # Where a line is cut, the beginning of a character may be left.
    try:
      text, _ = codecs.utf_8_decode(data, "strict", not cut)
    except UnicodeDecodeError:
      text, _ = codecs.utf_8_decode(data, "replace", not cut)
      damaged.append(number)
    if cut:
      long.append(number)
    sentences.append((text.removeprefix("\ufeff") if number == 1 else text).strip())
  _warn(damaged, "is not UTF-8; what could not be read was replaced")
  _warn(long, f"has more than {_LINE:,} bytes; the rest was left out")
  return sentences


def _warn(numbers: list[int], what: str) -> None:
  if numbers:
    more = f" (and {len(numbers) - 1} more: {numbers[1:6]})" if len(numbers) > 1 else ""
    print(f"warning: line {numbers[0]} {what}{more}", file=sys.stderr, flush=True)


def _warn_of(number: int, error: Exception) -> None:
  """A warning about one line that has an empty answer."""
  text = str(error)
  text = text if len(text) <= _WARNED else text[: _WARNED - 3] + "..."
  print(f"warning: line {number}: {_one_line(text)}", file=sys.stderr, flush=True)


def _warn_of_scores(found: "Sequence[Sequence[Hypothesis | Answer]]", first: int) -> None:
  """Warns of lines whose best output has a score that is not finite."""
  numbers = [
    first + i for i, some in enumerate(found, 1) if some and not math.isfinite(some[0].score)
  ]
  _warn(numbers, _NO_SCORE)


def _worker(opened: Opened, args: Args) -> Worker:
  """What turns sentences into output, by the kind of the model."""
  from compmod_jax.api import AnsweringModel, MaskedModel, TranslationModel
  from compmod_jax.decoding import override

  model = opened.model
  if isinstance(model, TranslationModel):
    decode = override(model.task.decode, {"n_best": args.nbest})
    return lambda *given: _translate(opened, model, args, decode, *given)
  if isinstance(model, AnsweringModel):
    decode = override(model.task.decode, {"n_best": args.nbest})
    return lambda *given: _answer(opened, model, args, decode, *given)
  if isinstance(model, MaskedModel):
    check(
      args.nbest == 1 and not args.scores,
      "--nbest and --scores are of translations, but this is a masked language model. Use --top.",
    )
    return lambda *given: _fill(opened, model, args, *given)
  raise UserError(
    f"The model in {model.folder} makes no text from text, so there is nothing to predict line by"
    " line. Use train.evaluate."
  )


def _translate(
  opened: Opened,
  model: "TranslationModel",
  args: Args,
  decode: "DecodeConfig",
  sentences: list[str],
  first: int,
  progress: Progress,
) -> Iterator[str]:
  """The translations of a chunk; warns of what is cut."""
  import jax

  ceiling = model.task.batch.longest - 1
  encoded = model.source_tokenizer.encode_batch(sentences)
  long = [first + i for i, ids in enumerate(encoded, start=1) if len(ids) > ceiling]
  _warn(long, f"has more than {ceiling} tokens, as no training sentence had; the rest was cut off")
  found = model.task.translator(
    opened.params,
    sentences,
    decode,
    sharing=opened.sharing,
    rng=jax.random.fold_in(jax.random.key(args.seed), first),
    status=_status(progress, first),
  )
  _warn_of_scores(found, first)
  for number, hypotheses in enumerate(found, start=first + 1):
    yield _format(number, hypotheses, args)


def _answer(
  opened: Opened,
  model: "AnsweringModel",
  args: Args,
  decode: "DecodeConfig",
  lines: list[str],
  first: int,
  progress: Progress,
) -> Iterator[str]:
  """The answers to a chunk's questions; a line without one has a warning and an empty answer."""
  import jax

  from compmod_jax.data.qa.typed import typed_question
  from compmod_jax.tasks.answerer import NONE

  answerer, questions = model.task.answerer, {}
  for place, line in enumerate(lines):
    try:
      question = typed_question(line)
      answerer.check(question)
      questions[place] = question
    except UserError as error:
      if line:
        _warn_of(first + place + 1, error)
  found = answerer(
    opened.params,
    list(questions.values()),
    decode,
    sharing=opened.sharing,
    rng=jax.random.fold_in(jax.random.key(args.seed), first),
    status=_status(progress, first),
  )
  answers = dict(zip(questions, found, strict=True))
  long = [first + place + 1 for place, best in answers.items() if best[0] is NONE]
  _warn(
    long,
    f"has more than the model's {answerer.coder.length} tokens even without its passage; it has no"
    " answer",
  )
  _warn_of_scores(
    [[] if first + place + 1 in long else answers.get(place, []) for place in range(len(lines))],
    first,
  )
  for place in range(len(lines)):
    yield _format(first + place + 1, answers.get(place, []), args)


def _fill(
  opened: Opened,
  model: "MaskedModel",
  args: Args,
  sentences: list[str],
  first: int,
  progress: Progress,
) -> Iterator[str]:
  """The lines of a chunk with their masks filled in; warns of what is cut."""
  filler, most = model.task.filler, model.model.config.max_length
  long = [
    first + i for i, text in enumerate(sentences, 1) if len(filler.encode(text, cut=False)) > most
  ]
  _warn(long, f"has more than {most} tokens with its ends, the model's positions; it was cut")
  found = filler(
    opened.params,
    sentences,
    top=max(1, args.top),
    sharing=opened.sharing,
    status=_status(progress, first),
  )
  nan = [
    first + i
    for i, filled in enumerate(found, 1)
    if not all(c.probability >= 0 for place in filled.candidates for c in place)
  ]
  _warn(nan, _NO_SCORE)
  for filled in found:
    places = [
      ", ".join(f"{_one_line(c.token).strip()} {c.probability:.4f}" for c in candidates)
      for candidates in filled.candidates
    ]
    yield "\t".join([_one_line(filled.text), *(places if args.top else ())]) + "\n"


def _status(progress: Progress, first: int) -> Callable[..., None]:
  return lambda text, done=0, total=None: progress.status(
    "finished lines", first + (done or 0), None
  )


def _format(number: int, hypotheses: "Sequence[Hypothesis | Answer]", args: Args) -> str:
  """The output lines of an input line."""
  rows = [(hypothesis.score, _one_line(hypothesis.text)) for hypothesis in hypotheses]
  rows += [(float("-inf"), "")] * (args.nbest - len(rows))
  if args.nbest > 1:
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in rows)
  return "".join(f"{score:.4f}\t{text}\n" if args.scores else f"{text}\n" for score, text in rows)


def _one_line(text: str) -> str:
  """The text without what would break a line or a column apart."""
  return text.translate(_ENDS)


if __name__ == "__main__":
  cli.run(main)
