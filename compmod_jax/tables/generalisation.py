"""Systematic generalisation: parts of models that may help, under one protocol.

Every run of a data set takes the same number of steps and keeps the moving average of its last
parameters; outputs are searched greedily and right if they are right as a whole. One row,
`plain, best in distribution`, keeps the parameters with the best score in distribution instead, as
most published failures did (Csordas et al. 2021, "The Devil is in the Detail").
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from compmod_jax.core.errors import check_choice
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.scan import PROGRESS
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.layers.mixture_of_depths import DepthRouterConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.tables.translation import MUON
from compmod_jax.tasks.logic_in_context import LogicInContextConfig
from compmod_jax.training.experiment import Experiment, Phase, load_config, translation_task

_LONGER = ("test", "longer_2", "longer_3")
_DEEPER = ("test", "deeper_valid", "deeper")


@dataclasses.dataclass(frozen=True)
class _Data:
  """A data set.

  Attributes:
    text: in a few words.
    config: its configuration.
    parts: those that are scored.
    changes: fields of its data that differ from the configuration's.
    primitives: whether added primitives are one of the ingredients.
    steps: of training; 0: those of the configuration.
    scratchpad: words of a target at most that says the steps to the answer, in training; 0: none
      can.
    outputs: words of an output at most that says the steps to a string; 0: none can.
  """

  text: str
  config: str
  parts: tuple[str, ...] = ("test",)
  changes: Mapping[str, object] = dataclasses.field(default_factory=dict)
  primitives: bool = False
  steps: int = 0
  scratchpad: int = 0
  outputs: int = 0

  @property
  def scan(self) -> bool:
    """Whether these are SCAN's commands by themselves, whose actions have labels of progress."""
    return self.config.startswith("scan:")

  @property
  def symbols(self) -> bool:
    """Whether symbols can be numbered by words before them."""
    return self.config.removeprefix("systematic:") in ("copy", "reverse", "addition")

  @property
  def nested(self) -> bool:
    """Whether expressions have others inside, deeper in tests than in training."""
    return "deeper" in self.parts

  @property
  def tables(self) -> bool:
    """Whether these are tables that are composed."""
    return self.config.startswith("systematic:table_lookup")

  def experiment(self) -> Experiment:
    """The plain model, whose last parameters are kept and which no clock stops."""
    base = with_model(load_config(self.config), compete=())
    base = dataclasses.replace(base, model_selection="last", time_limit_minutes=0.0)
    if self.steps:
      base = dataclasses.replace(
        base, phases=(Phase(steps=self.steps),), evaluate_every=self.steps // 5
      )
    return _with_data(base, **self.changes)


_SCAN = 10_000  # steps, with which added primitives pass three times
_TABLES = (*_DEEPER, "composition", "primitive")
SCALES = {
  "quick": _Data("copies of up to 20 symbols", "systematic:copy", _LONGER, steps=1500),
  "table_lookup": _Data(
    "tables of 3 bits, composed; the first one applied stands last",
    "systematic:table_lookup",
    _TABLES,
    steps=10_000,
    scratchpad=200,
  ),
  "table_lookup_forward": _Data(
    "tables of 3 bits, composed; the first one applied stands first",
    "systematic:table_lookup_forward",
    _TABLES,
    steps=10_000,
    scratchpad=200,
  ),
  "arithmetic": _Data(
    "sums and products modulo 10, nested", "systematic:arithmetic", _DEEPER, scratchpad=320
  ),
  "list_operations": _Data(
    "operations on nested lists", "systematic:list_operations", _DEEPER, scratchpad=344
  ),
  "copy": _Data("copies of up to 20 symbols", "systematic:copy", _LONGER),
  "reverse": _Data("up to 20 symbols, the last one first", "systematic:reverse", _LONGER),
  "addition": _Data(
    "two numbers of up to 20 digits", "systematic:addition", _LONGER, scratchpad=320
  ),
  "sorting": _Data("up to 20 digits, the least one first", "systematic:sorting", _LONGER),
  "parity": _Data("whether up to 20 bits have an even sum", "systematic:parity", _LONGER),
  "scan_length": _Data(
    "SCAN, up to 22 actions in training", "scan:length", steps=_SCAN, scratchpad=200
  ),
  "scan_length_26": _Data(
    "SCAN, up to 26 actions in training",
    "scan:length",
    changes={"cut": 26},
    steps=_SCAN,
    scratchpad=200,
  ),
  "scan_jump": _Data(
    "SCAN, jump by itself in training",
    "scan:addprim_jump",
    primitives=True,
    steps=_SCAN,
    scratchpad=200,
  ),
  "scan_jump_mlc": _Data(
    "SCAN with study pairs, jump composed with other meanings only",
    "mlc:addprim_jump_exchanged",
  ),
  "scan_around_right": _Data(
    "SCAN, no around right in training",
    "scan:template_around_right",
    primitives=True,
    steps=_SCAN,
    scratchpad=200,
  ),
  **{
    f"scan_mcd{n}": _Data(
      f"SCAN, compounds that diverge, split {n}",
      "scan:simple",
      changes={"split": f"mcd{n}"},
      steps=_SCAN,
      scratchpad=200,
    )
    for n in (1, 2, 3)
  },
  "cogs": _Data(
    "COGS, nouns in new roles and deeper recursion kept from its training part",
    "cogs:held_out",
    ("test", "held_out"),
    steps=_SCAN,
  ),
  "pcfg_systematicity": _Data(
    "PCFG SET, four pairs of functions in the test alone",
    "pcfg_set:systematicity",
    steps=_SCAN,
    outputs=4608,
  ),
  "pcfg_productivity": _Data(
    "PCFG SET, up to eight functions in training",
    "pcfg_set:productivity",
    steps=_SCAN,
    outputs=4608,
  ),
}
"""Name of a scale -> its data."""

SEARCH = "scan_length_search"
"""The scale of the search of settings for SCAN's length splits."""
_LABELS = 160  # from which random ones are drawn
_HINTS, _NEAR = 100, 24  # words that number symbols; distances that biases tell apart there
# Biases that tell near words apart and no far ones: all else is looked up by what words are.
_NEAR_WORDS: dict[str, object] = {
  "positions": "relative_bias",
  "relative_buckets": 24,
  "relative_distance": 13,
}
_NEAR_WORDS_RATE = 2e-3  # of learning
_WINDOW = 5  # words of SCAN's scratchpads: the newest action with what is left, and one more
_DECODER = DecoderConfig(
  decoder_layers=2,
  dim=128,
  heads=4,
  ffn_dim=512,
  activation="relu",
  positions="relative_bias",
  relative_buckets=40,
  relative_distance=21,
  convolution=4,
  scale_embeddings=True,
  max_length=5120,
  dropout=0.0,
)
"""Looks up its source as it looks up the steps that it writes."""
_ALONE = "decoder alone, convolution"
_JOINED = 24  # most functions of PCFG SET's training sentences that are joined, as tests have
_STRING_BATCHES = BatchConfig(
  tokens=2560,
  buckets=(256, 512, 768, 1152, 1664, 2560),
  ceiling=640,  # of no effect beside buckets
  short_batches=1000,
  own_lengths=True,
)
_BLANKS = 6  # one more than the functions that the deepest compositions have beyond trained ones
_WIDTH = 256  # of feed-forward networks, for which the widths below are
_ENCODER, _ALL = ("encoder_self",), ("encoder_self", "decoder_self", "cross")
_MOH = CompetitionConfig(rule="top_k", keep=2, shared_heads=1, balance=0.01)
_CHOICE = CompetitionConfig(
  rule="top_k", keep=2, weighting="normalised_sigmoid", bias_balance=0.001
)
_EXPERTS = ExpertsConfig(7, matched=True, competition=_CHOICE, shared=1)
INGREDIENTS: dict[str, dict[str, object]] = {
  "plain": {},
  "plain, wider": {"ffn_dim": 320},
  "learned": {"positions": "learned"},
  "no positions": {"positions": "none"},
  "ALiBi": {"positions": "alibi"},
  "rotary": {"positions": "rotary"},
  "relative bias": {"positions": "relative_bias"},
  "relative": {"positions": "relative"},
  "random labels": {"random_positions": _LABELS, "max_length": _LABELS},
  "heads compete": {"compete": _ENCODER, "ffn_dim": 216},
  "relative, heads compete": {"positions": "relative", "compete": _ENCODER, "ffn_dim": 216},
  "relative, all heads compete": {"positions": "relative", "compete": _ALL, "ffn_dim": 144},
  "relative, MoH": {
    "positions": "relative",
    "compete": _ENCODER,
    "competition": _MOH,
    "ffn_dim": 216,
  },
  "relative, SwitchHead": {"positions": "relative", "switch_heads": _ENCODER, "ffn_dim": 56},
  "relative, experts": {
    "positions": "relative",
    "expert_layers": ("encoder", "decoder"),
    "experts": _EXPERTS,
    "ffn_dim": 176,
  },
  "relative, mixture of depths": {
    "positions": "relative",
    "depth_layers": ("encoder_1", "decoder_1"),
    "depth_router": DepthRouterConfig(capacity=0.5),
  },
  "relative, gates": {"positions": "relative", "gated_heads": _ALL},
  "relative, HYLA": {"positions": "relative", "attention_form": "hyla"},
  "relative, differential": {"positions": "relative", "attention_form": "differential"},
  "relative, repeated layers": {"positions": "relative", "shared_layers": 1},
  "geometric": {"positions": "none", "attention_form": "geometric"},
  "neural data router": {
    "positions": "none",
    "attention_form": "geometric",
    "norm": "post",
    "shared_layers": 1,
    "encoder_layers": 8,
    "copy_gate": True,
    "copy_gate_closed": 0.1,
  },
  "noscale": {"embedding_scale": "noscale", "share_embeddings": "none"},
  "ped": {"embedding_scale": "ped"},
}
"""Row -> what differs from the plain model. Widths give rows with mechanisms as many parameters,
within 1 %, as the same row has without, and `plain, wider` those of `relative`; see
`tools.equal`."""
IN_USE: dict[str, dict[str, object]] = {"neural data router": {"encoder_layers": 14}}
"""Row -> fields of the model that have other values once it is trained."""
_THREE: dict[str, object] = {"encoder_layers": 3, "decoder_layers": 3}
SEARCHED: dict[str, dict[str, object]] = {
  name: {"positions": "relative", **changes}
  for name, changes in {
    "relative": {},
    "dropout 0.3": {"dropout": 0.3},
    "dropout 0.5": {"dropout": 0.5},
    "three layers": _THREE,
    "three layers, dropout 0.3": {**_THREE, "dropout": 0.3},
    "three layers, dropout 0.5": {**_THREE, "dropout": 0.5},
    "three repeated layers": {**_THREE, "shared_layers": 1},
    "three repeated layers, dropout 0.3": {**_THREE, "shared_layers": 1, "dropout": 0.3},
    "three repeated layers, dropout 0.5": {**_THREE, "shared_layers": 1, "dropout": 0.5},
    "noscale": {"embedding_scale": "noscale", "share_embeddings": "none"},
  }.items()
}
"""Row of a search -> what differs from the plain model."""
_MUON = {"relative": (2e-3, 4e-3), "three layers": (2e-3,)}
"""Row of a search -> learning rates of Muon with which it is trained, too."""
PUBLISHED: dict[str, object] = {
  "positions": "relative",
  "norm": "post",
  "heads": 8,
  **_THREE,
  **dict.fromkeys(("dropout", "attention_dropout", "ffn_dropout"), 0.5),
}
"""The Transformer with relative positions for SCAN of Csordas et al. 2021."""
_LSTM = Seq2SeqLstmConfig(dim=128, embedding_dim=128, attention_dim=128, dropout=0.1)
RECODED: dict[str, RecodingConfig] = {
  "LSTM": RecodingConfig(),
  "LSTM, recoded by entropy": RecodingConfig("entropy", size=0.1),
  "LSTM, recoded by expected loss in use": RecodingConfig("predicted_error", size=0.1, when="test"),
}
"""Row -> how the states of an LSTM with attention are recoded."""
_PLAIN, _CHOSEN = "plain", "plain, best in distribution"
_QUICK = ("plain", "relative", "heads compete", "relative, heads compete")
_FACTORS: dict[str, tuple[str, ...]] = {
  "relative": ("relative", "relative, heads compete"),
  "competition": ("heads compete", "relative, heads compete"),
}


def generalisation(scale: str) -> Spec:
  """One data set; each of them is a scale.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, (*SCALES, SEARCH))
  if scale == SEARCH:
    return _search()
  data = SCALES[scale]
  base, quick = data.experiment(), scale == "quick"
  experiments: dict[str, Experiment] = {}
  assert isinstance(base.model, TransformerConfig)
  widths = base.model.ffn_dim == _WIDTH
  labels = translation_task(base).batch.ceiling < _LABELS
  for name, changes in INGREDIENTS.items():
    fits = (widths or "ffn_dim" not in changes) and (labels or "random_positions" not in changes)
    if name in _QUICK or (not quick and fits):
      experiments[name] = with_model(base, **changes)
    if name == _PLAIN and not quick:
      experiments[_CHOSEN] = dataclasses.replace(base, model_selection="best")
  if data.scan:
    for name, recoding in RECODED.items():
      recoded = dataclasses.replace(_LSTM, recoding=recoding)
      experiments[name] = dataclasses.replace(base, model=recoded)
    optimizer = dataclasses.replace(base.optimizer, learning_rate=1e-3, b2=0.999, clip=5.0)
    published = dataclasses.replace(base, optimizer=optimizer)
    experiments["relative, published settings"] = with_model(published, **PUBLISHED)
    labelled = with_model(experiments["relative"], target_labels=tuple(PROGRESS.values()))
    experiments["relative, labels of progress"] = _with_task(labelled, label_weight=1.0)
  if data.symbols and not quick:
    # Biases tell distances apart that training has.
    for name, near in (("relative", {}), ("relative bias", {"relative_distance": _NEAR})):
      hinted = _with_hints(with_model(experiments[name], **near))
      experiments[f"{name}, index hints"] = hinted
  if data.primitives:
    for name in ("plain", "relative"):
      added = _with_data(experiments[name], added_primitives=20)
      experiments[f"{name}, added primitives"] = added
  if data.scratchpad:
    # Symbols of sums are numbered where steps name them.
    start = "relative, index hints" if data.symbols else "relative"
    written = {start: experiments[start]}
    if data.primitives:
      written["relative, added primitives"] = experiments["relative, added primitives"]
    if data.scan:
      for name, experiment in list(written.items()):
        windowed = with_model(experiment, sliding_window=_WINDOW)
        written[name.replace("relative", "relative, sliding window")] = windowed
    if data.nested:
      optimizer = dataclasses.replace(base.optimizer, learning_rate=_NEAR_WORDS_RATE)
      near_words = with_model(dataclasses.replace(base, optimizer=optimizer), **_NEAR_WORDS)
      written["near words"] = near_words
      written[_ALONE] = _decoder_alone(base)
      if data.tables:
        written["near words, blanks"] = _with_data(near_words, blanks=_BLANKS)
    for name, experiment in written.items():
      experiments[f"{name}, scratchpad"] = _with_scratchpad(experiment, data)
    if data.scan:
      for name in written:
        plain = experiments[f"{name}, scratchpad"]
        experiments[f"{name}, scratchpad with what follows"] = _with_a_word(plain, "what_follows")
        experiments[f"{name}, scratchpad with separators"] = _with_a_word(plain, "separator")
  if data.outputs:
    experiments[f"{_ALONE}, scratchpad"] = _with_steps_to_strings(_decoder_alone(base), data)
  columns = tuple(
    Column(f"exact {part.replace('_', ' ')}", part, "exact_match", 1) for part in data.parts
  )
  rows = {name: Row(one, in_use=IN_USE.get(name, {})) for name, one in experiments.items()}
  title = "Systematic generalisation, exact match"
  return Spec(title, data.text, rows, _PLAIN, columns, _FACTORS if quick else {})


def _search() -> Spec:
  """Settings for SCAN's lengths, scored on training commands that are longer than trained ones."""
  data = dataclasses.replace(SCALES["scan_length_26"], changes={"cut": 26, "trained_up_to": 22})
  base = data.experiment()
  rows = {name: Row(with_model(base, **changes)) for name, changes in SEARCHED.items()}
  for name, rates in _MUON.items():
    for rate in rates:
      optimizer = dataclasses.replace(MUON, learning_rate=rate)
      experiment = dataclasses.replace(rows[name].experiment, optimizer=optimizer)
      rows[f"{name}, Muon {rate:g}"] = Row(experiment)
  columns = (Column("exact 24 to 26 actions", "valid", "exact_match", 1),)
  text = "SCAN, up to 22 actions in training, 24 to 26 in validation"
  return Spec("A search of settings for SCAN's lengths", text, rows, "relative", columns)


def logic_in_context(scale: str) -> Spec:
  """Fuzzy logic in context by several forms of attention, on new combinations and new terms.

  Each seed has unseen combinations of its own, as published.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"small": "", "paper": "-paper"}
  check_choice("--scale", scale, scales)
  variants = {
    "softmax": "softmax",
    "HYLA": "hyla",
    "differential": "differential",
    "heads compete": "compete",
    "gates": "gates",
  }
  rows = {
    name: Row(load_config(f"logic_in_context:{variant}{scales[scale]}"), seeded=_with_seed)
    for name, variant in variants.items()
  }
  columns = tuple(Column(f"R2 {split}", split, "r2", 4) for split in ("valid", "test", "ood"))
  title = "Fuzzy logic in context (Schug et al. 2025)"
  steps = rows["softmax"].experiment.phases[0].steps
  return Spec(title, f"{steps:,} steps of 128 sequences", rows, "softmax", columns)


def _with_seed(experiment: Experiment, seed: int) -> Experiment:
  """The experiment and its data with a seed."""
  assert isinstance(experiment.task, LogicInContextConfig)
  data = dataclasses.replace(experiment.task.data, seed=seed)
  task = dataclasses.replace(experiment.task, data=data)
  return dataclasses.replace(experiment, seed=seed, task=task)


def _with_data(experiment: Experiment, **changes: object) -> Experiment:
  """The experiment with changes of its data."""
  data = dataclasses.replace(translation_task(experiment).data, **changes)
  return _with_task(experiment, data=data)


def _with_hints(experiment: Experiment) -> Experiment:
  """The experiment with a number before every symbol of source and target."""
  batch = dataclasses.replace(translation_task(experiment).batch, ceiling=256)
  return _with_task(_with_data(experiment, hints=_HINTS), batch=batch)


def _with_scratchpad(experiment: Experiment, data: _Data) -> Experiment:
  """The experiment with targets that say the steps to the answer."""
  task = translation_task(experiment)
  batch = dataclasses.replace(task.batch, ceiling=data.scratchpad)
  ratio, extra = 4 * task.decode.max_ratio, 4 * task.decode.max_extra
  decode = dataclasses.replace(task.decode, max_ratio=ratio, max_extra=extra)
  return _with_task(_with_data(experiment, scratchpad=True), batch=batch, decode=decode)


def _with_a_word(experiment: Experiment, field: str) -> Experiment:
  """The experiment with a word more than four for each action of SCAN's scratchpads."""
  task = translation_task(experiment)
  batch = dataclasses.replace(task.batch, ceiling=task.batch.ceiling * 5 // 4)
  ratio, extra = 5 * task.decode.max_ratio / 4, 5 * task.decode.max_extra // 4
  decode = dataclasses.replace(task.decode, max_ratio=ratio, max_extra=extra)
  return _with_task(_with_data(experiment, **{field: True}), batch=batch, decode=decode)


def _decoder_alone(experiment: Experiment) -> Experiment:
  """The experiment with a decoder alone.

  Its convolution tells every key what stands before it, by which words are looked up. Sources,
  which are shorter than steps, are not padded as these are.
  """
  batch = dataclasses.replace(translation_task(experiment).batch, own_lengths=True)
  joint = _with_task(experiment, batch=batch, target_tokenizer=None)
  return dataclasses.replace(joint, model=_DECODER, optimizer=MUON)


def _with_steps_to_strings(experiment: Experiment, data: _Data) -> Experiment:
  """The experiment with the steps to strings of any length.

  Training sentences are joined, so that their steps are as long as those of tests. Words that are
  looked up by what stands before them are found sooner among few: short batches come first.
  """
  task = translation_task(experiment)
  decode = dataclasses.replace(task.decode, max_ratio=0.0, max_extra=data.outputs)
  written = _with_data(experiment, scratchpad=True, joined=_JOINED)
  return _with_task(written, batch=_STRING_BATCHES, decode=decode)


def _with_task(experiment: Experiment, **changes: Any) -> Experiment:
  """The experiment with changes of its task."""
  task = dataclasses.replace(translation_task(experiment), **changes)
  return dataclasses.replace(experiment, task=task)
