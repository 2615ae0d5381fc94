"""What a run is, in words: the log's first lines, and an experiment's model as a diagram."""

import dataclasses
import functools
import textwrap
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import PyTree

from compmod_jax.core.errors import UserError
from compmod_jax.data.text_tokenizer import FILE
from compmod_jax.data.tokenizers import TokenizerConfig, Words
from compmod_jax.data.tokenizers.vocabulary import CONTROLS
from compmod_jax.tasks.base import Task
from compmod_jax.tasks.configs import TaskConfig
from compmod_jax.tasks.translation import SOURCE_FILE, TARGET_FILE
from compmod_jax.tools import diagram, flops
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.run import Run
from compmod_jax.training.warm_start import Start

GPT2 = 50_257
"""Tokens of GPT-2's vocabulary."""

LEGEND = "*: a mechanism. Plain model: without competition, gates, reading strategies, recoding."


def opening_lines(run: Run) -> list[str]:
  """What the log says before the first step: model, data, batches, devices, and any warnings."""
  experiment, task = run.experiment, run.task
  weights = task.objective.weights(task.model.config)
  split = {axis: size for axis, size in run.mesh.shape.items() if size > 1}
  shape = " x ".join(f"{size} {axis}" for axis, size in split.items()) or "1 data"
  lines = [
    f"{experiment.name}: {task.describe()} {count_parameters(task):,} parameters.",
    "objective: " + " + ".join(f"{weight:g} x {name}" for name, weight in weights.items()),
    f"{task.dataset.describe_batches()}; {run.batches_per_epoch[0]:,} an epoch,"
    f" {run.total_steps:,} steps in all",
    f"devices: {jax.device_count()} x {jax.devices()[0].device_kind} ({shape})",
  ]
  return [*lines, *task.dataset.notes(), *(f"warning: {w}" for w in experiment.model.warnings())]


def phase(run: Run, number: int) -> str:
  """What begins, where one phase follows another."""
  it = run.experiment.phases[number]
  part = "all training data" if it.part == "all" else f"the {it.part} part of the training data"
  trains = {
    "all": "everything trains",
    "routing": "the routers train",
    "rest": "everything but the routers trains",
  }
  # Of several groups, and where there are others than these, their names say it best.
  what = f"what trains is {' and '.join(it.trainable.split('+'))}"
  if it.trainable == "all" or not run.experiment.groups:
    what = trains.get(it.trainable, what)
  return (
    f"phase {number + 1} of {len(run.experiment.phases)}, {it.name}:"
    f" {what} on {part},"
    f" {run.batches_per_epoch[number]:,} batches an epoch, up to step {run.phase_ends[number]:,}"
  )


def count_parameters(task: Task) -> int:
  """Number of a model's parameters, from shapes alone."""
  return size_of(abstract_parameters(task))


def abstract_parameters(task: Task) -> PyTree:
  """Shapes and types of a model's parameters, none of which is made."""
  return nn.unbox(task.shapes)


def size_of(params: PyTree) -> int:
  """How many numbers a tree of arrays, or of their shapes, has."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def page(experiment: Experiment, cache: Path | None = None) -> str:
  """An experiment's model as text: a diagram, then its parameters and FLOPs beside the plain one's.

  No parameter is made, and nothing is trained but tokenizers. No line has over 100 characters.

  Args:
    experiment: any.
    cache: folder in which trained tokenizers are kept.

  Raises:
    UserError: task and model do not fit together.
  """
  task, note = assemble(experiment, cache)
  plain = task.dataset.config.build(task.model.config.plain(), files=task.dataset.files())
  warnings = [f"warning: {warning}" for warning in experiment.model.warnings()]
  head = _wrapped(experiment.name, task.describe(), *([note] if note else []), *warnings)
  params, others = abstract_parameters(task), abstract_parameters(plain)
  drawn = diagram.draw(diagram.blocks_of(task, params, others))
  return "\n".join([*head, "", *drawn, "", *comparison((task, params), (plain, others))])


def assemble(experiment: Experiment, cache: Path | None = None) -> tuple[Task, str]:
  """The task of an experiment, and a note if its vocabulary is not that of its training data.

  Nothing is downloaded.

  Raises:
    UserError: task and model do not fit together.
  """
  config = dataclasses.replace(experiment.task, data=_offline(experiment.task.data))
  try:
    files = Start(Path(experiment.start)).files() if experiment.start else None
    return config.build(experiment.model, files=files, cache=cache), ""
  except UserError as error:
    reason = str(error)
  task = config.build(experiment.model, files=placeholders(experiment.task))
  note = (
    "Vocabularies are as large as configured and may be smaller in truth, as none could be made"
  )
  return task, f"{note}: {reason}"


def placeholders(config: TaskConfig) -> dict[str, bytes]:
  """Files of a task with tokenizers of the configured sizes, whose words mean nothing.

  None for a task without tokenizers.
  """
  source = getattr(config, "tokenizer_with_mask", None) or getattr(config, "tokenizer", None)
  if source is None:
    return {}
  target = getattr(config, "target_tokenizer", None) or source
  return {FILE: _words(source), SOURCE_FILE: _words(source), TARGET_FILE: _words(target)}


def _words(config: TokenizerConfig) -> bytes:
  size = config.vocab_size
  if config.kind == "gpt2":
    size = GPT2 + len(config.special_tokens) + len(CONTROLS) - 1
  count = size - len(CONTROLS) - len(config.special_tokens)
  return _numbered(count, config.special_tokens)


@functools.lru_cache(maxsize=8)
def _numbered(count: int, special_tokens: tuple[str, ...]) -> bytes:
  return Words(list(map(str, range(count))), special_tokens=special_tokens).to_bytes()


def _offline(value: object) -> Any:
  """Data, and what they consist of, without leave to download anything."""
  if isinstance(value, tuple):
    return tuple(map(_offline, value))
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return value
  fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  changed = {name: name != "download" and _offline(it) for name, it in fields.items()}
  return dataclasses.replace(value, **changed)


def comparison(mine: tuple[Task, PyTree], plain: tuple[Task, PyTree]) -> list[str]:
  """Parameters and floating-point operations of a model beside those of the plain one.

  Args:
    mine: the task, and its parameters or their shapes.
    plain: those with the plain model.
  """
  same = mine[0].model.config == plain[0].model.config
  both = [mine] if same else [mine, plain]
  rows = [("parameters", ",", [size_of(params) for _, params in both])]
  try:
    counts = [flops.count(*one) for one in both]
    names = {"forward": "MFLOPs a token, forward", "training": "MFLOPs a token, training"}
    for field, name in names.items():
      rows.append((name, ",.3f", [getattr(it, field) / 1e6 for it in counts]))
    note = flops.meaning(counts[0], mine[0])
  except UserError as error:
    note = f"FLOPs are not counted: {error}"
  if same:
    table = [f"{name:<28}{value:>18{form}}" for name, form, (value,) in rows]
    return [*table, "", *_wrapped(f"*: a mechanism. The plain model is the same. {note}")]
  table = [f"{'':<28}{'this model':>18}{'plain model':>18}{'difference':>14}"]
  for name, form, (value, base) in rows:
    table.append(f"{name:<28}{value:>18{form}}{base:>18{form}}{value / base - 1:>+14.2%}")
  return [*table, "", *_wrapped(f"{LEGEND} {note}")]


def _wrapped(*texts: str) -> list[str]:
  return [row for text in texts for row in textwrap.wrap(text, diagram.WIDTH)]
