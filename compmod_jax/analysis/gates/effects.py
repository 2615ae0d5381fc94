"""What losses and answers of a modulated model are with other auxiliary tokens or other gates."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.analysis.gates.edits import Runner, Variant, answers
from compmod_jax.analysis.gates.reading import ALL, LEAST_TEXTS, GatedTask, Tokens, read_batch
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.unified import task_token
from compmod_jax.metrics import qa
from compmod_jax.metrics.bootstrap import Comparison, paired_bootstrap
from compmod_jax.metrics.significance import holm
from compmod_jax.metrics.statistics import Statistics, loss_statistics
from compmod_jax.tasks.answer_scores import LABELLED
from compmod_jax.tasks.base import Batch
from compmod_jax.tasks.question_answering import Answering


class Answers(NamedTuple):
  """Questions, and what every variant answers.

  Attributes:
    numbers: of the questions in the split, ascending.
    questions: with their gold answers.
    outputs: variant -> answer to every question; as trained first.
    scores: variant -> main score of every question, 0 to 1.
  """

  numbers: np.ndarray
  questions: list[Question]
  outputs: dict[str, list[str]]
  scores: dict[str, np.ndarray]

  def part(self, chosen: np.ndarray) -> "Answers":
    """Those of questions with these places."""
    return Answers(
      self.numbers[chosen],
      [self.questions[i] for i in chosen.tolist()],
      {name: [found[i] for i in chosen.tolist()] for name, found in self.outputs.items()},
      {name: found[chosen] for name, found in self.scores.items()},
    )

  @property
  def tasks(self) -> np.ndarray:
    """Task of every question."""
    return np.array([task_token(question).strip("<>") for question in self.questions])


class Losses(NamedTuple):
  """Losses of every text under every variant.

  Attributes:
    tasks: task of every text.
    counts: tokens of each that are predicted.
    nats: variant -> their losses, summed, float64 [texts].
    moved: variant -> site of a gate -> mean absolute change, over counted positions and channels.
  """

  tasks: np.ndarray
  counts: np.ndarray
  nats: dict[str, np.ndarray]
  moved: dict[str, dict[str, float]]


class Effect(NamedTuple):
  """One variant on one part of the sample; changes are against the model as trained.

  Attributes:
    variant: its name.
    part: ALL or a task.
    texts: how many losses are of.
    loss: nats per token.
    loss_change: None for the model as trained, as all changes.
    loss_p: corrected for the number of variants (Holm); of the whole sample alone, else NaN.
    questions: how many were answered; 0 where none were, and the rest is NaN.
    score: mean of the questions' main scores, 0 to 100.
    score_change: in points.
    score_p: as `loss_p`.
    malformed: per cent of the answers in multiple choice and yes/no.
    changed: per cent of the answers that differ from those of the model as trained.
  """

  variant: str
  part: str
  texts: int
  loss: float
  loss_change: Comparison | None
  questions: int = 0
  score: float = float("nan")
  score_change: Comparison | None = None
  malformed: float = float("nan")
  changed: float = float("nan")
  loss_p: float = float("nan")
  score_p: float = float("nan")


def with_ends(change: Comparison | None, count: int) -> list[float]:
  """A change and the ends of its interval; NaN for what is not known.

  Args:
    change: of a loss or a score; None for the model as trained.
    count: texts or questions, of which fewer than `LEAST_TEXTS` give no interval.
  """
  nothing = float("nan")
  if change is None:
    return [nothing] * 3
  d = change.difference
  return [d.value, d.low, d.high] if count >= LEAST_TEXTS else [d.value, nothing, nothing]


def counted_tokens(task: GatedTask, batch: Batch, read: Tokens) -> np.ndarray:
  """Which tokens after the first the loss is of, bool [batch, time].

  Of questions the answer, in multiple choice its label alone; of running text all that count.
  """
  if not isinstance(task, Answering):
    return read.counted
  return np.asarray(task.model.counted(batch)[0])


def measure_losses(runner: Runner, variants: Sequence[Variant]) -> Losses:
  """Losses of the subject's texts under every variant, and how far gates are moved."""
  subject, numbers = runner.subject, runner.subject.numbers
  tasks, counts = np.full(len(numbers), "lm", object), np.zeros(len(numbers))
  nats = {variant.name: np.zeros(len(numbers)) for variant in variants}
  moved = {variant.name: dict.fromkeys(runner.widths, 0.0) for variant in variants}
  tokens = 0
  for done, batch in enumerate(subject.batches):
    read = read_batch(runner.task, batch)
    wanted = counted_tokens(runner.task, batch, read)
    rows = np.flatnonzero(batch["index"] >= 0)
    places = np.searchsorted(numbers, batch["index"][rows])
    if isinstance(runner.task, Answering):
      tasks[places] = blocks_of(batch)[0][0]
    counts[places] = wanted.sum(axis=1)[rows]
    counted, tokens = jnp.asarray(read.counted), tokens + int(read.counted.sum())
    plain = runner(batch, runner.trained)
    for variant in variants:
      losses, gates = plain if variant is runner.trained else runner(batch, variant)
      found = np.where(wanted, np.asarray(losses, np.float64), 0).sum(axis=1)
      nats[variant.name][places] = found[rows]
      for site, total in jax.device_get(_moved(plain[1], gates, counted)).items():
        moved[variant.name][site] += float(total)
    subject.status("loss under every change", done + 1, len(subject.batches))
  means = {n: {site: v / tokens for site, v in sites.items()} for n, sites in moved.items()}
  return Losses(tasks.astype(str), counts, nats, means)


@jax.jit
def _moved(
  before: Mapping[str, jax.Array], after: Mapping[str, jax.Array], counted: jax.Array
) -> dict[str, jax.Array]:
  """Mean absolute change over channels, summed over the positions that count."""

  def of_site(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(counted, jnp.mean(jnp.abs(one - other), axis=-1), 0))

  return jax.tree.map(of_site, before, after)


def measure_answers(runner: Runner, numbers: np.ndarray, variants: Sequence[Variant]) -> Answers:
  """What every variant answers to the questions with these numbers."""
  asked = questions_of(runner.task, runner.subject.split, numbers)
  outputs, scores = {}, {}
  for variant in variants:
    outputs[variant.name] = answers(runner.subject, asked, variant, variant.name)
    scores[variant.name] = qa.question_scores(asked, outputs[variant.name])
  return Answers(numbers, asked, outputs, scores)


def questions_of(task: GatedTask, split: str, numbers: np.ndarray) -> list[Question]:
  """Questions of a split by their numbers."""
  assert isinstance(task, Answering)
  every = [(items, place) for items in task.dataset.questions(split) for place in range(len(items))]
  return [every[number][0][every[number][1]] for number in numbers.tolist()]


def effects(losses: Losses, answers: Answers | None, *, seed: int, samples: int) -> list[Effect]:
  """Every variant on the whole sample, then on each task of which there are enough texts.

  Args:
    losses: of the texts.
    answers: to some of them.
    seed: of the bootstrap.
    samples: its resampled test sets.
  """
  names = sorted(set(losses.tasks.tolist()))
  enough = [name for name in names if np.sum(losses.tasks == name) >= LEAST_TEXTS]
  found = []
  for part in (ALL, *(enough if len(names) > 1 else ())):
    chosen = np.flatnonzero((losses.tasks == part) | (part == ALL))
    own = None
    if answers is not None:
      own = answers.part(np.flatnonzero((answers.tasks == part) | (part == ALL)))
    made = [
      _effect(name, part, losses, chosen, own, seed=seed, samples=samples) for name in losses.nats
    ]
    found += _corrected(made) if part == ALL else made
  return found


def _effect(
  name: str,
  part: str,
  losses: Losses,
  chosen: np.ndarray,
  answers: Answers | None,
  **bootstrap: int,
) -> Effect:
  trained = next(iter(losses.nats))
  before, after = (
    loss_statistics(losses.nats[one][chosen], losses.counts[chosen]) for one in (trained, name)
  )
  change = None if name == trained else paired_bootstrap(before, after, **bootstrap)
  effect = Effect(name, part, len(chosen), after.score().value, change)
  if answers is None or not answers.questions:
    return effect
  asked, outputs = answers.questions, answers.outputs[name]
  one, other = (score_statistics(answers.scores[n]) for n in (trained, name))
  labelled = [(q, o) for q, o in zip(asked, outputs, strict=True) if q.format in LABELLED]
  wrong = [qa.is_malformed(*pair) for pair in labelled]
  pairs = zip(outputs, answers.outputs[trained], strict=True)
  return effect._replace(
    questions=len(asked),
    score=other.score().value,
    score_change=None if name == trained else paired_bootstrap(one, other, **bootstrap),
    malformed=100 * float(np.mean(wrong)) if wrong else float("nan"),
    changed=100 * float(np.mean([after != before for after, before in pairs])),
  )


def score_statistics(scores: np.ndarray) -> Statistics:
  """What the mean of main scores [questions], 0 to 1, sums over questions."""
  rows = np.stack([scores, np.ones_like(scores)], axis=1)
  return Statistics("exact_match", "main score of every question", rows)


def _corrected(made: Sequence[Effect]) -> list[Effect]:
  """The effects with p values corrected for their number."""
  losses = holm([e.loss_change.p if e.loss_change else float("nan") for e in made])
  scores = holm([e.score_change.p if e.score_change else float("nan") for e in made])
  return [
    effect._replace(loss_p=one, score_p=other)
    for effect, one, other in zip(made, losses, scores, strict=True)
  ]


def most_changed(answers: Answers, shown: int) -> Answers:
  """The questions whose answers most variants change; ties in the order of the split."""
  trained, *others = answers.outputs.values()
  times = np.array([sum(o[i] != one for o in others) for i, one in enumerate(trained)], int)
  order = np.argsort(-times, kind="stable")
  return answers.part(order[times[order] > 0][:shown])
