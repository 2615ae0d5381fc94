"""All mechanisms in one model: every pair trains, and each can be taken out by name."""

import dataclasses
import itertools
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import metrics_of, train

import compmod_jax
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.training.experiment import Phase, load_config
from compmod_jax.training.step import init_state, make_step

pytestmark = pytest.mark.usefixtures("one_device")
MECHANISMS = ("heads", "experts", "gate", "recoding")
USING = runpy.run_path("configs/everything.py")["using"]
SITES = {
  "heads": "vanilla/layer_0/self/router/weights",
  "experts": "vanilla/layer_0/ffn/router/weights",
  "gate": "gate",
}


def tiny(mechanisms):
  """The experiment with these mechanisms, with fewer questions, tokens and units."""
  given = USING(set(mechanisms))
  task = dataclasses.replace(
    given.task,
    data=Mixed((WorldsData(train=96, valid=12, test=12, shifted=12),)),
    tokenizer=dataclasses.replace(given.task.tokenizer, vocab_size=180),
    length=128,
    answer_length=4,
    batch_questions=8,
    buckets=1,
  )
  model = dataclasses.replace(
    given.model,
    **{"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 128, "vanilla_layers": 1},
    experts=dataclasses.replace(given.model.experts, count=2),
  )
  optimizer = dataclasses.replace(given.optimizer, learning_rate=1e-2, warmup_steps=0)
  return dataclasses.replace(
    given,
    task=task,
    model=model,
    optimizer=optimizer,
    phases=(Phase(steps=20),),
    evaluate_every=20,
    evaluate_sentences=6,
    log_every=1,
  )


@pytest.fixture(scope="module")
def files():
  """The tokenizer, the same for all."""
  return tiny(()).task.build(tiny(()).model).dataset.files()


FAST = (("gate", "recoding"),)
PAIRS = [
  pytest.param(pair, marks=() if pair in FAST else pytest.mark.slow, id="+".join(pair))
  for pair in itertools.combinations(MECHANISMS, 2)
]


@pytest.mark.parametrize("pair", PAIRS)
def test_mechanisms_train_together(pair, files):
  given = tiny(pair)
  task = given.task.build(given.model, files=files)
  params = jax.device_get(nn.unbox(jax.jit(task.model.init)(jax.random.key(0))))
  optimizer = optax.adam(1e-2)
  mask = jax.tree.map(lambda _: True, params)
  options = {"micro_batches": 1, "ema": 0.0, "mask": mask}
  step = jax.jit(make_step(task, optimizer, lambda _: jnp.float32(0.01), **options))
  state, losses = jax.jit(lambda params: init_state(params, (), optimizer, 0.0))(params), []
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  for _ in range(20):
    state, metrics = step(state, next(batches), jax.random.key(0))
    losses.append(float(metrics["objective"]))
  assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
  trained = jax.device_get(state.params)
  moved = jax.tree.map(lambda old, new: bool((old != new).any()), params, trained)
  assert all(jax.tree.leaves(moved))
  logged = {"heads": "router/vanilla/layer_0/self/entropy", "gate": "gate/mean"}
  logged["experts"] = "router/vanilla/layer_0/ffn/entropy"
  assert {name for name, value in logged.items() if value in metrics["task"]} == {*pair} & {*logged}
  if "recoding" in pair:
    questions = list(task.dataset.questions("valid")[0][:2])
    for (answer,) in task.generator(task.model, state.params, questions, task.generator.decode):
      before, after = answer.entropy
      assert after < before


@pytest.mark.slow
def test_all_of_them_go_through_the_program_and_each_can_be_taken_out(monkeypatch, tmp_path):
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  train(tiny(MECHANISMS), tmp_path / "run")
  (evaluated,) = metrics_of(tmp_path / "run", "eval")
  assert evaluated["entropy"] < evaluated["entropy_before"]
  model = compmod_jax.load(tmp_path / "run")
  batch = next(iter(model.task.dataset.eval_batches("valid")))
  before = np.asarray(model.task.model.forward(model.params, batch))
  for site in SITES.values():
    without = model.edit({site: lambda x: jnp.ones_like(x) / x.shape[-1]})
    after = np.asarray(without.task.model.forward(model.params, batch))
    assert np.abs(after - before).max() > 1e-4


@pytest.mark.parametrize("kind", ["masked", "recurrent", "questions"])
def test_every_kind_of_task_trains_with_products_in_bfloat16(kind, monkeypatch, tmp_path):
  """Losses are nearly those of exact products."""
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  given = load_config(f"benchmarks/tiny_runs.py:{kind}")
  given = dataclasses.replace(given, phases=(Phase(steps=4),), evaluate_every=4, log_every=1)
  if kind == "questions":
    given = dataclasses.replace(given, task=dataclasses.replace(given.task, buckets=1))
  losses = []
  for products in ("model", "bfloat16"):
    train(dataclasses.replace(given, products=products), tmp_path / products, report=False)
    losses.append([line["loss"] for line in metrics_of(tmp_path / products, "train")])
  assert len(losses[0]) == 4
  assert losses[0] != losses[1]
  np.testing.assert_allclose(*losses, rtol=0.02)


def test_variants_leave_out_what_they_say():
  whole = load_config("configs/everything.py")
  for name in MECHANISMS:
    given = load_config(f"configs/everything.py:without-{name}")
    assert given.task.data == whole.task.data
    assert (given.model != whole.model) or (given.task.decode != whole.task.decode)
  plain = load_config("configs/everything.py:plain")
  assert plain.model.plain() == plain.model
  assert plain.task.decode.recode_layer is None
