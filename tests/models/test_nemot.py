"""The Neuromodulated Transformer: what it may look at, and what it is without its gate."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates, run
from compmod_jax.layers.basic import layer_norm
from compmod_jax.layers.context import AttentionMask, Context
from compmod_jax.layers.stack import Stack
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.matching_decoder import matching_decoder, parameters
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.text import Text

TASKS = ("lm", "mqa")
SMALL = NemotConfig(
  vanilla_layers=2,
  modulatory_layers=2,
  output_layers=1,
  tasks=TASKS,
  dim=16,
  heads=2,
  ffn_dim=32,
  max_length=24,
  competition=CompetitionConfig(key_dim=4, hidden_dim=8),
)
OPTIONS = {
  "plain": {},
  "other": {
    "gate_start": "half",
    "tied_key_value": True,
    "positions": "learned",
    "scale_embeddings": False,
    "vanilla_norm": True,
  },
  "early": {
    "output_layers": 2,
    "read_after": 1,
    "gate_places": ("vanilla_1/attention", "vanilla_1/logits", "output_0/ffn", "output_1/logits"),
    "compete": ("vanilla_self", "modulatory_self", "output_self"),
  },
  "first": {"read_after": 0, "gate_places": ("vanilla_0/logits", "vanilla_1/ffn")},
  "off": {"gate": "off"},
  "convolved": {"convolution": 3, "read_after": 1},
  "deep": {"modulatory_layers": 3, "gate_start": "half"},
  "highlighted": {"highlighting": "vanilla", "read_after": 1},
  "marked": {"highlighting": "embedding"},
}
# Options see each other whatever stands before them, so that these are no decoders in the options.
INTERACTING = {
  "interacting": {"option_interaction": True, "modulatory_layers": 2},
  "everything": {
    "option_interaction": True,
    "highlighting": "vanilla",
    "convolution": 3,
    "modulatory_layers": 2,
  },
}
CONFIGS = {name: dataclasses.replace(SMALL, **fields) for name, fields in OPTIONS.items()}
EVERY = CONFIGS | {
  name: dataclasses.replace(SMALL, **fields) for name, fields in INTERACTING.items()
}
ROWS, TIME = 3, 6
BLOCKS = (("lm", 1), ("mqa", 2))
VOCAB = 4 + ROWS * TIME + 1
# Every token of the batch is another one, and one of the vocabulary stands nowhere in it.
TOKENS = jnp.asarray(4 + np.arange(ROWS * TIME).reshape(ROWS, TIME), jnp.int32)


def auxiliary(config, mode="dec", tasks=("lm", "mqa", "mqa")):
  return jnp.asarray([config.auxiliary_ids(mode, task) for task in tasks], jnp.int32)


def text(config, mode="dec", **fields):
  places = np.broadcast_to(np.arange(TIME), (ROWS, TIME))
  if config.option_interaction:
    fields.setdefault("options", jnp.asarray((places >= 1) & (places < 5)))
  if config.highlighting != "off":
    fields.setdefault("tags", jnp.asarray(places % 8))
  return Text(TOKENS, auxiliary(config, mode), **fields)


@functools.cache
def model(name):
  """A model whose parameters are all random: fresh ones hide behind zeros."""
  config = EVERY[name]
  module = Nemot(config, VOCAB)
  shapes = jax.eval_shape(
    lambda key: nn.unbox(module.init(key, text(config), BLOCKS, vanilla_logits=True)),
    jax.random.key(0),
  )
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: np.float32(random.normal(0, 0.4, leaf.shape)), shapes)
  return module, jax.device_put(params)


def dependence(name, read, causal=True, **fields):
  """Which tokens of the batch a position's logits depend on: bool [rows, time].

  Each is replaced in turn by one that stands nowhere in the batch.
  """
  given = text(EVERY[name], "dec" if causal else "enc", **fields)

  def logits(tokens):
    out = logits_of(name, causal=causal)(given._replace(tokens=jnp.asarray(tokens)))
    return [np.asarray(one)[read] for one in out]

  found = np.zeros((ROWS, TIME), bool)
  for place in np.ndindex(ROWS, TIME):
    other = np.array(TOKENS)
    other[place] = VOCAB - 1
    found[place] = not np.array_equal(logits(other), logits(TOKENS))
  return found


@functools.cache
def logits_of(name, *, causal=True):
  """The program of logits, also of the vanilla set's."""
  module, params = model(name)
  apply = jax.jit(
    functools.partial(module.apply, causal=causal, vanilla_logits=True), static_argnums=2
  )
  return lambda given: apply(params, given, BLOCKS)


# What depends on what.


@pytest.mark.parametrize("name", CONFIGS)
def test_no_prediction_depends_on_a_later_token_or_another_example(name):
  expected = np.zeros((ROWS, TIME), bool)
  expected[1, :4] = True
  np.testing.assert_array_equal(dependence(name, (1, 3)), expected)


@pytest.mark.parametrize("name", ["early", "off"])
def test_in_encoder_mode_every_position_sees_the_whole_text_and_no_other(name):
  expected = np.zeros((ROWS, TIME), bool)
  expected[2] = True
  np.testing.assert_array_equal(dependence(name, (2, 1), causal=False), expected)


@pytest.mark.parametrize("name", ["early", "convolved"])
def test_documents_packed_into_a_row_do_not_see_each_other(name):
  segments = jnp.asarray([[1, 1, 1, 2, 2, 2]] * ROWS)
  expected = np.zeros((ROWS, TIME), bool)
  expected[0, 3:5] = True
  np.testing.assert_array_equal(dependence(name, (0, 4), segments=segments), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["plain", "deep", "early", "convolved", *INTERACTING])
def test_documents_of_one_row_do_not_see_each_other_through_auxiliary_tokens(name, causal):
  segments = jnp.asarray([[1, 1, 1, 2, 2, 2]] * ROWS)
  expected = np.zeros((ROWS, TIME), bool)
  expected[0, 3 : 5 if causal else 6] = True
  found = dependence(name, (0, 4), causal=causal, segments=segments)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["deep", "interacting"])
def test_in_encoder_mode_what_all_parts_share_is_seen_by_all(name):
  segments = jnp.asarray([[0, 0, 1, 1, 2, 2]] * ROWS)
  expected = np.zeros((ROWS, TIME), bool)
  expected[0, [0, 1, 4, 5]] = True
  found = dependence(name, (0, 4), causal=False, segments=segments)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["plain", "first"])
def test_every_segment_goes_on_from_the_common_one_as_if_it_came_next(name):
  given = text(CONFIGS[name])
  packed = given._replace(segments=jnp.asarray([[0, 0, 1, 1, 2, 2]] * ROWS))
  apart = given._replace(tokens=TOKENS[:, np.array([0, 1, 4, 5])])
  first, found, second = (logits_of(name)(one)[0] for one in (given, packed, apart))
  np.testing.assert_allclose(found[:, :4], first[:, :4], atol=1e-5)
  np.testing.assert_allclose(found[:, 4:], second[:, 2:], atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "first", "convolved"])
def test_a_packed_document_is_predicted_as_it_is_by_itself(name):
  given = text(CONFIGS[name])
  apart = Text(TOKENS[:, 3:], given.auxiliary)
  packed = given._replace(segments=jnp.asarray([[1, 1, 1, 2, 2, 2]] * ROWS))
  found, expected = (logits_of(name)(one)[0] for one in (packed, apart))
  np.testing.assert_allclose(found[:, 3:], expected, atol=1e-5)


def test_padding_changes_nothing():
  given = text(CONFIGS["early"], "enc")
  longer = given._replace(tokens=jnp.pad(TOKENS, ((0, 0), (0, 2))))
  found, expected = (logits_of("early", causal=False)(one)[0] for one in (longer, given))
  np.testing.assert_allclose(found[:, :TIME], expected, atol=1e-5)


def test_only_the_output_set_of_its_task_learns_from_an_example():
  module, params = model("plain")
  given = text(module.config)

  def value(params):
    out = module.apply(params, given, BLOCKS)
    return jnp.sum(jnp.sin(out.logits[1]))

  grads = jax.jit(jax.grad(value))(params)["params"]
  moved = {name for name, part in grads.items() if any(map(np.any, jax.tree.leaves(part)))}
  assert moved == {
    "embedding", "auxiliary_embedding", "vanilla", "modulatory", "output_mqa", "output_norm_mqa",
    "head",
  }  # fmt: skip


def half(gate):
  return jnp.full_like(gate, 0.5)


@pytest.mark.parametrize("name", ["plain", "early"])
def test_the_task_token_reaches_the_prediction_through_gates_alone(name):
  module, params = model(name)
  given, other = text(module.config), auxiliary(module.config, tasks=("lm",) * 3)
  closed = {"gate": half} | {f"gates/{place}": half for place in module.config.gate_places}
  for edits, same in (({}, False), (closed, True)):

    @jax.jit
    def logits(auxiliary, edits=edits):
      return module.apply(
        params,
        given._replace(auxiliary=auxiliary),
        BLOCKS,
        intermediates=Intermediates(edits=edits),
      ).logits

    assert np.array_equal(logits(given.auxiliary), logits(other)) == same


# What is left without the gate.


def plain_decoder(config, params, tokens, task, gate=None):
  """Vanilla layers normalised before, then output layers normalised after."""
  inner = params["params"]
  ctx = Context(mask=AttentionMask(causal=True))
  table = inner["embedding"]["table"]
  from compmod_jax.layers.embedding import sinusoids

  x = table[tokens] * np.sqrt(config.dim) + sinusoids(config.max_length, config.dim)[None, :TIME]
  x, _ = Stack(config, "vanilla", "pre").apply({"params": inner["vanilla"]}, x, ctx=ctx)
  x = x if gate is None else gate * x
  last = Stack(config, f"output_{task}", "post")
  x, _ = last.apply({"params": inner[f"output_{task}"]}, x, ctx=ctx)
  x = layer_norm(jnp.float32).apply({"params": inner[f"output_norm_{task}"]}, x)
  rows = x.reshape(-1, config.dim) @ inner["head"]["kernel"] + inner["head"]["bias"][None]
  return rows.reshape(*tokens.shape, -1)


def test_without_its_gate_it_is_a_decoder_of_both_sets_bit_for_bit():
  module, params = model("off")
  blocks = (("lm", ROWS),)
  found = jax.jit(lambda params: module.apply(params, text(module.config), blocks).logits)(params)
  decoder = jax.jit(functools.partial(plain_decoder, module.config, task="lm"))
  np.testing.assert_array_equal(found, decoder(params, TOKENS))


def test_a_gate_of_one_is_no_gate_gradients_too():
  module, params = model("plain")
  off, _ = model("off")
  given, blocks = text(module.config), (("lm", ROWS),)
  intermediates = Intermediates(edits={"gate": jnp.ones_like})

  def value(module, params, **options):
    out = module.apply(params, given, blocks, vanilla_logits=True, **options)
    return jnp.sum(jnp.sin(out.logits)) + jnp.sum(jnp.sin(out.vanilla)), out

  def both(function):
    return jax.jit(jax.value_and_grad(function, has_aux=True))(params)

  (_, one), ones = both(lambda p: value(module, p, intermediates=intermediates))
  (_, none), nones = both(lambda p: value(off, p))

  def near(found, expected):
    scale = max(1, np.abs(expected).max())
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-6)

  jax.tree.map(near, (one, ones), (none, nones))


def test_the_gate_multiplies_what_the_vanilla_set_puts_out():
  module, params = model("plain")
  asked = {"capture": ["gate", "gated", "vanilla/output"]}
  out, sites = jax.jit(
    lambda params: run(module.apply, params, text(module.config), BLOCKS, **asked)
  )(params)
  gate = sites["gate"]
  assert ((gate > 0) & (gate < 1)).all()
  np.testing.assert_array_equal(sites["gated"], gate * sites["vanilla/output"])
  decoder = jax.jit(functools.partial(plain_decoder, module.config, task="lm"))
  expected = decoder(params, TOKENS[:1], gate=gate[:1])
  np.testing.assert_allclose(out.logits[:1], expected, atol=1e-5)


def test_a_projected_gate_is_one_half_everywhere_at_first():
  config = CONFIGS["other"]
  module = Nemot(config, VOCAB)

  @jax.jit
  def sites_of_a_fresh_one(key):
    params = nn.unbox(module.init(key, text(config), BLOCKS))
    return run(module.apply, params, text(config), BLOCKS, capture=["gate"])[1]

  sites = sites_of_a_fresh_one(jax.random.key(0))
  np.testing.assert_array_equal(sites["gate"], np.full((ROWS, TIME, config.dim), 0.5))


def test_a_closed_gate_on_a_key_hides_it():
  module, params = model("first")
  key = 2

  def close(gates):  # logarithms, of every head and key
    return gates.at[:, key].set(-jnp.inf)

  asked = {
    "capture": ["vanilla/layer_0/self/attention"],
    "edits": {"gates/vanilla_0/logits": close},
  }
  sites = jax.jit(
    lambda params: run(module.apply, params, text(module.config), BLOCKS, **asked)[1]
  )(params)
  seen = np.asarray(sites["vanilla/layer_0/self/attention"])
  assert not seen[..., key].any()
  np.testing.assert_allclose(seen.sum(axis=-1), 1, atol=1e-6)


# Decoding step by step.


def test_a_convolution_follows_hypotheses_that_change_places_and_stops_at_segments():
  module, params = model("convolved")
  aux = auxiliary(module.config, tasks=("mqa",) * ROWS)
  segments = jnp.asarray([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
  prompt = Text(TOKENS[:, :4], aux, segments[:, :4])
  steps = np.random.default_rng(2).integers(4, VOCAB, (ROWS, 2, 2))
  fill = functools.partial(module.apply, beams=2, length=2, method="prefill")
  cache = jax.jit(fill, static_argnums=2)(params, prompt, "mqa")
  step = jax.jit(functools.partial(module.apply, method="step"), static_argnums=3)
  _, cache = step(params, cache, jnp.asarray(steps[..., 0]), "mqa")
  swapped = {**cache, "ancestry": cache["ancestry"][:, ::-1]}
  logits, _ = step(params, swapped, jnp.asarray(steps[..., 1]), "mqa")
  whole = jax.jit(lambda given: module.apply(params, given, [("mqa", ROWS)]).logits)
  for beam in range(2):
    tokens = TOKENS.at[:, 4].set(steps[:, 1 - beam, 0]).at[:, 5].set(steps[:, beam, 1])
    expected = whole(Text(tokens, aux, segments))[:, 5]
    np.testing.assert_allclose(logits[:, beam], expected, atol=2e-5)


# Sizes.


@functools.cache
def count(config, vocab=50_313, vanilla_logits=True):
  module = Nemot(config, vocab)
  blocks = tuple((task, 1) for task in config.tasks)
  given = Text(jnp.ones((len(blocks), 2), jnp.int32), auxiliary(config, tasks=config.tasks))
  shapes = jax.eval_shape(
    lambda key: module.init(key, given, blocks, vanilla_logits=vanilla_logits), jax.random.key(0)
  )
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_the_sizes_of_the_thesis():
  gpt2 = NemotConfig(
    positions="learned", scale_embeddings=False, vanilla_norm=True, activation="gelu_tanh",
    max_length=1024, tied_key_value=True, tasks=("lm",),
  )  # fmt: skip
  two = dataclasses.replace(gpt2, tasks=("lm", "gqa"))
  two_mine, mine = (dataclasses.replace(c, tied_key_value=False) for c in (two, gpt2))

  def near(millions):  # the auxiliary tokens' table is not in these accounts
    return pytest.approx(millions * 1e6, abs=0.01e6)

  # Published 261 M and 280 M: values are keys, and the vanilla set's own head is not counted.
  assert count(gpt2, vanilla_logits=False) == near(260.63)
  assert count(two, vanilla_logits=False) == near(280.13)
  assert (count(mine), count(two_mine)) == (near(308.18), near(329.45))
  head = (768 + 1) * 50_313
  assert (count(mine) - head, count(two_mine) - head) == (near(269.49), near(290.76))


# Parts of it.


def test_mechanisms_of_a_task_that_does_not_run_are_left_out():
  names = ("modulatory", "output_mqa", "output_mqa_0", "output_lm_0")
  config = dataclasses.replace(SMALL, mechanism_layers=names)
  assert config.for_tasks(("lm",)).mechanism_layers == ("modulatory", "output_lm_0")


def test_the_decoder_that_it_is_compared_with_has_no_mechanism():
  config = dataclasses.replace(
    SMALL, gated_heads=("vanilla_self",), compete=("output_self",), mechanism_layers=("vanilla",)
  )
  plain = matching_decoder(config, 400)
  assert plain == plain.plain()
  assert parameters(plain, 400) == pytest.approx(parameters(config, 400), rel=0.02)


# Mistakes.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"tasks": ()}, "at least one"),
    ({"tasks": ("lm", "dec")}, "different lower-case names"),
    ({"read_after": 3}, "0 to 2"),
    ({"gate": "off", "gate_places": ("vanilla_1/ffn",)}, "gate is off"),
    ({"gate_places": ("vanilla_1/ffn",)}, "vanilla_1/ffn"),  # computed before the gate is known
  ],
)
def test_a_wrong_setting_is_told(fields, words):
  with pytest.raises(UserError, match=words):
    dataclasses.replace(SMALL, **fields)


def test_a_wrong_batch_is_told():
  module, params = model("plain")
  given = text(module.config)
  with pytest.raises(UserError, match="have 2 rows, but the batch has 3"):
    module.apply(params, given, (("lm", 2),))
  with pytest.raises(UserError, match="task is 'qa'"):
    module.apply(params, given, (("qa", 3),))
  with pytest.raises(UserError, match="positions for 24"):
    module.apply(params, given._replace(tokens=jnp.ones((3, 25), jnp.int32)), BLOCKS)
  reading = Nemot(dataclasses.replace(SMALL, option_interaction=True), VOCAB)
  with pytest.raises(UserError, match="reads options of a text"):
    reading.init(jax.random.key(0), given, BLOCKS)
