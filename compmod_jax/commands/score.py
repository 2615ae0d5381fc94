"""How probable texts, or given translations, are to a model: the lines of standard input.

    echo "The dog sleeps ." | python -m train.score --workdir runs/lm --tokens
    paste source.txt target.txt | python -m train.score --workdir runs/nmt_cah > scores.txt

Line n of the output belongs to line n of the input: its log-probability in nats, a tab, and the
number of its tokens, the end of the text included. A translation model reads a source, a tab and a
target, which may be empty, from each line, and scores the target. A language model scores a text. A
masked language model gives the pseudo-log-likelihood: each token is masked in turn and scored given
the others, and there is no end token (Salazar et al. 2020).

    --tokens  also, after a tab each, every token and its log-probability

A line that cannot be scored, as it is too long or has no tab, gets a warning and an empty line.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compmod_jax.commands import cli
from compmod_jax.commands.lines import on_standard_input, one_line, status, warn_of
from compmod_jax.commands.options import ModelArgs, Opened, open_model
from compmod_jax.core.errors import UserError
from compmod_jax.training.progress import Progress

if TYPE_CHECKING:
  from compmod_jax.tasks.scorer import Scored

# The scores of texts, and number -> what is wrong of those that are too long.
Score = Callable[..., "list[Scored]"]
TooLong = Callable[[Sequence[Any]], dict[int, str]]


@dataclasses.dataclass(frozen=True)
class Args(ModelArgs):
  """Says how probable texts, or given translations, are to a model."""

  tokens: bool = False
  """Also write every token and its log-probability."""
  chunk: int = 1000
  """Lines that are read before they are scored and written; 1 at a terminal."""
  quiet: bool = False
  """Show no progress; warnings are shown."""


def main(argv: list[str]) -> None:
  """Reads standard input and writes scores."""
  args = cli.options(Args, argv)
  opened = open_model(args)
  from compmod_jax.api import MaskedModel, ScoringModel, TranslationModel

  model = opened.model
  if not isinstance(model, MaskedModel | ScoringModel | TranslationModel):
    raise UserError(
      f"The model in {model.folder} answers questions; what it makes of a text is no score. Give a"
      " translation model or a language model."
    )
  scorer, pairs = model.task.generator.scorer, isinstance(model, TranslationModel)
  score = functools.partial(scorer, model.task.model)
  too_long = functools.partial(scorer.too_long, model.task.model)
  on_standard_input(
    lambda *given: _score(opened, score, too_long, args.tokens, pairs, *given),
    chunk=args.chunk,
    quiet=args.quiet,
    strip=not pairs,
  )


def _score(
  opened: Opened,
  score: Score,
  too_long: TooLong,
  tokens: bool,
  pairs: bool,
  lines: list[str],
  first: int,
  progress: Progress,
) -> Iterator[str]:
  """The scores of a chunk; warns of lines that have none."""
  given = dict[int, Any](enumerate(lines))
  if pairs:
    split = {place: _columns(line) for place, line in given.items()}
    for place, columns in split.items():
      if len(columns) != 2:
        problem = f"has {len(columns) - 1} tabs; give a source, a tab and a target"
        warn_of(first + place + 1, UserError(problem))
    given = {place: tuple(columns) for place, columns in split.items() if len(columns) == 2}
  places = list(given)
  for number, problem in too_long(list(given.values())).items():
    warn_of(first + places[number] + 1, UserError(problem))
    del given[places[number]]
  found = score(
    opened.params, list(given.values()), sharing=opened.sharing, status=status(progress, first)
  )
  scores = dict(zip(given, found, strict=True))
  for place in range(len(lines)):
    yield _format(scores[place], tokens) if place in scores else "\n"


def _columns(line: str) -> list[str]:
  """The columns of a line; a side may be empty, so that its only tab is at an end."""
  whole = line.strip()
  return whole.split("\t") if "\t" in whole else [side.strip() for side in line.split("\t")]


def _format(one: "Scored", tokens: bool) -> str:
  """An output line."""
  columns = [f"{one.log_probability:.4f}", f"{len(one.tokens)}"]
  if tokens:
    each = zip(one.words, one.log_probabilities.tolist(), strict=True)
    columns += [f"{one_line(word).strip()} {value:.4f}" for word, value in each]
  return "\t".join(columns) + "\n"
