"""DropHead: masks, their mean factors, schedules, and the edits that bring it into a model."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from random_parameters import drawn
from tiny_model import make_experiment, write_data

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates, run
from compmod_jax.mechanisms.competition import drophead
from compmod_jax.mechanisms.competition.drophead import DropHeadConfig, probability
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import ATTENTION_KINDS, Transformer, TransformerConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.training.step import gradients

draw = jax.jit(drophead.draw, static_argnums=(2, 3))
factors = jax.jit(drophead.factors)
drop_heads = jax.jit(drophead.drop_heads)


# Masks.


def mask_probabilities(heads: int, p: float) -> dict[tuple[bool, ...], float]:
  """The distribution that the rule says: independent draws, and one kept where all are dropped."""
  found = {}
  for mask in itertools.product((False, True), repeat=heads):
    kept = sum(mask)
    found[mask] = (1 - p) ** kept * p ** (heads - kept)
  none = found.pop((False,) * heads)
  for head in range(heads):
    found[tuple(i == head for i in range(heads))] += none / heads
  return found


@pytest.mark.parametrize("p", [0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("heads", [1, 2, 4, 5])
def test_the_mean_factor_of_every_head_is_exactly_one(heads, p):
  masks, weights = zip(*mask_probabilities(heads, p).items(), strict=True)
  found = np.asarray(factors(np.asarray(masks)), np.float64)
  np.testing.assert_allclose(np.asarray(weights) @ found, 1, rtol=1e-6)
  np.testing.assert_allclose(found.sum(axis=-1), heads, rtol=1e-6)  # scales match in every draw
  np.testing.assert_array_equal(found > 0, masks)


@pytest.mark.parametrize("p", [0.2, 0.85])
def test_every_mask_is_drawn_as_often_as_the_rule_says(p):
  heads, draws = 3, 40_000
  drawn = np.asarray(draw(jax.random.key(0), p, draws, heads))
  expected = mask_probabilities(heads, p)
  counts = [np.all(drawn == mask, axis=-1).sum() for mask in expected]
  assert sum(counts) == draws  # none without any head
  test = scipy.stats.chisquare(counts, draws * np.array(list(expected.values())))
  assert test.pvalue > 0.001
  means = np.asarray(factors(drawn))
  error = means.std(axis=0) / np.sqrt(draws)
  assert np.all(np.abs(means.mean(axis=0) - 1) < 4 * error)


def test_a_lone_head_is_never_dropped():
  assert np.asarray(draw(jax.random.key(1), 0.9, 100, 1)).all()


def test_no_head_is_dropped_at_probability_zero_and_all_but_one_at_one():
  none, most = (np.asarray(draw(jax.random.key(2), p, 1000, 4)) for p in (0.0, 1.0))
  assert none.all()
  np.testing.assert_array_equal(most.sum(axis=-1), 1)


def test_a_sequence_loses_the_same_heads_at_all_positions_and_others_lose_other_heads():
  ones = np.ones((64, 3, 4, 2), np.float32)
  dropped = np.asarray(drop_heads(ones, rng=jax.random.key(3), p=0.5))
  np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1, :, :1], dropped.shape))
  masks = dropped[:, 0, :, 0] > 0
  assert len(np.unique(masks, axis=0)) > 10
  kept = masks.sum(axis=-1)
  np.testing.assert_allclose(dropped[:, 0, :, 0].max(axis=-1), 4 / kept, rtol=1e-6)


def test_the_type_of_the_activation_stays():
  ones = jax.ShapeDtypeStruct((2, 1, 3, 1), jnp.bfloat16)
  found = jax.eval_shape(drop_heads, ones, rng=jax.random.key(4), p=0.5)
  assert found.dtype == jnp.bfloat16


# Schedules.


@pytest.mark.parametrize(
  ("config", "expected"),
  [
    (DropHeadConfig("v"), [0.2, 0.1, 0.0, 0.1, 0.2]),
    (DropHeadConfig("v", start=0.4, end=0.2, turn=0.25), [0.4, 0.0, 0.2 / 3, 0.4 / 3, 0.2]),
    (DropHeadConfig("v", turn=0.0), [0.0, 0.05, 0.1, 0.15, 0.2]),
    (DropHeadConfig("v", turn=1.0), [0.2, 0.15, 0.1, 0.05, 0.0]),
    (DropHeadConfig("constant", start=0.3), [0.3] * 5),
    (DropHeadConfig("curriculum", end=0.4), [0.0, 0.1, 0.2, 0.3, 0.4]),
    (DropHeadConfig("anti_curriculum", start=0.4), [0.4, 0.3, 0.2, 0.1, 0.0]),
    (DropHeadConfig(), [0.0] * 5),
  ],
  ids=lambda value: value.schedule if isinstance(value, DropHeadConfig) else "",
)
def test_the_probability_follows_its_schedule(config, expected):
  points = np.linspace(0, 1, 5, dtype=np.float32)
  found = np.asarray(jax.jit(jax.vmap(lambda x: probability(config, x)))(points))
  np.testing.assert_allclose(found, expected, atol=1e-7)
  assert config.active == bool(np.any(found > 0))


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"schedule": "v", "start": 1.0}, ["drophead.start is 1.0", "below 1"]),
    ({"schedule": "v", "turn": 2.0}, ["drophead.turn is 2.0", "0 to 1"]),
    ({"start": 0.1}, ["drophead.start is 0.1", "'none'", "leave start out"]),
    ({"schedule": "constant", "end": 0.1}, ["drophead.end is 0.1", "'constant'", "curriculum"]),
    ({"schedule": "curriculum", "turn": 0.3}, ["drophead.turn is 0.3", "no use", "v"]),
  ],
)
def test_a_bad_configuration_names_field_value_and_remedy(fields, words):
  with pytest.raises(UserError) as error:
    DropHeadConfig(**fields)
  assert all(word in str(error.value) for word in words)


# In a model.

CONFIG = TransformerConfig(
  encoder_layers=1, decoder_layers=1, dim=8, heads=2, ffn_dim=8, dropout=0.0, max_length=8,
  compete=ATTENTION_KINDS,
)  # fmt: skip
SOURCE, TARGET = jnp.asarray([[4, 5, 6], [6, 5, 4]] * 4), jnp.asarray([[2, 4], [2, 5]] * 4)
V = DropHeadConfig("v", start=0.6, end=0.6)


def model(config: TransformerConfig) -> Transformer:
  return Transformer(config, 9, 7)


@pytest.fixture(scope="module")
def variables():
  return drawn(model(CONFIG).init, SOURCE, TARGET, spread=0.3)


def edits(config: DropHeadConfig, progress: float = 0.0, seed: int = 0):
  return drophead.edits(config, CONFIG.dropped_sites(), rng=jax.random.key(seed), progress=progress)


def captured(variables, config: TransformerConfig = CONFIG):
  names = [f"{m}/{s}" for m in config.attention_modules() for s in ("heads_scaled",)]
  weights = [f"{m}/router/weights" for m in config.attention_modules()]

  def found(variables):
    capture = [*names, *weights]
    return run(model(config).apply, variables, SOURCE, TARGET, capture=capture, edits=edits(V))

  return jax.device_get(jax.jit(found)(variables))


def test_every_attention_module_draws_masks_of_its_own_and_the_softmax_does_not_see_them(variables):
  _, sites = captured(variables)
  masks = []
  for module in CONFIG.attention_modules():
    outputs, weights = sites[f"{module}/heads_scaled"], sites[f"{module}/router/weights"]
    zero = np.all(outputs == 0, axis=(1, 3))
    assert 0 < zero.sum() < zero.size
    np.testing.assert_array_equal(np.any(outputs != 0, axis=(1, 3)), ~zero)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-6)
    assert np.all(weights > 0)
    masks.append(zero.tobytes())
  assert len(set(masks)) == 3


def test_values_of_heads_that_lost_are_dropped_with_them():
  assert CONFIG.dropped_sites()[0] == "encoder/layer_0/self/heads"
  lose = CompetitionConfig(rule="top_k", keep=1, inactive="value")
  config = dataclasses.replace(CONFIG, compete=("encoder_self",), competition=lose)
  site = config.dropped_sites()[0]
  assert site == "encoder/layer_0/self/heads_scaled"

  @jax.jit
  def found(variables, rng):
    edits = drophead.edits(V, [site], rng=rng, progress=0.0)
    _, sites = run(model(config).apply, variables, SOURCE, TARGET, capture=[site], edits=edits)
    return sites[site], edits[site](jnp.ones((8, 1, 2, 1)))[:, 0, :, 0]

  outputs, factors = jax.device_get(
    found(drawn(model(config).init, SOURCE, TARGET, spread=0.3), jax.random.key(0))
  )
  zero = np.all(outputs == 0, axis=(1, 3))
  np.testing.assert_array_equal(zero, factors == 0)
  assert 0 < zero.sum() < zero.size


def test_a_rematerialised_layer_drops_the_same_heads_forward_and_backward(variables):
  def loss(variables, config):
    intermediates = Intermediates(edits=edits(V))
    return jnp.sum(
      jnp.square(model(config).apply(variables, SOURCE, TARGET, intermediates=intermediates))
    )

  kept, again = (
    jax.jit(jax.value_and_grad(lambda v, c=config: loss(v, c)))(variables)
    for config in (CONFIG, dataclasses.replace(CONFIG, remat=True))
  )
  for one, two in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_without_a_probability_the_program_is_the_one_without_drophead(variables):
  def program(config: DropHeadConfig) -> str:
    intermediates = Intermediates(edits=edits(config))
    call = lambda v: model(CONFIG).apply(v, SOURCE, TARGET, intermediates=intermediates)  # noqa: E731
    return jax.jit(call).lower(variables).as_text()

  plain = program(DropHeadConfig())
  assert program(DropHeadConfig("v", start=0.0, end=0.0)) == plain
  assert program(V) != plain


def test_masks_do_not_depend_on_how_the_batch_is_shared_out():
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  ones, how = np.ones((16, 2, 4, 3), np.float32), {"rng": jax.random.key(5), "p": 0.5}
  shared = drop_heads(jax.device_put(ones, place), **how)
  np.testing.assert_array_equal(shared, drop_heads(ones, **how))


def test_a_task_drops_heads_in_training_alone_by_the_progress_of_the_run(tmp_path):
  experiment = make_experiment(write_data(tmp_path / "data"))
  config = dataclasses.replace(experiment.model, dropout=0.0, drophead=V)
  task = experiment.task.build(config)
  batch = jax.tree.map(jnp.asarray, next(iter(task.dataset.eval_batches("valid"))))
  params = jax.tree.map(jnp.asarray, drawn(task.model.init, spread=0.3))

  @functools.partial(jax.jit, static_argnums=2)
  def objective(progress, seed, train=True):
    context = StepContext(jax.random.key(seed), jnp.int32(0), train, progress)
    return task.loss(params, (), batch, context)[0]["cross_entropy"].sum

  calm = objective(0.0, 0, False)
  assert len({float(value) for value in (objective(0.0, 0), objective(0.0, 1), calm)}) == 3
  np.testing.assert_allclose(objective(0.5, 1), calm, rtol=1e-6)  # where V touches 0


@pytest.mark.slow
def test_micro_batches_drop_heads_of_their_own(tmp_path):
  experiment = make_experiment(write_data(tmp_path / "data"))
  config = dataclasses.replace(experiment.model, dropout=0.0, drophead=V, remat=True)
  task = experiment.task.build(config)
  batch = jax.tree.map(jnp.asarray, next(iter(task.dataset.eval_batches("test", multiple=2))))
  params = nn.unbox(jax.jit(task.model.init)(jax.random.key(0)))
  context = StepContext(jax.random.key(7), jnp.int32(0), True)

  @jax.jit
  def in_two(params):
    return gradients(task.loss, params, (), batch, context, micro_batches=2)[:2]

  @jax.jit
  @jax.value_and_grad
  def by_hand(params):
    total = count = 0.0
    for part in range(2):
      rows = {name: value[part::2] for name, value in batch.items()}
      own = context._replace(rng=jax.random.fold_in(context.rng, part))
      term = task.loss(params, (), rows, own)[0]["cross_entropy"]
      total, count = total + term.sum, count + term.count
    return total / count

  (found, value), (expected, wanted) = in_two(params), by_hand(params)[::-1]
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-6)
