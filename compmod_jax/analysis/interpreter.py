"""What the functions of a neural interpreter do: which positions they take, and what it costs to
reorder, drop or add some without training."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.models.neural_interpreter import InterpreterConfig, with_functions
from compmod_jax.tasks.base import Batch, Task, lower_is_better
from compmod_jax.tasks.fuzzy_logic import FuzzyLogic


@dataclasses.dataclass(frozen=True)
class Functions:
  """Which function of a neural interpreter takes which position, how alike signatures are, and what
  it costs to reorder, drop or add functions without training."""

  added: tuple[int, ...] = (1, 2)
  """How many fresh functions are added, each number by itself."""
  draws: int = 3
  """Draws of fresh functions; the table has means over them."""
  shown: int = 40
  """Rows of a picture of routing, at most: of a text the most frequent tokens."""

  def __post_init__(self):
    errors.check(
      all(one >= 1 for one in self.added),
      f"--added is {self.added}; each of them is a number of functions, at least 1.",
    )
    check_least(self, "--", draws=1, shown=1)

  def measure(self, subject: Subject) -> "Measured":
    """Routing over the chosen examples; scores over the whole split.

    Raises:
      UserError: the model is no neural interpreter.
    """
    config, task = _config(subject.task), subject.task
    names = _names(task)
    run, totals = jax.jit(functools.partial(_routing, task, len(names))), None
    for number, batch in enumerate(subject.batches):
      sums = fetch(run(subject.params, subject.place(batch)))
      totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
      subject.status("batches", number + 1, len(subject.batches))
    assert totals is not None
    weights, counts = totals
    chosen = np.sort(np.argsort(-counts, kind="stable")[: self.shown])
    chosen = chosen[counts[chosen] > 0]
    by_name = {
      site: (sums / np.maximum(counts, 1)[:, None])[chosen] for site, sums in weights.items()
    }
    signatures = [
      np.asarray(fetch(subject.params[f"script_{s}"]["router"]["signatures"]))
      for s in range(config.scripts)
    ]
    return Measured(
      names=[names[number] for number in chosen],
      weights=by_name,
      means={site: sums.sum(axis=0) / counts.sum() for site, sums in weights.items()},
      similarity=[_cosines(one) for one in signatures],
      changes=list(self._changes(subject, config)),
    )

  def _changes(self, subject: Subject, config: InterpreterConfig) -> Iterator["Change"]:
    every = list(range(config.functions))
    yield Change("as trained", _scores(subject, subject.params))
    yield Change("in reverse order", _changed(subject, config, every[::-1]))
    for one in every if config.functions > 1 else ():
      kept = [other for other in every if other != one]
      yield Change(f"without function {one}", _changed(subject, config, kept))
    for count in self.added:
      found = [_changed(subject, config, every, count, seed) for seed in range(self.draws)]
      yield Change(f"{count} added", np.mean(found, axis=0))


class Change(NamedTuple):
  """Scores with other functions.

  Attributes:
    name: what was done.
    scores: of every expression, or the one by which models are compared.
  """

  name: str
  scores: Float[np.ndarray, " scores"]


class Measured(NamedTuple):
  """What functions do on a split.

  Attributes:
    names: of the positions or tokens below.
    weights: site -> mean compatibility, [names, functions].
    means: site -> mean over all positions, [functions].
    similarity: of every script, cosines of its signatures, [functions, functions].
    changes: scores, first of the model as it is.
  """

  names: list[str]
  weights: dict[str, np.ndarray]
  means: dict[str, np.ndarray]
  similarity: list[np.ndarray]
  changes: list[Change]


def _config(task: Task) -> InterpreterConfig:
  config = task.model.config
  if not isinstance(config, InterpreterConfig):
    raise errors.UserError(
      "The model has no functions; give the workdir of a neural interpreter, such as that of"
      " configs/neural_interpreter.py."
    )
  return config


def _names(task: Task) -> list[str]:
  """What routing is listed by: the places of a set, or the tokens of a vocabulary."""
  if isinstance(task, FuzzyLogic):
    letters = [chr(ord("a") + one) for one in range(task.model.variables)]
    first = task.dataset.config.data.first
    return letters + [f"CLS {first + one}" for one in range(task.model.expressions)]
  tokenizer: Any = getattr(task.dataset, "tokenizer", None)
  errors.check(
    tokenizer is not None,
    "The model reads neither expressions nor texts, so that its positions have no names.",
  )
  return [tokenizer.text_of(number) for number in range(tokenizer.vocab_size)]


def _routing(
  task: Task, names: int, params: Params, batch: Batch
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Sums of compatibilities by name, [names, functions] of every site, and how many, [names]."""
  sites = task.model.routing_sites()
  intermediates = Intermediates(capture=frozenset(sites))
  task.model.forward(params, batch, intermediates=intermediates)
  real = task.model.valid_mask(sites[0], batch)
  labels = jnp.broadcast_to(jnp.arange(real.shape[1])[None], real.shape)
  labels = jnp.asarray(batch["tokens"]) if "tokens" in batch else labels

  def sums(values: jax.Array) -> jax.Array:
    flat = jnp.where(real[..., None], values, 0).reshape(-1, values.shape[-1])
    return jax.ops.segment_sum(flat, labels.reshape(-1), names)

  counts = sums(jnp.ones((*real.shape, 1)))[:, 0]
  return {site: sums(intermediates.captured[site]) for site in sites}, counts


def _cosines(vectors: np.ndarray) -> np.ndarray:
  unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
  return unit @ unit.T


def _changed(
  subject: Subject,
  config: InterpreterConfig,
  kept: Sequence[int],
  fresh: int = 0,
  seed: int = 0,
) -> np.ndarray:
  """Scores of the model with these functions of every script, and fresh ones."""
  rng = jax.random.fold_in(jax.random.key(subject.seed), seed)
  params = with_functions(fetch(subject.params), kept, fresh, rng=rng)
  task, count = subject.task, len(kept) + fresh
  if count != config.functions:
    model, files = dataclasses.replace(config, functions=count), task.dataset.files()
    task = task.dataset.config.build(model, files=files)
  return _scores(dataclasses.replace(subject, task=task), params)


def _scores(subject: Subject, params: Params) -> np.ndarray:
  task, sharing = subject.task, subject.sharing
  subject.status("scores")
  found: Mapping[str, Any] = task.evaluate(
    params, subject.split, sharing=sharing, decode=False
  ).values
  if isinstance(task, FuzzyLogic):
    return np.array([found[f"{task.metric}_{one:02d}"] for one in range(task.model.expressions)])
  return np.array([found[task.metric]])


def make_page(settings: Functions, subject: Subject, found: Measured) -> Page:
  """Routing, signatures, and what changes of the functions cost."""
  task, config = subject.task, _config(subject.task)
  fuzzy = isinstance(task, FuzzyLogic)
  score = "R²" if fuzzy else task.metric
  trained = found.changes[0].scores
  changes = Table(
    "changes",
    ("functions", score, "change", *((f"least {score}",) if fuzzy else ())),
    [
      (
        one.name,
        float(one.scores.mean()),
        float((one.scores - trained).mean()),
        *((float(one.scores.min()),) if fuzzy else ()),
      )
      for one in found.changes
    ],
    f"Without training. {score} on {subject.split}"
    + (", mean over the expressions" if fuzzy else "")
    + f"; fresh functions: mean over {settings.draws} draws.",
  )
  sections = [
    Section(
      "Routing",
      [
        Picture(
          "routing",
          _routing_figure(found),
          "Mean compatibility of positions with functions, by script and iteration.",
        ),
        Table(
          "functions",
          ("script and iteration", *(f"function {one}" for one in range(config.functions))),
          [(_place(site), *mean.tolist()) for site, mean in found.means.items()],
          "Mean compatibility over all positions.",
        ),
      ],
    ),
    Section(
      "Signatures",
      [Picture("signatures", _similarity_figure(found), "Cosines between functions' signatures.")],
    ),
    Section("Other functions, without training", [changes]),
  ]
  if isinstance(task, FuzzyLogic):
    rows = [
      (task.dataset.config.data.first + number, text, float(value))
      for number, (text, value) in enumerate(zip(task.dataset.texts(), trained, strict=True))
    ]
    columns = ("number", "expression", score)
    table = Table("expressions", columns, rows, f"Coefficient of determination on {subject.split}.")
    sections.insert(0, Section("Expressions", [table]))
  off = np.concatenate([one[~np.eye(len(one), dtype=bool)] for one in found.similarity])
  drops = [one for one in found.changes if one.name.startswith("without")]
  summary = [f"{score} on {subject.split} is {trained.mean():.4f}."]
  if drops:
    worst = (max if lower_is_better(task.metric) else min)(drops, key=lambda one: one.scores.mean())
    summary.append(
      f"It is {worst.scores.mean():.4f} {worst.name}, the one that costs most to leave out."
    )
  return Page(
    f"Functions, on {subject.split}",
    task.describe(),
    summary,
    sections,
    {
      "split": subject.split,
      "positions": found.names,
      "routing": {site: one.tolist() for site, one in found.weights.items()},
      "means": {site: one.tolist() for site, one in found.means.items()},
      "similarity": [one.tolist() for one in found.similarity],
      "changes": {one.name: one.scores.tolist() for one in found.changes},
      **({"expressions": task.dataset.texts()} if isinstance(task, FuzzyLogic) else {}),
    },
    tiles=[
      (score, f"{trained.mean():.4f}", subject.split),
      ("functions", str(config.functions), f"in each of {config.scripts} scripts"),
      *([("largest cosine", f"{off.max():.2f}", "between signatures")] if len(off) else []),
    ],
  )


def _place(site: str) -> str:
  script, iteration = site.split("/")[:2]
  return f"{script.replace('_', ' ')}, {iteration.replace('_', ' ')}"


def _routing_figure(found: Measured) -> Figure:
  """Panels beside each other: positions down, functions across."""
  across = min(4, len(found.weights))
  down = -(-len(found.weights) // across)
  figure = style.canvas(style.WIDTH, down * (0.8 + 0.16 * len(found.names)))
  image = None
  for number, (site, weights) in enumerate(found.weights.items()):
    axes = figure.add_subplot(down, across, number + 1)
    image = axes.imshow(weights, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    style.label(axes, _place(site), "function", "")
    axes.set_xticks(range(weights.shape[1]))
    first = number % across == 0
    axes.set_yticks(range(len(found.names)), found.names if first else [], size=style.SMALL)
    axes.grid(visible=False)
  if image is not None:
    figure.colorbar(image, ax=figure.axes, pad=0.01)
  style.finish(figure, "Mean compatibility of positions with functions")
  return figure


def _similarity_figure(found: Measured) -> Figure:
  figure = style.canvas(min(style.WIDTH, 3.4 * len(found.similarity)), 3.2)
  for number, cosines in enumerate(found.similarity):
    axes = figure.add_subplot(1, len(found.similarity), number + 1)
    image = axes.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1)
    for (row, column), value in np.ndenumerate(cosines):
      shade = "white" if abs(value) > 0.6 else "black"
      axes.text(
        column, row, f"{value:.2f}", ha="center", va="center", color=shade, size=style.SMALL
      )
    style.label(axes, f"script {number}", "function", "function" if not number else "")
    axes.set_xticks(range(len(cosines)))
    axes.set_yticks(range(len(cosines)))
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, pad=0.02)
  style.finish(figure, "Cosines of signatures")
  return figure
