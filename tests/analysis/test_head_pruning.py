"""Gates of heads: their distribution in closed form, and heads without use that a price takes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from compmod_jax.analysis import roles
from compmod_jax.analysis.ablation.measure import keeping
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.roles.measure import attention_modules
from compmod_jax.analysis.roles.pruning import (
  BETA,
  GAMMA,
  ZETA,
  Pruned,
  Pruning,
  open_probability,
  sample,
  sweep,
  without_noise,
)
from compmod_jax.analysis.scoring import sentence_losses
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig

GRAMMAR = GrammarDocuments(GrammarData(train=60, valid=10, test=20, shifted=10))


@pytest.fixture(scope="module")
def subject():
  """A decoder of random parameters, of whose four heads the second half has no effect."""
  model = DecoderConfig(decoder_layers=1, dim=16, heads=4, ffn_dim=16, max_length=32)
  config = CausalLMConfig(
    data=GRAMMAR, tokenizer=TokenizerConfig(vocab_size=120), length=33, batch_tokens=264
  )
  task = config.build(model)
  params = jax.tree.map(jnp.asarray, tiny_model.random_parameters(task, 0))
  (module,) = attention_modules(Subject(task, params, "test"))
  return Subject(task, _without_use(params, module.dim), "test", sentences=4)


def _without_use(params, head_dim):
  """The rows of the output layer that read heads 2 and 3 are 0, of the others large."""
  attention = params["decoder_0"]["self_attention"]
  kernel = attention["out"]["kernel"]
  rows = kernel.reshape(4, head_dim, -1) * jnp.asarray([2.0, 2, 0, 0])[:, None, None]
  out = {**attention["out"], "kernel": rows.reshape(kernel.shape)}
  layer = {**params["decoder_0"], "self_attention": {**attention, "out": out}}
  return {**params, "decoder_0": layer}


@pytest.mark.parametrize("log_alpha", [-2.0, 0.3, 3.0])
def test_gates_are_open_and_closed_as_often_as_the_equations_say(log_alpha):
  uniform = (np.arange(200_000, dtype=np.float32) + 0.5) / 200_000
  gates = np.asarray(sample(jnp.full(uniform.shape, log_alpha), jnp.asarray(uniform)))
  closed = 1 / (1 + math.exp(log_alpha - BETA * math.log(-GAMMA / ZETA)))
  assert np.mean(gates == 0) == pytest.approx(closed, abs=1e-4)
  whole = 1 / (1 + math.exp(-(log_alpha - BETA * math.log((1 - GAMMA) / (ZETA - 1)))))
  assert np.mean(gates == 1) == pytest.approx(whole, abs=1e-4)
  assert open_probability(jnp.float32(log_alpha)) == pytest.approx(1 - closed, abs=1e-6)
  middle = 1 / (1 + math.exp(-log_alpha)) * (ZETA - GAMMA) + GAMMA
  assert without_noise(jnp.float32(log_alpha)) == pytest.approx(min(max(middle, 0), 1), abs=1e-6)


def test_the_price_s_gradient_is_that_of_finite_differences():
  at, step = jnp.float32(0.7), 1e-2
  slope = jax.grad(lambda a: jnp.sum(open_probability(a)))(at)
  rise = open_probability(at + step) - open_probability(at - step)
  assert slope == pytest.approx(float(rise) / (2 * step), rel=1e-3)
  # A gate that is neither closed nor open has a gradient through its draw; others have none.
  for uniform, moves in ((0.5, True), (1e-5, False), (1 - 1e-5, False)):
    found = jax.grad(lambda a, u=uniform: jnp.sum(sample(a, jnp.float32(u))))(at)
    assert (found != 0) == moves


def test_a_small_price_takes_heads_without_use_and_a_large_one_takes_all(subject):
  read, modules = reader(subject.task), attention_modules(subject)
  (module,) = modules
  ablation = {module.name: np.array([0.4, 0.3, 0.0, 0.0])}
  settings = Pruning(prices=(0.0, 0.01, 30.0), sentences=8, updates=120, rate=0.2)
  free, cheap, dear = sweep(subject, read, modules, ablation, settings)
  nats, counts = sentence_losses(subject, read)(subject.params, {})
  whole = nats.sum() / counts.sum()
  assert isinstance(free, Pruned)
  assert free.price == 0
  np.testing.assert_array_equal(cheap.kept[module.name], [True, True, False, False])
  assert cheap.count == 2
  # Without what has no effect, and by ablations that are given, the loss stays.
  assert cheap.loss == pytest.approx(whole, rel=1e-5)
  assert cheap.by_ablation == pytest.approx(whole, rel=1e-5)
  assert dear.count == 0
  assert dear.loss == dear.by_ablation == pytest.approx(dear.at_random)
  assert dear.loss != pytest.approx(whole, rel=1e-4)


def test_a_price_leaves_the_head_that_is_worth_more_than_it(subject):
  """One head alone: it stays below what the loss rises by without it, and goes above."""
  read, modules = reader(subject.task), attention_modules(subject)
  (module,) = modules
  # Between these, which training sentences of the same kind decide.
  few = dataclasses.replace(subject, split="train", sentences=8, chosen=None)
  losses = sentence_losses(few, read)
  zeros = {module.scaled: np.zeros((module.units, module.dim))}
  whole, counts = losses(few.params, keeping(modules, zeros, ()))
  none, _ = losses(few.params, keeping(modules, zeros, [(module.name, i) for i in range(4)]))
  worth = (none.sum() - whole.sum()) / counts.sum()
  if worth <= 0:
    pytest.fail("the heads of this model are of no use; draw other parameters")
  ablation = {module.name: np.zeros(4)}
  settings = Pruning(prices=(worth / 10, worth * 10), sentences=8, updates=120, rate=0.2)
  below, above = sweep(few, read, modules, ablation, settings)
  assert below.count > 0
  assert above.count == 0


def test_the_report_shows_what_every_price_leaves(subject):
  settings = roles.Roles(
    importance=2, steps=1, untrained=False,
    prune=Pruning(prices=(0.01, 30.0), sentences=8, updates=60, rate=0.2),
  )  # fmt: skip
  found = settings.measure(subject)
  made = roles.make_page(settings, subject, found)
  (section,) = [one for one in made.sections if one.title == "Pruning"]
  assert [item.name for item in section.items] == ["pruning", "pruned_heads", "pruning"]
  table = section.items[-1]
  assert [row[1] for row in table.rows] == [4, found.pruned[0].count, 0]
  assert [one["heads"] for one in made.data["pruning"]] == [found.pruned[0].count, 0]
  for row in table.rows:
    assert sum(row[3:7]) == row[1]  # every head that is left has one role


def test_bad_prices_are_refused_by_name():
  with pytest.raises(UserError, match=r"--prune\.prices is \(-1\.0,\)"):
    Pruning(prices=(-1.0,))
  with pytest.raises(UserError, match=r"--prune\.updates is 0"):
    Pruning(updates=0)
  with pytest.raises(UserError, match=r"--prune\.prices is given but --importance is 0"):
    roles.Roles(importance=0, prune=Pruning(prices=(0.1,)))
