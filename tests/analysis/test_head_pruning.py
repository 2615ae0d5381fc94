"""Gates of heads: their distribution in closed form, and heads without use that a price takes."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from benchmarks.roles import PLACES, summary
from compmod_jax.analysis import roles
from compmod_jax.analysis.ablation.measure import keeping
from compmod_jax.analysis.reading import reader
from compmod_jax.analysis.report import page
from compmod_jax.analysis.roles.measure import attention_modules
from compmod_jax.analysis.roles.pruning import (
  BETA,
  GAMMA,
  ZETA,
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
from compmod_jax.training.provenance import provenance

GRAMMAR = GrammarDocuments(GrammarData(train=60, valid=10, test=20, shifted=10))


@pytest.fixture(scope="module")
def subject():
  """A decoder of random parameters, of whose four heads the second half has no effect."""
  model = DecoderConfig(decoder_layers=1, dim=16, heads=4, ffn_dim=16, max_length=32)
  config = CausalLMConfig(
    data=GRAMMAR, tokenizer=TokenizerConfig(vocab_size=120), length=33, batch_tokens=264
  )
  task = config.build(model)
  params = jax.device_put(tiny_model.random_parameters(task, 0))
  return Subject(task, _without_use(params), "test", sentences=4)


def _without_use(params):
  """The matrices of the output layer that read heads 2 and 3 are 0, of the others larger."""
  layer = params["decoder"]["layer_0"]
  output = layer["self_attention"]["output"]
  kernel = output["kernel"] * jnp.asarray([2.0, 2, 0, 0])[:, None, None]
  attention = {**layer["self_attention"], "output": {**output, "kernel": kernel}}
  return {**params, "decoder": {"layer_0": {**layer, "self_attention": attention}}}


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


def test_gates_find_the_best_of_all_sets_of_heads(subject):
  """Of the sixteen sets of four heads, the one of least loss and prices on what they learn from."""
  few = dataclasses.replace(subject, split="train", sentences=8, chosen=None)
  read, modules = reader(few.task), attention_modules(few)
  (module,) = modules
  losses = sentence_losses(few, read)
  zeros = {module.scaled: np.zeros((module.units, module.dim))}

  def loss(kept):
    without = [(module.name, head) for head in range(4) if head not in kept]
    nats, counts = losses(few.params, keeping(modules, zeros, without))
    return nats.sum() / counts.sum()

  sets = [kept for count in range(5) for kept in itertools.combinations(range(4), count)]
  loss_of = {kept: loss(kept) for kept in sets}
  settings = Pruning(prices=(0.01, 0.3, 1.5), sentences=8, updates=150, rate=0.2)
  ablation = {module.name: np.array([0.4, 0.3, 0.0, 0.0])}
  found = sweep(few, read, modules, ablation, settings)
  best = [
    min(sets, key=lambda kept, price=price: loss_of[kept] + price * len(kept))
    for price in settings.prices
  ]
  assert best == [(0,), (0,), ()]
  for one, kept in zip(found, best, strict=True):
    assert tuple(np.flatnonzero(one.kept[module.name])) == kept
    assert one.count == len(kept)
    assert one.loss == pytest.approx(loss_of[kept], rel=1e-5)
    assert one.by_ablation == pytest.approx(loss_of[kept], rel=1e-5)  # head 0 comes first there
  # All ways to keep no head are the same, of one head they are not.
  assert found[2].at_random == pytest.approx(found[2].loss)
  assert found[0].at_random > found[0].loss


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


def test_the_summary_of_a_report_has_every_row_beside_its_controls(subject, tmp_path):
  settings = roles.Roles(
    importance=2, steps=1, prune=Pruning(prices=(0.5,), sentences=4, updates=2)
  )
  made = roles.make_page(settings, subject, settings.measure(subject))
  written = page.write(made, tmp_path, command="c", provenance=provenance())
  data = json.loads(written.json.read_text())
  found = summary(data)
  assert json.loads(json.dumps(found, allow_nan=False)) == found
  for source in ("model", "shuffled", "untrained"):
    assert sum(counts[source] for counts in found["roles"].values()) == found["heads"] == 4
  assert set(found["looks"]) == set(PLACES)
  assert found["looks"]["next"] is None, "a decoder does not see the next token"
  module = data["modules"]["decoder/layer_0/self"]
  shares = np.array([half["shares"]["previous"] for half in module["halves"]])
  best = found["looks"]["previous"]
  assert best["value"] == shares.min(0).max()
  assert best["head"] == f"decoder/layer_0/self:{shares.min(0).argmax()}"
  assert best["share"] == pytest.approx(shares[:, shares.min(0).argmax()].mean())
  assert best["untrained"] == max(module["untrained"]["shares"]["previous"])
  relation = next(iter(found["relations"]))
  gain, share, offset = (found["relations"][relation][n] for n in ("value", "share", "best_offset"))
  assert gain <= share - offset + 1e-9
  assert found["spectra"]["trained"]["heads"]["of"] == 4
  assert found["pruning"][0]["heads"] == sum(found["pruning"][0]["roles"].values())
  assert np.shape(found["importance"]["correlations"]) == (4, 4)
  assert set(found["importance"]["halves"]) == set(found["importance"]["ways"])


def test_bad_prices_are_refused_by_name():
  with pytest.raises(UserError, match=r"--prune\.prices is \(-1\.0,\)"):
    Pruning(prices=(-1.0,))
  with pytest.raises(UserError, match=r"--prune\.updates is 0"):
    Pruning(updates=0)
  with pytest.raises(UserError, match=r"--prune\.prices is given but --importance is 0"):
    roles.Roles(importance=0, prune=Pruning(prices=(0.1,)))
