"""Runs a model on standard input, line by line, to standard output.

    python -m train.predict --workdir runs/nmt_cah < source.txt > translation.txt
    echo "The <mask> sleeps." | python -m train.predict --workdir runs/mlm_cah --top 3

Line n of the output belongs to line n of the input, whatever that holds: lines that are blank or
cannot be read included. Warnings go to standard error. Of a line, the first mebibyte is read.

A translation model prints the translation:

    --scores     each line is: score, tab, translation
    --nbest n    n lines for each input line, best first: number of the input line (from 1), tab,
                 score, tab, translation; where fewer were found, the rest have the score -inf

A score is the log-probability in nats over length ** length_penalty. With `--method sample`, what
is drawn depends on `--seed` and `--chunk`.

A masked language model prints the line with its best guess in place of every `<mask>` and then,
for each of them, a tab and its candidates, best first: `word probability`, parted by commas.

    --top k      number of candidates; 0: the filled line alone

A model that answers questions reads one from every line, typed or as JSON, and prints its answer;
--scores and --nbest are as for translations:

    echo "Anna is in the hall. | Where is Anna?" | python -m train.predict --workdir runs/nemot_qa
    python -m train.predict --workdir runs/nemot_qa < questions.jsonl > answers.txt
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from compmod_jax.commands import cli
from compmod_jax.commands.lines import (
  Worker,
  answer,
  on_standard_input,
  one_line,
  status,
  warn,
  warn_of,
)
from compmod_jax.commands.options import ModelArgs, Opened, open_model
from compmod_jax.core.errors import UserError, check
from compmod_jax.training.progress import Progress

if TYPE_CHECKING:
  from compmod_jax.api import AnsweringModel, MaskedModel, TranslationModel
  from compmod_jax.decoding import DecodeConfig
  from compmod_jax.tasks.answerer import Answer
  from compmod_jax.tasks.translator import Hypothesis

_NO_SCORE = (
  "has an output without a finite score: activations of the model overflow, and it means nothing"
)


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
  on_standard_input(_worker(opened, args), chunk=args.chunk, quiet=args.quiet)


def put_out(
  opened: Opened,
  args: Args,
  source: IO[bytes],
  sink: IO[bytes],
  progress: Progress,
) -> int:
  """Writes what a model makes of every line of `source` to `sink`; returns how many lines it read.

  Args:
    opened: the model.
    args: options; `workdir` is not looked at.
    source: lines that end with a line feed.
    sink: gets a line, or with `nbest` as many lines, for each of them.
    progress: shows how many lines are finished.
  """
  return answer(_worker(opened, args), source, sink, progress, chunk=args.chunk)


def _warn_of_scores(found: "Sequence[Sequence[Hypothesis | Answer]]", first: int) -> None:
  """Warns of lines whose best output has a score that is not finite."""
  numbers = [
    first + i for i, some in enumerate(found, 1) if some and not math.isfinite(some[0].score)
  ]
  warn(numbers, _NO_SCORE)


def _worker(opened: Opened, args: Args) -> Worker:
  """What turns sentences into output, by the kind of the model."""
  from compmod_jax.api import AnsweringModel, MaskedModel, TranslationModel
  from compmod_jax.decoding import override

  model = opened.model
  if isinstance(model, TranslationModel):
    decode = override(model.task.generator.decode, {"n_best": args.nbest})
    return lambda *given: _translate(opened, model, args, decode, *given)
  if isinstance(model, AnsweringModel):
    decode = override(model.task.generator.decode, {"n_best": args.nbest})
    return lambda *given: _answer(opened, model, args, decode, *given)
  if isinstance(model, MaskedModel):
    check(
      args.nbest == 1 and not args.scores,
      "--nbest and --scores are of translations, but this is a masked language model. Use --top.",
    )
    return lambda *given: _fill(opened, model, args, *given)
  raise UserError(
    f"The model in {model.folder} is a language model: it has no output that belongs to a line. Let"
    " it continue lines with `python -m train.generate`, or score them with"
    " `python -m train.score`."
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

  ceiling = model.task.dataset.batch.longest - 1
  encoded = model.source_tokenizer.encode_batch(sentences)
  long = [first + i for i, ids in enumerate(encoded, start=1) if len(ids) > ceiling]
  warn(long, f"has more than {ceiling} tokens, as no training sentence had; the rest was cut off")
  found = model.task.generator(
    model.task.model,
    opened.params,
    sentences,
    decode,
    sharing=opened.sharing,
    rng=jax.random.fold_in(jax.random.key(args.seed), first),
    status=status(progress, first),
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

  from compmod_jax.data.qa.typed_lines import typed_question
  from compmod_jax.tasks.answerer import NONE

  answerer, questions = model.task.generator, {}
  for place, line in enumerate(lines):
    try:
      question = typed_question(line)
      answerer.check(model.task.model, question)
      questions[place] = question
    except UserError as error:
      if line:
        warn_of(first + place + 1, error)
  found = answerer(
    model.task.model,
    opened.params,
    list(questions.values()),
    decode,
    sharing=opened.sharing,
    rng=jax.random.fold_in(jax.random.key(args.seed), first),
    status=status(progress, first),
  )
  answers = dict(zip(questions, found, strict=True))
  long = [first + place + 1 for place, best in answers.items() if best[0] is NONE]
  warn(
    long,
    f"has more than the model's {answerer.question_tokenizer.length} tokens even without its"
    " passage; it has no answer",
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
  fill, most = model.task.generator, model.model.config.max_length
  long = [first + i for i, text in enumerate(sentences, 1) if len(fill.encode(text)) > most]
  warn(long, f"has more than {most} tokens with its ends, the model's positions; it was cut")
  found = fill(
    model.task.model,
    opened.params,
    sentences,
    top=max(1, args.top),
    sharing=opened.sharing,
    status=status(progress, first),
  )
  nan = [
    first + i
    for i, filled in enumerate(found, 1)
    if not all(c.probability >= 0 for place in filled.candidates for c in place)
  ]
  warn(nan, _NO_SCORE)
  for filled in found:
    places = [
      ", ".join(f"{one_line(c.token).strip()} {c.probability:.4f}" for c in candidates)
      for candidates in filled.candidates
    ]
    yield "\t".join([one_line(filled.text), *(places if args.top else ())]) + "\n"


def _format(number: int, hypotheses: "Sequence[Hypothesis | Answer]", args: Args) -> str:
  """The output lines of an input line."""
  rows = [(hypothesis.score, one_line(hypothesis.text)) for hypothesis in hypotheses]
  rows += [(float("-inf"), "")] * (args.nbest - len(rows))
  if args.nbest > 1:
    return "".join(f"{number}\t{score:.4f}\t{text}\n" for score, text in rows)
  return "".join(f"{score:.4f}\t{text}\n" if args.scores else f"{text}\n" for score, text in rows)
