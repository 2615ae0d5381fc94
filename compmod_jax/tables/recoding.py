"""Tables of recoding: Ulmer 2019, chapter 5. Perplexities per word; lower is better."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from compmod_jax.core.errors import check_choice
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.mechanisms.recoding.config import AnchorConfig, RecodingConfig
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.training.experiment import Experiment, Phase, load_config

SCALES = {
  "tiny": "10,000 English sentences of the project's grammar, 4 epochs, 3 samples, on a CPU",
  "ptb": "the Penn Treebank in Mikolov's split, 2 layers of 200 units, 10 epochs, 3 samples",
  "paper": "the Penn Treebank in Mikolov's split, 2 layers of 650 units and 8 epochs",
}
_VARIANTS = {"tiny": "", "ptb": ":ptb-small", "paper": ":ptb"}
_NAMES = {"surprisal": "surprisal", "mc_dropout": "MC dropout", "ensemble": "ensemble"}
_ALL_NAMES = {"surprisal": "surprisal", "argmax": "argmax", "nll": "nll", **_NAMES}
# The constants that the thesis found for each signal (section 5.1.2); it has none for the nll.
_SIZES = {"surprisal": 5.0, "argmax": 5.0, "nll": 1.0, "mc_dropout": 1e-3, "ensemble": 1e-3}
TEST = "PPL test"
_BASELINE = 126.60


def language(scale: str, **recoding: Any) -> Experiment:
  """The language modelling experiment of a scale with this recoding; none without.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, SCALES)
  base = load_config(f"lm_recoding{_VARIANTS[scale]}")
  # A run that its clock stops is another run on another machine.
  base = dataclasses.replace(base, time_limit_minutes=0.0)
  assert isinstance(base.task, LanguageModelConfig)
  # Perplexities of all cells are of as many streams.
  base = dataclasses.replace(base, task=dataclasses.replace(base.task, eval_rows=16))
  if scale != "paper":
    recoding = {"samples": 3, **recoding}
  if scale == "tiny":
    base = _short(base)
  return with_model(base, recoding=RecodingConfig(**recoding))


def _short(base: Experiment) -> Experiment:
  """The experiment on the grammar, small enough for dozens of runs."""
  assert isinstance(base.task, LanguageModelConfig)
  assert isinstance(base.task.data, GrammarDocuments)
  grammar = dataclasses.replace(base.task.data.grammar, train=10_000)
  task = dataclasses.replace(base.task, data=GrammarDocuments(grammar))
  return dataclasses.replace(base, task=task, phases=(Phase(epochs=4),))


def _spec(
  title: str,
  scale: str,
  rows: Mapping[str, Experiment],
  published: Mapping[str, float],
  *more: Column,
) -> Spec:
  columns = [
    Column(TEST, "test", "perplexity", lower=True),
    Column("PPL valid", "valid", "perplexity", lower=True),
    *more,
  ]
  if scale == "tiny":
    shifted = ("combination", "attractor", "depth", "length")
    columns += [Column(f"PPL {s}", s, "perplexity", lower=True) for s in shifted]
  rows = {"none": language(scale), **rows}
  figures = {"none": _BASELINE, **published}
  made = {
    name: Row(experiment, {TEST: figures[name]} if name in figures else {})
    for name, experiment in rows.items()
  }
  title = f"{title}; published on another version of the Penn Treebank"
  return Spec(title, SCALES[scale], made, "none", tuple(columns))


def step_sizes(scale: str) -> Spec:
  """Table 5.1: constant step sizes of every signal."""
  published = {
    "surprisal": {0.1: 126.93, 1.0: 126.94, 5.0: 125.33, 10.0: 170.51, 25.0: 235.14},
    "mc_dropout": {
      1e-4: 144.03, 1e-3: 139.61, 0.01: 142.43, 0.1: 157.91, 1.0: 169.89, 5.0: 198.95,
    },
    "ensemble": {1e-4: 143.66, 1e-3: 139.40, 0.01: 144.29, 0.1: 151.61, 1.0: 164.79, 5.0: 204.00},
  }  # fmt: skip
  rows, figures = {}, {}
  for signal, by_size in published.items():
    for size, figure in by_size.items():
      name = f"{_NAMES[signal]} {size:g}"
      rows[name] = language(scale, signal=signal, size=size)
      figures[name] = figure
  return _spec("Step sizes of recoding (Ulmer 2019, Table 5.1)", scale, rows, figures)


def signals(scale: str) -> Spec:
  """All error signals, each with a constant and with a learned step size."""
  published = {
    "surprisal": (125.33, 126.25), "mc_dropout": (139.61, 140.50), "ensemble": (139.40, 142.20),
  }  # fmt: skip
  rows, figures = {}, {}
  for signal, name in _ALL_NAMES.items():
    for number, step in enumerate(("constant", "learned")):
      row = f"{name}, {step}"
      rows[row] = language(scale, signal=signal, step=step, size=_SIZES[signal])
      if signal in published:
        figures[row] = published[signal][number]
  return _spec("Error signals (Ulmer 2019, Tables 5.1 and 5.5)", scale, rows, figures)


def samples(scale: str) -> Spec:
  """Table 5.2: numbers of samples, with the speed of evaluation."""
  published = {
    "mc_dropout": {1: 145.77, 5: 138.02, 10: 140.81, 25: 143.88, 50: 143.85},
    "ensemble": {1: 138.54, 5: 161.30, 10: 170.41, 25: 215.23},
  }
  rows, figures = {}, {}
  for signal, by_count in published.items():
    for count, figure in by_count.items():
      name = f"{_NAMES[signal]}, K = {count}"
      rows[name] = language(scale, signal=signal, size=_SIZES[signal], samples=count)
      figures[name] = figure
  speed = Column("tokens/s", "test", "tokens_per_second", 0)
  title = "Samples of the predictive entropy (Ulmer 2019, Table 5.2)"
  return _spec(title, scale, rows, figures, speed)


def dropout(scale: str) -> Spec:
  """Table 5.4: rates of MC dropout."""
  published = (141.32, 140.37, 145.51, 139.14, 143.95, 143.25)
  rates = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
  size = _SIZES["mc_dropout"]
  rows = {
    f"rate {rate:g}": language(scale, signal="mc_dropout", size=size, rate=rate) for rate in rates
  }
  title = "Rates of MC dropout (Ulmer 2019, Table 5.4)"
  return _spec(title, scale, rows, dict(zip(rows, published, strict=True)))


_DYNAMIC = ("learned", "predicted")


def dynamic(scale: str) -> Spec:
  """Table 5.5: step sizes that are learned or predicted."""
  published = (126.25, 129.01, 140.50, 154.48, 142.20, 139.55)
  rows = {
    f"{_NAMES[signal]}, {step}": language(scale, signal=signal, step=step, size=_SIZES[signal])
    for signal, step in itertools.product(_NAMES, _DYNAMIC)
  }
  title = "Learned and predicted step sizes (Ulmer 2019, Table 5.5)"
  return _spec(title, scale, rows, dict(zip(rows, published, strict=True)))


def ablation(scale: str) -> Spec:
  """Table 5.6: recoding in training alone, and at test alone."""
  removed = (126.11, 126.25, 129.01, 138.01, 145.74, 159.60, 138.54, 142.36, 140.51)
  added = (125.95, 126.55, 126.59, 126.78, 127.04, 127.11, 126.72, 126.72, 126.72)
  rows, figures = {}, {}
  for when, verb, published in (("train", "removed", removed), ("test", "added", added)):
    cells = itertools.product(_NAMES, ("constant", *_DYNAMIC))
    for (signal, step), figure in zip(cells, published, strict=True):
      name = f"{_NAMES[signal]}, {step}, {verb} at test"
      rows[name] = language(scale, signal=signal, step=step, size=_SIZES[signal], when=when)
      figures[name] = figure
  return _spec("Recoding removed or added at test (Ulmer 2019, Table 5.6)", scale, rows, figures)


def decoders(scale: str) -> Spec:
  """What several decoders cost, trained without recoding: with and without anchors, gradients."""

  def three(**anchor: Any) -> Experiment:
    made = {"size": _SIZES["ensemble"], "samples": 3, "anchor": AnchorConfig(**anchor)}
    return language(scale, signal="ensemble", when="test", **made)

  rows = {
    "3 decoders": three(),
    "3 decoders, no anchors": three(weight_decay=0.0),
    "3 decoders, each by its own loss": three(independent=True),
  }
  return _spec("The decoders of an ensemble", scale, rows, {})
