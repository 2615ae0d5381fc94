"""What the gate of a modulated model lets pass, and what the model loses when it is changed.

Source: Knowles 2022, equations 3.12 and 3.14.
"""

import dataclasses
from typing import NamedTuple

from compmod_jax.analysis.gates import edits as changes
from compmod_jax.analysis.gates import effects as measured
from compmod_jax.analysis.gates.maps import Map, maps_of_questions, maps_of_split, maps_of_texts
from compmod_jax.analysis.gates.reading import Totals, categories, read_batch
from compmod_jax.analysis.subject import Subject, drawn
from compmod_jax.core.bounds import check_least
from compmod_jax.data.qa.typed_lines import typed_question
from compmod_jax.tasks.question_answering import Answering


class Measured(NamedTuple):
  """What gates let pass, and what changing them does.

  Attributes:
    asks: whether texts are questions.
    totals: site of a gate -> sums over the split.
    effects: of all changes.
    moved: variant -> site -> mean absolute change of the gate.
    changed: questions whose answers changed, and their answers; none where nothing was answered.
    maps: of single texts.
  """

  asks: bool
  totals: dict[str, Totals]
  effects: list[measured.Effect]
  moved: dict[str, dict[str, float]]
  changed: measured.Answers | None
  maps: list[Map]


@dataclasses.dataclass(frozen=True)
class Gates:
  """What the gate of a modulated model lets pass: token by token in single texts; by kind of token,
  part of speech and task over a split; and what answers and losses are with the task token swapped,
  the gate frozen at its mean, or removed."""

  text: tuple[str, ...] = ()
  """Texts whose gates are drawn; a question is typed "passage | question (1) a (2) b"."""
  maps: int = 3
  """Number of the split's first examples that are drawn where no text is given."""
  task: tuple[str, ...] = ()
  """Tasks and the ones as which their texts are run, as TASK=OTHER; in question answering, if
  nothing is given: mqa=gqa gqa=mqa."""
  decode: int = 200
  """Number of examples that are answered under every change; 0: none."""
  samples: int = 2000
  """Resampled test sets of the bootstrap."""
  shown: int = 20
  """Number of questions whose answers changed that are listed."""

  def __post_init__(self):
    check_least(self, "--", maps=0, decode=0, samples=100, shown=0)

  def measure(self, subject: Subject) -> Measured:
    """Reads the gates, and measures what changing them does.

    Raises:
      UserError: the model has no gate, a task is not the model's, or a text cannot be read.
    """
    runner = changes.Runner(subject)
    run_as = changes.swaps(self.task, runner.task, runner.config)
    asks = isinstance(runner.task, Answering)
    typed = [typed_question(text) for text in self.text] if asks else []
    totals = collect(runner)
    variants = changes.variants(runner, {site: t.means for site, t in totals.items()}, run_as)
    losses, answers = measured.measure_losses(runner, variants), None
    if asks and self.decode:
      numbers = drawn(subject.numbers, self.decode, subject.seed)
      answers = measured.measure_answers(runner, numbers, variants)
    effects = measured.effects(losses, answers, seed=subject.seed, samples=self.samples)
    if typed:
      drawn_texts = maps_of_questions(runner, typed)
    elif self.text:
      drawn_texts = maps_of_texts(runner, self.text)
    else:
      drawn_texts = maps_of_split(runner, self.maps, answered=asks and self.decode > 0)
    changed = None if answers is None else measured.most_changed(answers, self.shown)
    return Measured(asks, totals, effects, losses.moved, changed, drawn_texts)


def collect(runner: changes.Runner) -> dict[str, Totals]:
  """Sums over all texts of the subject: site of a gate -> its totals."""
  subject, groups = runner.subject, categories(runner.task)
  found = {s: Totals(groups, subject.numbers, width) for s, width in runner.widths.items()}
  for number, batch in enumerate(subject.batches):
    read, (_, gates) = read_batch(runner.task, batch), runner(batch, runner.trained)
    for site, gate in gates.items():
      found[site].add(gate, read, batch["index"])
    subject.status(f"gates on {subject.split}", number + 1, len(subject.batches))
  return found
