"""Continues texts with a language model: the lines of standard input, line by line.

    echo "The dog" | python -m train.generate --workdir runs/lm --length 20
    python -m train.generate --workdir runs/lm --top_p 0.9 --seed 1 --stop . < prompts.txt > out.txt

Line n of the output is line n of the input and how the model goes on, whatever that line holds; a
blank line begins a text. Decoding is greedy, a beam search with `--beams 4`, and sampling with
`--temperature`, `--top_k`, `--top_p` or `--method sample`. What is drawn for a line depends on
`--seed` and the line, not on its place: equal lines get equal texts (`--nbest` draws several).

    --continuation  write what follows the line, without the line itself
    --scores        each line is: score, tab, text
    --nbest n       n lines for each input line, best first: number of the input line (from 1), tab,
                    score, tab, text

A score is the log-probability of what was generated, in nats, over length ** length_penalty. Of a
line that leaves the model no position for `--length` tokens (a recurrent model: that has more than
4,096), the newest tokens are read; a warning says so. Line breaks in what is generated are written
as spaces.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from compmod_jax.commands import cli
from compmod_jax.commands.lines import on_standard_input, one_line, status, warn
from compmod_jax.commands.options import ModelArgs, Opened, open_model
from compmod_jax.core.errors import UserError, check
from compmod_jax.training.progress import Progress

if TYPE_CHECKING:
  from compmod_jax.decoding import DecodeConfig
  from compmod_jax.tasks.text_generator import Generated, TextGenerator


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Continues texts with a language model."""

  length: int | None = None
  """Most tokens that are generated; none: 50, or half the model's positions if these are fewer."""
  stop: tuple[str, ...] = ()
  """A text ends before the first of these strings."""
  nbest: int = 1
  """Continuations of each line; more than 1 also writes line numbers and scores."""
  scores: bool = False
  """Write the score and a tab before each text."""
  continuation: bool = False
  """Write what follows a line alone, without the line itself."""
  seed: int = 0
  """Of sampling."""
  chunk: int = 1000
  """Lines that are read before they are continued and written; 1 at a terminal."""
  quiet: bool = False
  """Show no progress; warnings are shown."""


def main(argv: list[str]) -> None:
  """Reads standard input and writes how the model goes on."""
  args = cli.options(Args, argv)
  check(args.nbest >= 1, f"--nbest is {args.nbest}; it must be at least 1.")
  from compmod_jax.decoding import for_generation
  from compmod_jax.tasks.text_generator import TextGenerator

  decode = args.decoding()
  config = for_generation({**decode, "n_best": args.nbest})
  # These options are of generation, not of the task, which searches for nothing.
  opened = open_model(dataclasses.replace(args, **dict.fromkeys(decode)))
  model, generator = opened.model.task.model, opened.model.task.generator
  if not isinstance(generator, TextGenerator):
    raise UserError(
      f"The model in {opened.model.folder} is no language model, so there is no text that it could"
      " continue. Use `python -m train.predict`."
    )
  generator.most(model, args.length)  # a wrong length is a mistake before anything is read
  on_standard_input(
    lambda *given: _continue(opened, generator, args, config, *given),
    chunk=args.chunk,
    quiet=args.quiet,
  )


def _continue(
  opened: Opened,
  generator: "TextGenerator",
  args: Args,
  config: "DecodeConfig",
  lines: list[str],
  first: int,
  progress: Progress,
) -> Iterator[str]:
  """The lines of a chunk and what follows them; warns where the beginning of one is not read."""
  model = opened.model.task.model
  cut = [first + place + 1 for place in generator.too_long(model, lines, args.length)]
  warn(
    cut, f"has more than {generator.most(model, args.length)} tokens; the first ones were not read"
  )
  found = generator(
    model,
    opened.params,
    lines,
    config,
    length=args.length,
    stop=args.stop,
    seed=args.seed,
    sharing=opened.sharing,
    status=status(progress, first),
  )
  for number, some in enumerate(found, start=first + 1):
    for one in some:
      yield _format(number, one, args)


def _format(number: int, one: "Generated", args: Args) -> str:
  """An output line."""
  text = one_line(one.text.removeprefix(" ") if args.continuation else one.whole)
  columns = [f"{number}"] if args.nbest > 1 else []
  columns += [f"{one.score:.4f}"] if args.scores or args.nbest > 1 else []
  return "\t".join([*columns, text]) + "\n"
