"""Prompt and steps give the logits of the whole pass, for every model and every option.

`CASES` are the configurations that are compared, of every model that decodes. A model that is not
there, an option of its own with a value that no case has, or an option of competition and experts
(whose code all models share) that no case of any model has fails
`test_every_option_of_every_model_is_compared`; what cannot matter here is listed with the reason.
"""

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from compmod_jax.decoding.types import permute_cache
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.layers.mechanisms import MechanismsConfig
from compmod_jax.layers.mixture_of_depths import DepthRouterConfig
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH
from compmod_jax.layers.switch_head import SwitchHeadConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.mechanisms.modulation import KINDS
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.competing_experts import CompetingExpertsConfig
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.lstm_lm import Given, LstmConfig, LstmLM, Output
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.neural_interpreter import InterpreterConfig
from compmod_jax.models.neuromodulated import NeuromodulatedConfig
from compmod_jax.models.recurrent import RecurrentConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.models.text import Text
from compmod_jax.models.transformer import ATTENTION_KINDS, TransformerConfig
from compmod_jax.tasks.configs import ModelConfig
from compmod_jax.tasks.meta_transfer import CausalDirectionConfig

VOCAB, BEAMS, STEPS, PROMPT, ROWS = 23, 2, 3, 3, 3
SIZES: dict[str, Any] = {
  "dim": 16, "heads": 4, "ffn_dim": 24, "max_length": 24, "norm_epsilon": 1e-3,
}  # fmt: skip


def heads(**fields: Any) -> CompetitionConfig:
  return CompetitionConfig(**{"key_dim": 3, "hidden_dim": 6, **fields})


def experts(implementation: Any, count: int = 3, **fields: Any) -> ExpertsConfig:
  rule = {} if implementation == "dense" else {"rule": "top_k", "keep": 2}
  return ExpertsConfig(count, True, heads(**(rule | fields)), implementation)


def mechanisms(**fields: Any) -> MechanismsConfig:
  return MechanismsConfig(**{"exchange_heads": 1, "exchange_dim": 3, **fields})


TRANSFORMERS: dict[str, dict[str, Any]] = {
  "all compete": {
    "compete": ATTENTION_KINDS,
    "competition": heads(rule="top_k", keep=2, rescale=True, scale=False, temperature=0.7),
    "expert_layers": ("decoder",),
    "experts": experts("blocked"),
    "norm": "pre",
    "activation": "gelu",
    "positions": "learned",
    "share_embeddings": "all",
    "embedding_scale": "noscale",
    "attention_form": "hyla",
  },
  "relatives of competition": {
    "compete": ATTENTION_KINDS,
    "competition": heads(rule="top_k", keep=2, shared_heads=1),
    "switch_heads": ATTENTION_KINDS,
    "switch_head": SwitchHeadConfig(3, 1),
    "depth_layers": ("encoder", "decoder"),
    "depth_router": DepthRouterConfig(0.5),
    "expert_layers": ("decoder",),
    "experts": dataclasses.replace(
      experts("batched", weighting="sigmoid", bias_balance=0.1), shared=1
    ),
  },
  "values of losers, labels": {
    "embedding_scale": "ped",
    "attention_form": "differential",
    "positions": "alibi",
    "random_positions": 40,
    "compete": ("encoder_self", "decoder_self"),
    "competition": heads(rule="threshold", threshold=0.2, inactive="value"),
    "expert_layers": ("encoder_0", "decoder_0"),
    "experts": experts("dense", rule="threshold", threshold=0.3, rescale=True),
    "activation": "gelu_tanh",
    "share_embeddings": "none",
  },
  "step by step in bfloat16": {
    "compete": ATTENTION_KINDS,
    "competition": heads(routing="plain"),
    "heads": 2,
    "dtype": "bfloat16",
  },
  "rotary, shared layers": {
    "positions": "rotary",
    "compete": ATTENTION_KINDS,
    "competition": heads(),
    "decoder_layers": 2,
    "shared_layers": 1,
    "sliding_window": 1,
  },
  "gated heads, nearest first": {
    "positions": "none",
    "attention_form": "geometric",
    "copy_gate": True,
    "gated_heads": ATTENTION_KINDS,
    "compete": ("cross",),
    "competition": heads(),
    "signal_dim": 3,
  },
  "relative, mechanisms, sliding window": {
    "positions": "relative",
    "sliding_window": 2,
    "mechanism_layers": ("encoder", "decoder_0"),
    "mechanisms": mechanisms(),
  },
  "T5": {
    "norm": "pre",
    "norm_kind": "rms",
    "biases": False,
    "scale_logits": False,
    "gated_ffn": True,
    "positions": "relative_bias",
    "relative_buckets": 6,
    "relative_distance": 5,
    "target_labels": (2, 3),
    "head_dim": 3,
    "share_embeddings": "inputs",
    "compete": ATTENTION_KINDS,
    "competition": heads(),
  },
}
DECODERS: dict[str, dict[str, Any]] = {
  "plain": {},
  "all compete": {
    "compete": ("decoder_self",),
    "competition": heads(rule="top_k", skip=True),
    "expert_layers": ("decoder",),
    "experts": experts("batched", temperature=0.6, scale=False),
    "convolution": 3,
    "sliding_window": 2,
    "tied": False,
    "positions": "sinusoidal",
    "scale_embeddings": True,
    "activation": "relu",
  },
  "bfloat16": {
    "compete": ("decoder_self",),
    "competition": heads(dtype="model"),
    "dtype": "bfloat16",
    "activation": "gelu",
    "attention_form": "hyla",
  },
  "relative bias, wide heads": {
    "positions": "relative_bias",
    "relative_buckets": 6,
    "relative_distance": 5,
    "head_dim": 5,
    "compete": ("decoder_self",),
    "competition": heads(),
  },
  "rotary, shared layers": {
    "positions": "rotary",
    "gated_heads": ("decoder_self",),
    "switch_heads": ("decoder_self",),
    "expert_layers": ("decoder",),
    "experts": experts("dense", weighting="normalised_sigmoid"),
    "decoder_layers": 2,
    "shared_layers": 1,
  },
  "fast weights, labels": {
    "fast_weights": "modulated",
    "convolution": 3,
    "signal_dim": 3,
    "positions": "alibi",
    "random_positions": 40,
    "attention_form": "differential",
    "compete": ("decoder_self",),
    "competition": heads(shared_heads=2, inactive="value"),
    "depth_layers": ("decoder",),
  },
  "fast weights of one rate": {
    "fast_weights": "hebbian",
    "gated_heads": ("decoder_self",),
    "positions": "none",
    "attention_form": "geometric",
    "copy_gate": True,
  },
  "relative, mechanisms, sliding window": {
    "positions": "relative",
    "sliding_window": 3,
    "convolution": 2,
    "mechanism_layers": ("decoder_0",),
    "mechanisms": mechanisms(competition=False),
  },
}
NEMOTS: dict[str, dict[str, Any]] = {
  "as GPT-2, gated fast weights": {
    "gate_start": "half",
    "tied_key_value": True,
    "positions": "learned",
    "scale_embeddings": False,
    "vanilla_norm": True,
    "activation": "gelu_tanh",
    "extra_tokens": ("more",),
    "modulatory_layers": 2,
    "fast_weights": "modulated",
  },
  "all compete": {
    "read_after": 1,
    "gate_places": ("vanilla_1/attention", "vanilla_1/logits", "output_0/ffn", "output_0/logits"),
    "compete": ("vanilla_self", "modulatory_self", "output_self"),
    "competition": heads(rule="top_k", keep=3),
    "expert_layers": ("vanilla", "modulatory", "output_mqa"),
    "experts": dataclasses.replace(experts("ragged", 4), dispatch="exchange", capacity=2.0),
    "convolution": 3,
  },
  "embeddings gate and are marked": {
    "read_after": 0,
    "gate_places": ("vanilla_0/logits", "vanilla_1/ffn"),
    "highlighting": "embedding",
    "convolution": 2,
  },
  "gate off, no positions": {
    "gate": "off",
    "positions": "none",
    "activation": "relu",
    "expert_layers": ("vanilla",),
    "experts": experts("auto", routing="plain", dtype="model"),
  },
  "marks and options": {
    "read_after": 1,
    "highlighting": "vanilla",
    "option_interaction": True,
    "convolution": 3,
    "tied_key_value": True,
    "compete": ("vanilla_self", "modulatory_self", "output_self"),
    "competition": heads(rule="threshold", threshold=0.2, inactive="value"),
    "expert_layers": ("vanilla_1", "output_mqa"),
    "experts": experts("dense"),
  },
  "bfloat16": {
    "compete": ("vanilla_self", "modulatory_self", "output_self"),
    "competition": heads(),
    "dtype": "bfloat16",
  },
  "rotary": {
    "positions": "rotary",
    "convolution": 2,
    "gated_heads": ("vanilla_self", "modulatory_self", "output_self"),
  },
  "mechanisms, alibi": {
    "positions": "alibi",
    "mechanism_layers": ("modulatory", "vanilla"),
    "mechanisms": mechanisms(count=4),
  },
  "relative, fast weights": {
    "positions": "relative",
    "fast_weights": "hebbian",
    "convolution": 2,
    "read_after": 1,
    "gate_places": ("vanilla_1/logits", "vanilla_1/plasticity", "output_0/plasticity"),
    "signal_dim": 2,
  },
}
# Masks that are new at every step have another key at every step: without a rate they are alike.
LSTMS: dict[str, dict[str, Any]] = {
  "none": {"tied": True, "layers": 3},
  "surprisal": {"step": "learned"},
  "argmax": {"step": "predicted", "steps": 2},
  "nll": {"step": "safe", "tied": True},
  "entropy": {"implementation": "definition"},
  "mc_dropout": {"on": "weights", "rate": 0.0},
  "locked_dropout": {"step": "safe"},
  "variational_rnn": {"step": "learned"},
  "ensemble": {"recoded": "top"},
  "weak_supervision": {},
}


def lstm(
  signal: Any, layers: int = 2, tied: bool = False, recoded: str = "all", **recoding: Any
) -> LstmConfig:
  recoding = {"samples": 3, "size": 0.7, "rate": 0.3, "layers": recoded, **recoding}
  return LstmConfig(layers, 6, 6 if tied else 5, tied, recoding=RecodingConfig(signal, **recoding))


WIDTHS: dict[str, Any] = {"dim": 6, "embedding_dim": 5, "attention_dim": 4, "max_length": 24}
ATTENDING: dict[str, dict[str, Any]] = {
  "plain": {"share_embeddings": "all", "encoder_layers": 2},
  "entropy": {"share_embeddings": "none", "recoding": RecodingConfig("entropy", "learned", 0.7)},
  "shared inputs": {"share_embeddings": "inputs"},
  "multiplicative": {
    "attention": "multiplicative",
    "recoding": RecodingConfig("predicted_error", size=0.7),
  },
  "nll": {"decoder_layers": 2, "recoding": RecodingConfig("nll", "predicted", 0.7, layers="top")},
  "argmax": {"recoding": RecodingConfig("argmax", size=0.7, steps=2)},
}
LAYERS = {"vanilla_layers": 2, "modulatory_layers": 1, "output_layers": 1, "tasks": ("lm", "mqa")}
CASES: dict[type, dict[str, Any]] = {
  TransformerConfig: {
    name: TransformerConfig(**(SIZES | {"encoder_layers": 1, "decoder_layers": 1} | fields))
    for name, fields in TRANSFORMERS.items()
  },
  DecoderConfig: {
    name: DecoderConfig(**(SIZES | {"decoder_layers": 1} | fields))
    for name, fields in DECODERS.items()
  },
  NemotConfig: {name: NemotConfig(**(SIZES | LAYERS | fields)) for name, fields in NEMOTS.items()},
  LstmConfig: {name: lstm(name, **fields) for name, fields in LSTMS.items()},
  Seq2SeqLstmConfig: {
    name: Seq2SeqLstmConfig(**WIDTHS | fields) for name, fields in ATTENDING.items()
  },
}
DOES_NOT_DECODE = {
  EncoderConfig: "it sees the whole text at once, and fills in what is masked",
  RecurrentConfig: "any cell's steps; tests/models/test_recurrent.py compares them",
  ConvNetConfig: "it reads images",
  CausalDirectionConfig: "it reads pairs of numbers",
  InterpreterConfig: "it sees a set or a whole text at once",
  CompetingExpertsConfig: "it turns images into images",
  NeuromodulatedConfig: "it reads images",
}
IN_TRAINING = "acts in training alone, not on what a trained model computes"
BY_TASK = "settled by the task, which gives the model `active` and `classifier`"
# Fields, and single values of fields, that no case needs.
OF_NO_MATTER = {
  "dropout": IN_TRAINING,
  "attention_dropout": IN_TRAINING,
  "ffn_dropout": IN_TRAINING,
  "drophead": IN_TRAINING,
  "fewest_repeats": IN_TRAINING,
  "copy_gate_closed": IN_TRAINING,
  "remat": IN_TRAINING,
  "balance": IN_TRAINING,
  "z": IN_TRAINING,
  "through": IN_TRAINING,
  "anchor": IN_TRAINING,
  "classifier": BY_TASK,
  "share": BY_TASK,
  "limit": BY_TASK,
  "only": BY_TASK,
  "when": BY_TASK,
  "on=hidden": "the default, as in `variational_rnn`",
}


# Which options there are.


def options(kind: type, owner: str) -> Iterator[tuple[str, str]]:
  """(owner, `field=value`) of what has to be compared; of fields without choices, another value."""
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    hint, name = hints[field.name], field.name
    if name in OF_NO_MATTER:
      continue
    if dataclasses.is_dataclass(hint):
      yield from options(typing.cast(type, hint), typing.cast(type, hint).__name__)
      continue
    values = choices(hint)
    wanted = [f"{name}={value}" for value in values] if values else [f"{name} is not its default"]
    yield from ((owner, one) for one in wanted if one not in OF_NO_MATTER)


def choices(hint: Any) -> list[Any]:
  """The values of a type that has few, or of the items of a tuple."""
  if hint is bool:
    return [False, True]
  if typing.get_origin(hint) is typing.Literal:
    return list(typing.get_args(hint))
  if typing.get_origin(hint) is tuple:
    return choices(typing.get_args(hint)[0])
  return []


def compared(config: Any) -> Iterator[tuple[str, str]]:
  """The same, of what a case has."""
  owner = type(config).__name__
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from compared(value)
    yield from ((owner, f"{field.name}={one}") for one in (value, *_items(value)))
    default = field.default if field.default is not dataclasses.MISSING else None
    if value != default:
      yield owner, f"{field.name} is not its default"


def _items(value: Any) -> tuple[Any, ...]:
  return value if isinstance(value, tuple) else ()


def missing(cases: dict[type, dict[str, Any]]) -> list[tuple[str, str]]:
  wanted = [one for kind in cases for one in options(kind, kind.__name__)]
  has = {one for named in cases.values() for config in named.values() for one in compared(config)}
  return sorted({one for one in wanted if one not in has})


def test_every_option_of_every_model_is_compared():
  assert set(typing.get_args(ModelConfig)) == {*CASES, *DOES_NOT_DECODE}
  assert missing(CASES) == []
  places = {place.split("/")[1] for c in CASES[NemotConfig].values() for place in c.gate_places}
  assert places == set(KINDS)


def test_a_model_and_an_option_that_no_case_has_are_found():
  """The check above can fail: of an option that is new, and of a value that is."""

  @dataclasses.dataclass(frozen=True)
  class Newer(DecoderConfig):
    looped: bool = False

  cases = {Newer: {name: Newer(**(SIZES | f)) for name, f in DECODERS.items()}}
  assert ("Newer", "looped=True") in missing(cases)
  fewer = {DecoderConfig: {"plain": DecoderConfig(**SIZES)}}
  assert {("DecoderConfig", "tied=False"), ("DecoderConfig", "convolution is not its default")} <= (
    set(missing(fewer))
  )


# The comparison.


def random_params(init: Any, *args: Any) -> Any:
  """Parameters that are all random: fresh ones hide behind zeros."""
  shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), *args))
  random = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.4, x.shape), x.dtype), shapes)


def draw(*shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(4, VOCAB, shape).astype(np.int32)


def assert_same(found: Any, expected: Any, config: Any) -> None:
  narrow = getattr(config, "dtype", "float32") == "bfloat16"
  # Sums in another order; in bfloat16 every sum is rounded to 8 bits.
  tolerance = 0.05 * float(np.abs(expected).max()) if narrow else 3e-5
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def read_before_written(step: Any, cache: Any, tokens: Any) -> list[str]:
  """Leaves of a cache that a jitted step updates in place and also reads as they were.

  Where that is so, a loop over steps copies them at every step, as XLA orders the two as it likes.
  """
  jaxpr = step.trace(cache, tokens).jaxpr.jaxpr
  leaves = jax.tree_util.tree_flatten_with_path(cache)[0]
  names = [jax.tree_util.keystr(path) for path, _ in leaves]
  uses: dict[str, list[str]] = {name: [] for name in names}
  _collect_uses(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), uses)
  written = {name for name, found in uses.items() if _WRITTEN in found}
  assert written, "a cache is updated"
  return sorted(name for name in written if len(uses[name]) > 1)


_WRITTEN = "the operand of dynamic_update_slice"


def _collect_uses(jaxpr: Any, names: dict[Any, str], uses: dict[str, list[str]]) -> None:
  for equation in jaxpr.eqns:
    held = {
      at: names[v] for at, v in enumerate(equation.invars) if isinstance(v, Var) if v in names
    }
    inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
    if inner is not None:
      variables = inner.jaxpr.invars
      _collect_uses(inner.jaxpr, {variables[at]: name for at, name in held.items()}, uses)
      continue
    for at, name in held.items():
      written = equation.primitive.name == "dynamic_update_slice" and at == 0
      uses[name].append(_WRITTEN if written else equation.primitive.name)


def test_a_cache_that_is_read_as_it_was_is_found():
  def step(cache: Any, new: jax.Array) -> Any:
    after = jax.lax.dynamic_update_slice(cache["key"], new, (0,))
    early = jax.jit(jnp.sum)(cache["key"]) if cache["early"] is not None else 0
    return after, after + early

  tokens, room = jnp.ones(1), jnp.zeros(4)
  assert read_before_written(jax.jit(step), {"key": room, "early": None}, tokens) == []
  found = read_before_written(jax.jit(step), {"key": room, "early": room}, tokens)
  assert found == ["['key']"]


def cases_of(kind: type) -> Any:
  return pytest.mark.parametrize("config", CASES[kind].values(), ids=CASES[kind])


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    (kind, name)
    for kind in (TransformerConfig, Seq2SeqLstmConfig, DecoderConfig)
    for name, config in CASES[kind].items()
    if kind is not DecoderConfig or config.tied
  ],
)
def test_a_sequence_to_sequence_model_decodes_as_in_the_whole_pass(kind, name):
  """Hypotheses change places between the steps."""
  config = CASES[kind][name]
  model = config.seq2seq(VOCAB, VOCAB, 0)
  source = draw(ROWS, 4, seed=1) * (np.arange(4) < np.array([[4], [2], [3]]))
  params = random_params(model.init, source, source)
  fill = functools.partial(model.apply, beams=BEAMS, length=STEPS, method="prefill")
  step = jax.jit(lambda cache, tokens: model.apply(params, cache, tokens, method="step"))
  cache, tokens = jax.jit(fill)(params, source), draw(ROWS, BEAMS, STEPS, seed=2)
  past, swap = tokens[..., :0], jnp.array([[1, 0]] * ROWS)
  for i in range(STEPS):
    if i == 2:
      cache, past = permute_cache(cache, swap), past[:, ::-1]
    logits, cache = step(cache, tokens[..., i])
    past = np.concatenate([past, tokens[..., i : i + 1]], axis=-1)
  if kind is not Seq2SeqLstmConfig:
    assert read_before_written(step, cache, tokens[..., 0]) == []
  whole = jax.jit(functools.partial(model.apply, params))
  expected = whole(np.repeat(source, BEAMS, axis=0), past.reshape(-1, STEPS))
  assert_same(logits, expected[:, -1].reshape(logits.shape), config)


@pytest.mark.parametrize(
  ("kind", "name"), [(kind, name) for kind in (DecoderConfig, NemotConfig) for name in CASES[kind]]
)
def test_a_text_model_goes_on_after_a_prompt_as_in_the_whole_pass(kind, name):
  """Prompts of different lengths and, where it is convolved, of two parts; every beam its way.

  The second part goes on from the first, and in one row it does not see it.
  """
  config, task = CASES[kind][name], "mqa"
  model = (DecoderLM if kind is DecoderConfig else Nemot)(config, VOCAB)
  lengths, places = np.array([[2], [3], [1]]), np.arange(PROMPT + STEPS)[None]
  prompt: Any = draw(ROWS, PROMPT, seed=1)
  tokens = draw(ROWS, BEAMS, STEPS, seed=2)
  fields: dict[str, np.ndarray] = {"options": (places < 2) & (places < lengths)}
  # As in training: marks up to <sep>, which is special and the first step, and none on the answer.
  tags = np.where(places < lengths, (places + lengths) % 7, -1)
  fields["tags"] = np.where(places == lengths, PARTS_OF_SPEECH.index("special"), tags)
  if config.convolution > 1:
    fields["segments"] = (places >= np.array([[1], [2], [0]])) + np.int32([[0], [1], [0]])
  auxiliary, more = None, {}
  if isinstance(config, NemotConfig):
    auxiliary = jnp.asarray([config.auxiliary_ids("dec", task)] * ROWS)
    if config.highlighting != "off":
      more["first_tag"] = jnp.full(ROWS, PARTS_OF_SPEECH.index("special"))

  def text(tokens: np.ndarray, time: int) -> Text:
    given = {field: jnp.asarray(value[:, :time]) for field, value in fields.items()}
    given["tags"] = jnp.where(places[:, :time] < lengths + (time > PROMPT), given["tags"], -1)
    return Text(jnp.asarray(tokens), auxiliary, **given)

  def going_on(beam: int) -> np.ndarray:
    whole = np.zeros((ROWS, PROMPT + STEPS), np.int32)
    for row, count in enumerate(lengths[:, 0].tolist()):
      whole[row, :count] = prompt[row, :count]
      whole[row, count : count + STEPS] = tokens[row, beam]
    return whole

  start = text(prompt * (places[:, :PROMPT] < lengths), PROMPT)
  params = random_params(lambda key: model.init(key, text(going_on(0), 6), [(task, ROWS)]))
  fill = functools.partial(model.apply, beams=BEAMS, length=STEPS, method="prefill", **more)
  cache = jax.jit(fill, static_argnums=2)(params, start, task)
  step = jax.jit(lambda cache, tokens: model.apply(params, cache, tokens, task, method="step"))
  found = []
  for i in range(STEPS):
    logits, cache = step(cache, tokens[..., i])
    found.append(np.asarray(logits))
  assert read_before_written(step, cache, tokens[..., 0]) == []
  call: Any = model.apply
  whole = jax.jit(lambda given: call(params, given, [(task, ROWS)]).logits)
  for beam in range(BEAMS):
    expected = np.asarray(whole(text(going_on(beam), PROMPT + STEPS)))
    for row, count in enumerate(lengths[:, 0]):
      mine = np.stack([logits[row, beam] for logits in found])
      assert_same(mine, expected[row, count : count + STEPS], config)


@cases_of(LstmConfig)
def test_a_recoded_lstm_goes_on_from_its_states_as_in_the_whole_pass(config):
  model, time = LstmLM(config, VOCAB), PROMPT + STEPS
  tokens, targets = (draw(ROWS, time, seed=seed) for seed in (1, 2))
  states = model.initial_states(ROWS)
  classifier = {"weight": jnp.linspace(-1, 1, config.dim), "bias": jnp.float32(0.3)}
  active = np.random.default_rng(3).integers(0, 2, (ROWS, time)).astype(np.float32)
  params = random_params(functools.partial(model.init, recode=False), tokens, targets, states)

  @jax.jit
  def run(states: Any, tokens: Any, targets: Any, active: Any) -> Output:
    given = Given(active, jnp.float32(targets % 2), classifier, jax.random.key(9))
    out = model.apply(params, tokens, targets, states, given=given, logits=True)
    return typing.cast(Output, out)

  def read(states: Any, start: int, stop: int) -> Output:
    return run(states, *(x[:, start:stop] for x in (tokens, targets, active)))

  whole, prompt = read(states, 0, time), read(states, 0, PROMPT)
  found, states = [prompt.logits], prompt.states
  for i in range(PROMPT, time):
    one = read(states, i, i + 1)
    found.append(one.logits)
    states = one.states
  assert_same(jnp.concatenate(found, axis=1), whole.logits, config)
  for mine, theirs in zip(jax.tree.leaves(states), jax.tree.leaves(whole.states), strict=True):
    assert_same(mine, theirs, config)
