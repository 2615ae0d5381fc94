"""The published tables that `train.reproduce` makes again: rows, columns and published figures.

A table is a function from a scale to a `Spec`; a new one is a function and a line in `TABLES`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from compmod_jax import errors
from compmod_jax.analysis.grid import Column
from compmod_jax.data.grammar import GrammarData
from compmod_jax.models.transformer import Place
from train.experiment import Experiment, Phase, load_config
from train.ways import WAYS

BLEU, TEST, TRAIN = "BLEU test", "PPL test", "PPL train"


@dataclasses.dataclass(frozen=True)
class Row:
  """One setting of a table.

  Attributes:
    experiment: what is trained, but for its seed.
    published: column -> published figure.
  """

  experiment: Experiment
  published: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Spec:
  """A table: its rows and what they are compared on.

  Attributes:
    title: what it shows and where it was published.
    rows: name -> row, in order.
    reference: the plain row.
    columns: what is compared.
  """

  title: str
  rows: Mapping[str, Row]
  reference: str
  columns: tuple[Column, ...]


# Scales: data and model. Rows change the model or the way of training.

SCALES = {
  "tiny": "the project's grammar, on a CPU",
  "tatoeba": "Tatoeba, an hour a run on 2 CPU cores",
  "paper": "IWSLT14 and the thesis's model, on a GPU",
}


def translation(scale: str, **model: Any) -> Experiment:
  """The plain translation experiment of a scale; `model` changes its model.

  Raises:
    UserError: an unknown scale.
  """
  errors.check_choice("--scale", scale, SCALES)
  variant = {"tiny": "", "tatoeba": ":tatoeba", "paper": ":iwslt14"}[scale]
  base = load_config(f"configs/nmt_cah.py{variant}")
  if scale == "tiny":
    base = dataclasses.replace(
      base,
      task=dataclasses.replace(base.task, data=GrammarData(train=30_000, test=400, shifted=200)),
      phases=(Phase(steps=1000),),
      evaluate_every=500,
      evaluate_sentences=100,
    )
  # A run that its clock stops is another run on another machine.
  base = dataclasses.replace(base, time_limit_minutes=0.0, score_train=True)
  return _with_model(base, compete=(), **model)


def _with_model(experiment: Experiment, **changes: Any) -> Experiment:
  return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))


def _columns(scale: str) -> tuple[Column, ...]:
  columns = [
    Column(BLEU, "test", "bleu"),
    Column(TEST, "test", "perplexity", 3, lower=True),
    Column(TRAIN, "train", "perplexity", 3, lower=True),
  ]
  if scale == "tiny":
    shifted = ("combination", "attractor", "depth", "length")
    columns += [Column(f"PPL {s}", s, "perplexity", 3, lower=True) for s in shifted]
    columns += [Column(f"BLEU {s}", s, "bleu") for s in shifted]
  return tuple(columns)


def _rows(
  experiments: Mapping[str, Experiment], published: Mapping[str, tuple[float, ...]]
) -> dict[str, Row]:
  """Rows with published figures, given in the order of the first columns."""
  return {
    name: Row(experiment, dict(zip((BLEU, TEST, TRAIN), published.get(name, ()), strict=False)))
    for name, experiment in experiments.items()
  }


# Kolios 2023, chapter 5: places in the order encoder self, decoder self, encoder-decoder.

PLACES: dict[str, tuple[Place, ...]] = {
  "none": (),
  "enc": ("encoder_self",),
  "dec": ("decoder_self",),
  "enc+dec": ("encoder_self", "decoder_self"),
  "x": ("cross",),
  "enc+x": ("encoder_self", "cross"),
  "dec+x": ("decoder_self", "cross"),
  "all": ("encoder_self", "decoder_self", "cross"),
}
_PLACES_4 = (
  (33.25, 5.45, 5.22), (33.61, 5.41, 4.82), (33.28, 5.46, 5.14), (33.54, 5.42, 4.66),
  (33.32, 5.52, 5.30), (33.20, 5.46, 4.95), (33.46, 5.44, 5.13), (33.47, 5.43, 4.82),
)  # fmt: skip
_PLACES_8 = (
  (33.16, 5.48, 5.24), (32.83, 5.53, 4.78), (32.41, 5.63, 5.49), (32.89, 5.55, 4.64),
  (33.19, 5.59, 5.33), (32.68, 5.69, 5.15), (33.18, 5.52, 5.14), (33.28, 5.51, 4.48),
)  # fmt: skip
_TOP_K = (
  (33.25, 5.43), (33.51, 5.45), (33.41, 5.45), (33.23, 5.49), (33.19, 5.54), (33.25, 5.52),
  (33.33, 5.51), (33.42, 5.45),
)  # fmt: skip


def places(scale: str, heads: int) -> Spec:
  """Table 5.1: where heads compete."""
  errors.check(
    heads in (4, 8), f"--heads is {heads}; Table 5.1 has 4 and 8 heads. Choose one of them."
  )
  base = translation(scale, heads=heads)
  rows = {name: _with_model(base, compete=places) for name, places in PLACES.items()}
  published = dict(zip(PLACES, _PLACES_4 if heads == 4 else _PLACES_8, strict=True))
  title = f"Where heads compete, {heads} heads (Kolios 2023, Table 5.1)"
  return Spec(title, _rows(rows, published), "none", _columns(scale))


def sizes(scale: str) -> Spec:
  """Table 5.2: widths D_a x D_InfA of the router, in encoder self-attention; and the plain row."""
  base = translation(scale, heads=4)
  rows = {"none": base}
  published: dict[str, tuple[float, ...]] = {"none": _PLACES_4[0]}
  figures = (33.27, 33.38, 33.71, 33.46, 33.61, 33.55, 33.46, 33.38, 33.53)
  grid = itertools.product((12, 24, 48), (64, 128, 256))
  for (key, hidden), figure in zip(grid, figures, strict=True):
    config = dataclasses.replace(base.model.competition, key_dim=key, hidden_dim=hidden)
    name = f"{key}x{hidden}"
    rows[name] = _with_model(base, compete=PLACES["enc"], competition=config)
    published[name] = (figure,)
  title = "Widths of the router, encoder self-attention (Kolios 2023, Table 5.2)"
  return Spec(title, _rows(rows, published), "none", _columns(scale))


def silent(scale: str) -> Spec:
  """Table 5.3: the least compatible of four heads is silent."""
  base = translation(scale, heads=4)
  config = dataclasses.replace(base.model.competition, rule="top_k", keep=3)
  rows = {
    name: _with_model(base, compete=places, competition=config) if places else base
    for name, places in PLACES.items()
  }
  title = "The least compatible of 4 heads is silent (Kolios 2023, Table 5.3)"
  return Spec(title, _rows(rows, dict(zip(PLACES, _TOP_K, strict=True))), "none", _columns(scale))


def ways(scale: str) -> Spec:
  """Table 5.4: routers trained jointly, afterwards, or in turns; and the plain row."""
  base = translation(scale, heads=4)
  if scale == "tiny":
    # Fifteen epochs of all ways within minutes.
    data = dataclasses.replace(base.task.data, train=15_000)
    base = dataclasses.replace(base, task=dataclasses.replace(base.task, data=data))
  rows = {"none": dataclasses.replace(base, phases=WAYS["joint"](_EPOCHS[scale]))}
  published: dict[str, tuple[float, ...]] = {"none": _PLACES_4[0]}
  figures = {
    "joint": (_PLACES_4[1], _PLACES_4[2], _PLACES_4[3]),
    "sequential": ((32.10, 5.77, 5.35), (32.41, 5.71, 5.39), (32.52, 5.81, 5.33)),
    "iterative": ((32.24, 5.76, 5.29), (32.27, 5.76, 5.53), (32.22, 5.79, 5.27)),
  }
  for way, by_place in figures.items():
    for place, figure in zip(("enc", "dec", "enc+dec"), by_place, strict=True):
      experiment = _with_model(base, compete=PLACES[place])
      rows[f"{way} {place}"] = dataclasses.replace(experiment, phases=WAYS[way](_EPOCHS[scale]))
      published[f"{way} {place}"] = figure
  title = "Ways of training the routers (Kolios 2023, Table 5.4)"
  return Spec(title, _rows(rows, published), "none", _columns(scale))


_EPOCHS = {"tiny": 15, "tatoeba": 7, "paper": 15}


# Name -> spec of a scale and a number of heads, where the table has several.
TABLES: dict[str, Callable[[str, int], Spec]] = {
  "5.1": places,
  "5.2": lambda scale, heads: sizes(scale),
  "5.3": lambda scale, heads: silent(scale),
  "5.4": lambda scale, heads: ways(scale),
}


@functools.cache
def table(name: str, scale: str, heads: int) -> Spec:
  """The table of that name.

  Raises:
    UserError: an unknown table or scale.
  """
  errors.check_choice("TABLE", name, TABLES)
  return TABLES[name](scale, heads)
