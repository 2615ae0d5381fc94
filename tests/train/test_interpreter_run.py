"""Neural interpreters through the training program: expressions are learned, and others by some of
the parameters alone; the report of functions; a masked language model."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from programs import metrics_of, state_of, train
from tiny_masked import make_task, write_text

import compmod_jax
from compmod_jax.analysis.interpreter import Functions, make_page
from compmod_jax.analysis.report import page
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.training.experiment import Phase, load_config

pytestmark = pytest.mark.usefixtures("one_device")
CONFIG = "configs/neural_interpreter.py"
# Variant -> whether a parameter moves.
ADAPTED = {
  "cls": lambda name: name == "cls",
  "types": lambda name: name == "cls" or "/router/" in name,
  "everything": lambda name: True,
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory, one_device):
  """Workdir of the tiny variant."""
  folder = tmp_path_factory.mktemp("interpreter") / "run"
  train(load_config(f"{CONFIG}:debug"), folder, report=False)
  return folder


def adapted(learned, folder, steps=30):
  """Workdir of a short run on two other expressions, from the tiny one, in the variants' phases."""
  base = load_config(f"{CONFIG}:debug")
  variants = [load_config(f"{CONFIG}:{name}") for name in ADAPTED]
  experiment = dataclasses.replace(
    base,
    start=str(learned),
    task=dataclasses.replace(
      base.task, data=dataclasses.replace(base.task.data, count=2, first=base.task.data.count)
    ),
    model=dataclasses.replace(base.model, train_signatures=True),
    groups=variants[0].groups,
    phases=tuple(dataclasses.replace(one.phases[0], steps=steps) for one in variants),
    checkpoint_every=steps,
    keep_last=3,
    evaluate_every=3 * steps,
  )
  train(experiment, folder, report=False)
  return folder


def parameters(folder, step):
  """Name -> values, after a step."""
  state = state_of(folder, step).items()
  return {name.removeprefix("params/"): leaf for name, leaf in state if name.startswith("params/")}


def test_expressions_are_learned_and_signatures_stay_where_they_began(learned):
  scores = [line["fuzzy/r2"] for line in metrics_of(learned, "eval")]
  assert scores[-1] > 0.8
  model = compmod_jax.load(learned)

  def router(params):
    return params["script_0"]["router"]

  begun = jax.jit(lambda key: router(nn.unbox(model.task.model.init(key))))(jax.random.key(0))
  for name in ("signatures", "log_sigma"):
    same = np.array_equal(begun[name], router(model.params)[name])
    assert same == (name == "signatures")


def test_a_loaded_model_predicts_at_points_of_one_s_own(learned):
  model = compmod_jax.load(learned)
  points = model.task.dataset.points("test")
  wanted = model.task.dataset.targets(points)
  left = np.square(model.predict(points) - wanted).mean(axis=0) / wanted.var(axis=0)
  found = model.task.evaluate(model.params, "test").values
  assert 1 - left.mean() == pytest.approx(found["fuzzy/r2"], abs=1e-4)
  with pytest.raises(UserError, match=r"points has the shape \(3,\)"):
    model.predict(points[0])


def test_adaptation_moves_the_parameters_of_its_kind_and_no_bit_of_others(learned, tmp_path):
  run = adapted(learned, tmp_path / "run")
  before = begun = parameters(learned, 300)
  for step, moves in zip((30, 60, 90), ADAPTED.values(), strict=True):
    after = parameters(run, step)
    assert before.keys() == after.keys()
    assert after["cls"].shape == (2, *begun["cls"].shape[1:])
    for name in before.keys() - {"cls"}:
      assert np.array_equal(before[name], after[name]) != moves(name), (step, name)
    before = after


def test_the_report_shows_routing_signatures_and_what_functions_cost(learned, tmp_path):
  model = compmod_jax.load(learned)
  subject = Subject(model.task, model.params, "test")
  options = Functions(added=(1,), draws=2)
  written = page.write(make_page(options, subject, options.measure(subject)), tmp_path / "page")
  data = json.loads(written.json.read_text())
  assert {picture.stem for picture in written.pictures} == {"routing", "signatures"}
  assert data["positions"] == ["a", "b", "c", "CLS 0", "CLS 1", "CLS 2", "CLS 3"]
  assert list(data["routing"]) == list(model.task.model.routing_sites())
  for rows in data["routing"].values():
    assert np.shape(rows) == (7, 3)
    assert np.all(np.sum(rows, axis=1) < 1 + 1e-5)
  assert np.diag(data["similarity"][0]) == pytest.approx(1)
  changes = {name: np.mean(scores) for name, scores in data["changes"].items()}
  trained = model.task.evaluate(model.params, "test").values["fuzzy/r2"]
  assert changes["as trained"] == pytest.approx(trained, abs=1e-6)
  assert changes["in reverse order"] == pytest.approx(trained, abs=1e-4)
  drops = [changes[f"without function {one}"] for one in range(3)]
  assert max(drops) < trained
  assert changes["1 added"] != pytest.approx(trained, abs=1e-4)
  assert data["expressions"] == model.task.dataset.texts()


def test_a_masked_language_model_interprets_text_and_reports_its_functions(tmp_path):
  base = load_config(f"{CONFIG}:mlm")
  experiment = dataclasses.replace(
    base,
    task=make_task(write_text(tmp_path / "text", {"train": 60, "valid": 20, "test": 20})),
    model=dataclasses.replace(
      base.model,
      dim=16,
      functions=2,
      scripts=1,
      iterations=1,
      ffn_dim=16,
      code_dim=8,
      type_dim=4,
      heads=2,
    ),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=5e-3, warmup_steps=5),
    phases=(Phase(steps=40),),
    evaluate_every=40,
    log_every=10,
    watch_sentences=4,
  )
  train(experiment, tmp_path / "run", report=False)
  losses = [line["loss"] for line in metrics_of(tmp_path / "run", "train")]
  assert losses[-1] < losses[0] - 0.1
  model = compmod_jax.load(tmp_path / "run")
  assert len(model.fill(["bat <mask> cow 1"])) == 1
  subject = Subject(model.task, model.params, "test", sentences=8)
  options = Functions(added=(), shown=5)
  found = options.measure(subject)
  assert len(found.names) == 5
  assert [one.name for one in found.changes] == [
    "as trained", "in reverse order", "without function 0", "without function 1",
  ]  # fmt: skip
  scores = [one.scores.item() for one in found.changes]
  assert scores[1] == pytest.approx(scores[0], rel=1e-4)
  assert "loss" in make_page(options, subject, found).summary[0]
