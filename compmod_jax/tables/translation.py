"""Tables of translation models: Kolios 2023, chapters 5 and 6, and DropHead (Zhou et al. 2020)."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.decoding import DecodeConfig
from compmod_jax.mechanisms.competition.drophead import DropHeadConfig
from compmod_jax.models.transformer import AttentionKind, TransformerConfig
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.tasks.bilevel import BilevelConfig
from compmod_jax.training.experiment import (
  Experiment,
  Phase,
  load_config,
  translation_task,
)
from compmod_jax.training.optimizer import OptimizerConfig
from compmod_jax.training.regimes import REGIMES

BLEU, TEST, TRAIN = "BLEU test", "PPL test", "PPL train"

# Scales: data and model. Rows change the model or the training regime.

SCALES = {
  "tiny": "the project's grammar, on a CPU",
  "tatoeba": "Tatoeba, an hour a run on 2 CPU cores",
  "paper": "IWSLT14 and the thesis's model, on a GPU",
}
_VARIANTS = {"tiny": "", "tatoeba": ":tatoeba", "paper": ":iwslt14"}


MUON = OptimizerConfig(
  name="muon",
  learning_rate=4e-3,
  schedule="cosine",
  warmup_steps=200,
  clip=1.0,
  newton_schulz_steps=3,
  preconditioning="aol",
)
"""Of tables that need as few steps as possible: chosen on validation sentences of Tatoeba."""


def translation(scale: str, variant: str = "", **model: object) -> Experiment:
  """The plain translation experiment of a scale.

  Args:
    scale: data and model.
    variant: another variant of the configuration, for example `:wmt14`.
    **model: changes of its model.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, SCALES)
  base = load_config(f"nmt_cah{variant or _VARIANTS[scale]}")
  if scale == "tiny":
    base = dataclasses.replace(
      base,
      task=dataclasses.replace(base.task, data=GrammarData(train=30_000, test=400, shifted=200)),
      phases=(Phase(steps=800),),
      evaluate_every=400,
      evaluate_sentences=100,
    )
  # A run that its clock stops is another run on another machine.
  base = dataclasses.replace(base, time_limit_minutes=0.0, score_train=True)
  return with_model(base, compete=(), **model)


def _model(experiment: Experiment) -> TransformerConfig:
  assert isinstance(experiment.model, TransformerConfig)
  return experiment.model


def shifted_columns() -> list[Column]:
  """Columns of the grammar's splits out of distribution."""
  shifted = ("combination", "attractor", "depth", "length")
  columns = [Column(f"PPL {s}", s, "perplexity", 3, lower=True) for s in shifted]
  return [*columns, *(Column(f"BLEU {s}", s, "bleu") for s in shifted)]


def _spec(
  title: str,
  scale: str,
  reference: str,
  experiments: Mapping[str, Experiment],
  published: Mapping[str, tuple[float, ...]],
  data: str = "",
) -> Spec:
  """A table with published figures, given in the order of the first columns."""
  columns = [
    Column(BLEU, "test", "bleu"),
    Column(TEST, "test", "perplexity", 3, lower=True),
    Column(TRAIN, "train", "perplexity", 3, lower=True),
  ]
  if scale == "tiny":
    columns += shifted_columns()
  rows = {
    name: Row(experiment, dict(zip((BLEU, TEST, TRAIN), published.get(name, ()), strict=False)))
    for name, experiment in experiments.items()
  }
  return Spec(title, data or SCALES[scale], rows, reference, tuple(columns))


# Kolios 2023, chapter 5: places in the order encoder self, decoder self, encoder-decoder.

PLACES: dict[str, tuple[AttentionKind, ...]] = {
  "none": (),
  "enc": ("encoder_self",),
  "dec": ("decoder_self",),
  "enc+dec": ("encoder_self", "decoder_self"),
  "x": ("cross",),
  "enc+x": ("encoder_self", "cross"),
  "dec+x": ("decoder_self", "cross"),
  "all": ("encoder_self", "decoder_self", "cross"),
}
# Rows are all settings of these: heads compete there, or they do not.
_FACTORS = {
  name: tuple(row for row, places in PLACES.items() if place in places)
  for name, place in (("encoder", "encoder_self"), ("decoder", "decoder_self"), ("cross", "cross"))
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
  check(heads in (4, 8), f"--heads is {heads}; Table 5.1 has 4 and 8 heads. Choose one of them.")
  base = translation(scale, heads=heads)
  rows = {name: with_model(base, compete=places) for name, places in PLACES.items()}
  published = dict(zip(PLACES, _PLACES_4 if heads == 4 else _PLACES_8, strict=True))
  title = f"Where heads compete, {heads} heads (Kolios 2023, Table 5.1)"
  return dataclasses.replace(_spec(title, scale, "none", rows, published), factors=_FACTORS)


def sizes(scale: str) -> Spec:
  """Table 5.2: widths D_a x D_InfA of the router, in encoder self-attention; and the plain row."""
  base = translation(scale, heads=4)
  rows = {"none": base}
  published: dict[str, tuple[float, ...]] = {"none": _PLACES_4[0]}
  figures = (33.27, 33.38, 33.71, 33.46, 33.61, 33.55, 33.46, 33.38, 33.53)
  grid = itertools.product((12, 24, 48), (64, 128, 256))
  for (key, hidden), figure in zip(grid, figures, strict=True):
    config = dataclasses.replace(_model(base).competition, key_dim=key, hidden_dim=hidden)
    name = f"{key}x{hidden}"
    rows[name] = with_model(base, compete=PLACES["enc"], competition=config)
    published[name] = (figure,)
  title = "Widths of the router, encoder self-attention (Kolios 2023, Table 5.2)"
  return _spec(title, scale, "none", rows, published)


def silent(scale: str) -> Spec:
  """Table 5.3: the least compatible of four heads is silent."""
  base = translation(scale, heads=4)
  config = dataclasses.replace(_model(base).competition, rule="top_k", keep=3)
  rows = {
    name: with_model(base, compete=places, competition=config) if places else base
    for name, places in PLACES.items()
  }
  title = "The least compatible of 4 heads is silent (Kolios 2023, Table 5.3)"
  spec = _spec(title, scale, "none", rows, dict(zip(PLACES, _TOP_K, strict=True)))
  return dataclasses.replace(spec, factors=_FACTORS)


def regimes(scale: str) -> Spec:
  """Table 5.4: routers trained jointly, afterwards, or in turns; and the plain row."""
  base = translation(scale, heads=4)
  # A rate that ends at 0 would leave nothing for the routers, which train last.
  base = dataclasses.replace(
    base, optimizer=dataclasses.replace(base.optimizer, schedule="inverse_sqrt")
  )
  if scale == "tiny":
    # Fifteen epochs of all regimes within minutes.
    data = dataclasses.replace(base.task.data, train=15_000)
    base = dataclasses.replace(base, task=dataclasses.replace(base.task, data=data))
  rows = {"none": dataclasses.replace(base, phases=REGIMES["joint"](_EPOCHS[scale]))}
  published: dict[str, tuple[float, ...]] = {"none": _PLACES_4[0]}
  figures = {
    "joint": (_PLACES_4[1], _PLACES_4[2], _PLACES_4[3]),
    "sequential": ((32.10, 5.77, 5.35), (32.41, 5.71, 5.39), (32.52, 5.81, 5.33)),
    "iterative": ((32.24, 5.76, 5.29), (32.27, 5.76, 5.53), (32.22, 5.79, 5.27)),
  }
  for regime, by_place in figures.items():
    for place, figure in zip(("enc", "dec", "enc+dec"), by_place, strict=True):
      experiment = with_model(base, compete=PLACES[place])
      rows[f"{regime} {place}"] = dataclasses.replace(
        experiment, phases=REGIMES[regime](_EPOCHS[scale])
      )
      published[f"{regime} {place}"] = figure
  title = "Ways of training the routers (Kolios 2023, Table 5.4)"
  return _spec(title, scale, "none", rows, published)


_EPOCHS = {"tiny": 15, "tatoeba": 7, "paper": 15}


def recurrent(scale: str) -> Spec:
  """LSTMs with additive and multiplicative attention beside a Transformer, after equal minutes.

  The clock ends every run, so that cells are comparable only where one machine made all of them.

  Raises:
    UserError: an unknown scale.
  """
  minutes = {"tiny": 4.0, "tatoeba": 20.0}
  check_choice("--scale", scale, minutes)
  lstm = load_config(f"nmt_lstm{_VARIANTS[scale]}")
  experiments = {
    "Transformer": with_model(load_config(f"nmt_cah{_VARIANTS[scale]}"), compete=()),
    "LSTM, additive": lstm,
    "LSTM, multiplicative": with_model(lstm, attention="multiplicative"),
  }
  rows = {
    name: Row(
      dataclasses.replace(
        one,
        # A rate that ends with the steps would have to know how many there will be.
        optimizer=dataclasses.replace(one.optimizer, schedule="inverse_sqrt"),
        phases=(Phase(steps=1_000_000),),
        evaluate_every=1000,
        evaluate_sentences=100,
        time_limit_minutes=minutes[scale],
      )
    )
    for name, one in experiments.items()
  }
  columns = (
    Column(BLEU, "test", "bleu"),
    Column("BLEU valid", "valid", "bleu"),
    Column(TEST, "test", "perplexity", 3, lower=True),
  )
  title = f"Translation after {minutes[scale]:g} minutes of training"
  return Spec(title, SCALES[scale], rows, "Transformer", columns)


# Kolios 2023, section 6.2: his first proposals. All rows make as many steps.

_STEPS, _ROUNDS = 800, 8


def meta_routers(scale: str) -> Spec:
  """Meta-learned routers beside the three training regimes, in and out of distribution.

  In `sequential` and `iterative` routers have the share of the steps that their part has of the
  data. Two more rows are of the same section: fewer active heads, and short sentences first.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"tiny": "the project's grammar and a small model, on a CPU"}
  check_choice("--scale", scale, scales)
  base = with_model(translation("tiny", dim=64, heads=4, ffn_dim=256), compete=PLACES["enc"])
  given = translation_task(base)
  task = dataclasses.replace(
    given,
    data=GrammarData(train=15_000, test=300, shifted=150),
    batch=dataclasses.replace(given.batch, tokens=1024, bucket_count=2),
    decode=DecodeConfig(method="greedy"),
  )
  base = dataclasses.replace(
    base,
    task=task,
    optimizer=dataclasses.replace(base.optimizer, schedule="inverse_sqrt"),
    phases=(Phase(steps=_STEPS),),
    evaluate_every=_STEPS,
    score_train=False,
  )
  routing = round(task.small_share * _STEPS)

  def turns(rounds: int) -> Experiment:
    """Everything but the routers, and these, by turns."""
    steps = (_STEPS - routing) // rounds, routing // rounds
    rest = Phase("rest", part="large", trainable="rest", steps=steps[0])
    routers = Phase("routing", part="small", trainable="routing", steps=steps[1])
    return dataclasses.replace(base, phases=(rest, routers) * rounds)

  def learned(**fields: Any) -> Experiment:
    return dataclasses.replace(
      base, task=dataclasses.replace(task, bilevel=BilevelConfig(**fields))
    )

  competition = dataclasses.replace(_model(base).competition, rule="top_k", keep=3)
  short = dataclasses.replace(task.batch, short_first=1)
  rows = {
    "joint": base,
    "sequential": turns(1),
    "iterative": turns(_ROUNDS),
    "meta": learned(),
    "meta, first order": learned(first_order=True),
    "meta, no inner steps": learned(steps=0),
    "joint, 3 of 4 heads": with_model(base, competition=competition),
    "joint, short first": dataclasses.replace(base, task=dataclasses.replace(task, batch=short)),
  }
  columns = (Column(BLEU, "test", "bleu"), Column(TEST, "test", "perplexity", 3, lower=True))
  title = "Meta-learned routers and other ways of training them (after Kolios 2023, section 6.2)"
  made = {name: Row(experiment) for name, experiment in rows.items()}
  return Spec(title, scales[scale], made, "joint", (*columns, *shifted_columns()))


# DropHead: where its probability goes, with the heads of the model and with twice as many.

_BIG: dict[str, Any] = {"dim": 1024, "heads": 16, "ffn_dim": 4096, "dropout": 0.3}
_DROPHEAD = {
  "": DropHeadConfig(),
  ", DropHead": DropHeadConfig("constant"),
  ", scheduled DropHead": DropHeadConfig("v"),
}
_ZHOU = ((28.7, 4.32), (29.2, 4.15), (29.4, 4.08), (28.4, 4.39), (29.3, 4.12), (29.6, 4.02))


def drophead(scale: str) -> Spec:
  """DropHead's table: constant and scheduled, with few heads and with many."""
  if scale == "paper":
    base = translation(scale, ":wmt14", **_BIG)
    data = dataclasses.replace(base.task.data, source_language="en", target_language="de")
    base = dataclasses.replace(base, task=dataclasses.replace(base.task, data=data))
    remark = "WMT14 English to German and the big Transformer, on many GPUs"
  else:
    base, remark = translation(scale, heads=4), ""
  heads = _model(base).heads
  rows = {
    f"{count} heads{name}": with_model(base, heads=count, drophead=config)
    for count, (name, config) in itertools.product((heads, 2 * heads), _DROPHEAD.items())
  }
  title = "DropHead and its schedule (Zhou et al. 2020, in Kolios 2023, Table 3.3)"
  published = dict(zip(rows, _ZHOU, strict=True))
  return _spec(title, scale, f"{heads} heads", rows, published, remark)
