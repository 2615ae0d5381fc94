"""Groups of parameters: optimizers of their own, phases that train some of them, mistakes."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_masked
from flax.traverse_util import flatten_dict
from programs import assert_same_bits, computed, metrics_of, state_of, train

from compmod_jax.checkpoints.model_folder import load_model_folder
from compmod_jax.core.config import from_json, to_json
from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import Term
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import (
  OptimizerConfig,
  ParamGroup,
  check_groups,
  groups,
  learning_rate,
  lower_rate,
  make_optimizer,
  plateau_factor,
)
from compmod_jax.training.run import set_up
from compmod_jax.training.step import init_state, make_step, trainable_mask

TOTAL = 50
MAIN = OptimizerConfig(learning_rate=0.02, schedule="constant", warmup_steps=4, weight_decay=0.1)
FAST = OptimizerConfig(
  name="sgd", learning_rate=0.3, schedule="cosine", warmup_steps=0, momentum=0.5
)
MUON = OptimizerConfig(name="muon", learning_rate=0.05, schedule="linear", warmup_steps=0)
OWN = (ParamGroup("fast", ("head",), FAST), ParamGroup("slow", ("body/*/kernel",)))


def parameters() -> Any:
  def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)

  body = {"one": {"kernel": numbers(3, 4), "bias": numbers(4)}, "two": {"kernel": numbers(4, 2)}}
  return {
    "body": body,
    "head": {"kernel": numbers(2, 5)},
    "x": {"router": {"signatures": numbers(2)}},
  }


@jax.jit
def gradient(params: Any, number: int) -> Any:
  return jax.tree.map(lambda p: jnp.cos(3 * p + number), params)


apply_updates = jax.jit(optax.apply_updates)


def part_of(tree: Any, names: Any, group: str) -> dict[str, Any]:
  return {k: v for k, v in flatten_dict(tree, sep="/").items() if names[k] == group}


def test_a_parameter_is_in_the_group_whose_pattern_stands_for_it_else_in_routing_or_rest():
  assert flatten_dict(groups(parameters(), OWN), sep="/") == {
    "body/one/kernel": "slow",
    "body/one/bias": "rest",
    "body/two/kernel": "slow",
    "head/kernel": "fast",
    "x/router/signatures": "routing",
  }


@pytest.mark.parametrize("fast", [FAST, MUON], ids=["sgd", "muon"])
def test_every_group_moves_as_an_optimizer_of_its_own_would_move_it(fast):
  """Beside optimizers that see nothing but one group; gradients are clipped over all."""
  config = dataclasses.replace(MAIN, clip=0.7)
  own = (dataclasses.replace(OWN[0], optimizer=fast), OWN[1])
  optimizer = make_optimizer(config, TOTAL, own=own)
  names = flatten_dict(groups(parameters(), own), sep="/")
  alone = {
    name: make_optimizer(fast if name == "fast" else MAIN, TOTAL) for name in {*names.values()}
  }

  @jax.jit
  def start(params: Any) -> Any:
    parts = {name: part_of(params, names, name) for name in alone}
    states = {name: one.init(parts[name]) for name, one in alone.items()}
    return params, optimizer.init(params), parts, states

  @jax.jit
  def step(number: int, params: Any, state: Any, parts: Any, states: Any) -> Any:
    grads = gradient(params, number)
    share = jnp.minimum(1.0, 0.7 / optax.tree.norm(grads))
    clipped = jax.tree.map(lambda g: g * share, grads)
    updates, state = optimizer.update(grads, state, params)
    for name, one in alone.items():
      change, states[name] = one.update(part_of(clipped, names, name), states[name], parts[name])
      parts[name] = optax.apply_updates(parts[name], change)
    return optax.apply_updates(params, updates), state, parts, states

  found = start(parameters())
  for number in range(4):
    found = step(number, *found)
  params, _, parts, _ = found
  for name, part in parts.items():
    for path, leaf in part_of(params, names, name).items():
      np.testing.assert_allclose(leaf, part[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_groups_that_move_like_all_others_change_no_bit():
  found = []
  for own in ((), (ParamGroup("a", ("head",)), ParamGroup("b", ("body/one",)))):
    optimizer = optax.with_extra_args_support(make_optimizer(MAIN, TOTAL, own=own))
    params, state = parameters(), jax.jit(optimizer.init)(parameters())
    for number in range(3):
      updates, state = jax.jit(optimizer.update)(gradient(params, number), state, params)
      params = apply_updates(params, updates)
    found.append(params)
  jax.tree.map(np.testing.assert_array_equal, *found)


# Steps.


class Toy:
  """A loss of all parameters; not finite where the batch is not."""

  @property
  def model(self) -> "Toy":
    return self

  def unused_parameters(self, batch: Any) -> tuple[str, ...]:
    return ()

  def loss(self, params: Any, carry: Any, batch: Any, context: Any) -> Any:
    size = sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(params))
    return {"loss": Term(size * jnp.sum(batch["x"]), jnp.float32(len(batch["x"])))}, carry, {}


@functools.cache
def stepper(which: str, micro_batches: int = 1) -> Any:
  rates = {"fast": learning_rate(FAST, TOTAL), "slow": learning_rate(MAIN, TOTAL)}
  step = make_step(
    Toy(),
    make_optimizer(MAIN, TOTAL, own=OWN),
    learning_rate(MAIN, TOTAL),
    micro_batches=micro_batches,
    ema=0.9,
    mask=trainable_mask(parameters(), which, OWN),
    group_rates=rates,
  )
  return jax.jit(functools.partial(step, key=jax.random.key(0)))


@functools.cache
def started() -> Any:
  """The state after two steps."""
  optimizer = make_optimizer(MAIN, TOTAL, own=OWN)
  state = jax.jit(lambda params: init_state(params, (), optimizer, 0.9))(parameters())
  for _ in range(2):
    state, _ = stepper("all")(state, batch())
  return state


def batch(x: float = 1.0) -> Any:
  return {"x": np.full(4, x, np.float32)}


@pytest.mark.parametrize("which", ["fast", "slow", "fast+rest", "routing", "all"])
def test_what_a_phase_does_not_train_keeps_its_bits_and_its_optimizer_state(which):
  before = started()
  after, metrics = stepper(which)(before, batch())
  names = flatten_dict(groups(parameters(), OWN), sep="/")
  moving = {*names.values()} if which == "all" else {*which.split("+")}
  old, new = (flatten_dict(state.params, sep="/") for state in (before, after))
  for path, group in names.items():
    assert np.array_equal(old[path], new[path]) == (group not in moving), path
  inner = [state.opt_state[-1].inner_states for state in (before, after)]
  for group in {*names.values()} - moving:
    first, *_ = (state[group].inner_state[0] for state in inner)
    jax.tree.map(np.testing.assert_array_equal, first, inner[1][group].inner_state[0])
  for group in ("slow", "rest", "routing"):
    counts = [int(state[group].inner_state[0].count) for state in inner]
    assert counts == [2, 3 if group in moving else 2]
    schedule = inner[1][group].inner_state[-1]
    assert int(schedule.count) == 3  # it runs on
  assert metrics["gradient_norm"] > 0


def test_the_rate_of_every_group_is_among_the_metrics():
  _, metrics = stepper("all")(started(), batch())
  rates = {"fast": learning_rate(FAST, TOTAL), "slow": learning_rate(MAIN, TOTAL)}
  expected = jax.jit(lambda step: {name: rate(step) for name, rate in rates.items()})(2)
  found = metrics["learning_rates"]
  assert found.keys() == expected.keys()
  for name, rate in expected.items():
    np.testing.assert_allclose(found[name], rate, rtol=1e-6)
  np.testing.assert_allclose(metrics["learning_rate"], expected["slow"], rtol=1e-6)


def test_a_step_that_is_not_finite_changes_nothing_and_micro_batches_hardly_anything():
  before = started()
  after, _ = stepper("all")(before, batch(np.nan))
  for name in ("params", "opt_state", "ema"):
    jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
  assert int(after.skipped) == 1
  one, two = (stepper("all", parts)(before, batch())[0] for parts in (1, 2))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), one, two)


def test_a_plateau_lowers_the_rate_of_its_own_group_alone():
  config = dataclasses.replace(FAST, schedule="plateau")
  optimizer = make_optimizer(
    dataclasses.replace(MAIN, schedule="plateau"),
    TOTAL,
    own=(ParamGroup("fast", ("head",), config),),
  )
  params, state = parameters(), jax.jit(optimizer.init)(parameters())
  lowered = lower_rate(state, 4.0, "fast")
  assert plateau_factor(lowered, "fast") == 0.25
  assert plateau_factor(lowered, "rest") == plateau_factor(state, "fast") == 1
  update = jax.jit(optimizer.update)
  one, two = (update(gradient(params, 0), each, params)[0] for each in (state, lowered))
  np.testing.assert_allclose(two["head"]["kernel"], one["head"]["kernel"] / 4, rtol=1e-6)
  np.testing.assert_array_equal(two["body"]["two"]["kernel"], one["body"]["two"]["kernel"])


# Mistakes.


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: ParamGroup("all", ("*",)), r"groups.name is 'all'; .*Give another name"),
    (lambda: ParamGroup("a+b", ("*",)), r"groups.name is 'a\+b'; it has to be of letters"),
    (lambda: ParamGroup("a"), r"groups.a.parameters is \(\); give patterns"),
    (lambda: ParamGroup("routing", ("*",)), r"none to the group 'routing'"),
    (
      lambda: ParamGroup("a", ("*",), OptimizerConfig(clip=1.0)),
      r"groups.a.optimizer.clip is 1.0; .* set optimizer.clip",
    ),
    (
      lambda: check_groups(parameters(), [ParamGroup("a", ("haed",))]),
      r"groups.a.parameters has 'haed', which stands for no parameter .* mean 'head'",
    ),
    (
      lambda: check_groups(parameters(), [*OWN, ParamGroup("b", ("*/one/*",))]),
      r"groups.b.parameters is .* 'body/one/kernel' too, a parameter of the group 'slow'; a param",
    ),
    (
      lambda: trainable_mask({"head": parameters()["head"]}, "fast+rest", OWN),
      r"phases.trainable is 'fast\+rest', but .* no such parameters as 'rest': nothing",
    ),
  ],
)
def test_a_group_that_cannot_be_names_its_field(make, words):
  with pytest.raises(UserError, match=words):
    make()


def test_phases_name_groups_that_there_are(tmp_path):
  experiment = tiny_masked.make_experiment(tmp_path)
  with pytest.raises(UserError, match=r"phases.trainable is 'haed'; .*Did you mean 'head'\?"):
    dataclasses.replace(
      experiment,
      groups=(ParamGroup("head", ("head",)),),
      phases=(Phase(trainable="haed", steps=1),),
    )
  with pytest.raises(UserError, match="groups are called a, a; give each a name of its own"):
    dataclasses.replace(experiment, groups=(ParamGroup("a", ("b",)), ParamGroup("a", ("c",))))


# Runs.


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Any:
  root = tmp_path_factory.mktemp("groups")
  folder = tiny_masked.write_text(root / "text", {"train": 40, "valid": 6, "test": 6})
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("COMPMOD_CACHE", str(root / "cache"))
    yield dataclasses.replace(
      tiny_masked.make_experiment(folder),
      optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=4, clip=1.0),
      groups=(
        ParamGroup("head", ("head",), dataclasses.replace(FAST, schedule="plateau")),
        ParamGroup("routing", optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2)),
      ),
      phases=(Phase("some", trainable="head+routing", steps=6), Phase("whole", steps=6)),
      watch_sentences=0,
      ema=0.9,
    )


@pytest.fixture(scope="module")
def workdir(one_device, experiment, tmp_path_factory) -> Any:
  place = tmp_path_factory.mktemp("run") / "whole"
  train(experiment, place)
  return place


def back_to(workdir: Any, place: Any, step: int) -> Any:
  """A copy of a run as it was after a step."""
  shutil.copytree(workdir, place)
  for path in (place / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > step:
      shutil.rmtree(path)
  return place


def test_the_log_of_a_run_has_the_rate_of_every_group(workdir, experiment):
  lines = metrics_of(workdir, "train")
  routing = jax.jit(learning_rate(experiment.groups[1].optimizer, 12))
  for line in lines:
    assert {n for n in line if n.startswith("learning_rate/")} == {
      f"learning_rate/{name}" for name in ("head", "routing", "rest")
    }
    assert line["learning_rate/routing"] == pytest.approx(float(routing(line["step"] - 1)))
    assert line["learning_rate"] == line["learning_rate/rest"]
  assert json.loads((workdir / "config.json").read_text())["experiment"]["groups"]


def test_the_first_phase_trains_its_groups_alone(workdir, experiment, tmp_path):
  start = {name: np.asarray(x) for name, x in flatten_dict(
    set_up(experiment, tmp_path / "new", command="").fresh_state().params, sep="/"
  ).items()}  # fmt: skip
  state = state_of(back_to(workdir, tmp_path / "some", 4))
  for name, leaf in start.items():
    moves = name.startswith("head") or "router" in name
    assert np.array_equal(state[f"params/{name}"], leaf) != moves, name


def test_a_run_with_groups_goes_on_to_the_same_bits(workdir, experiment, tmp_path):
  for step in (4, 8):
    again = back_to(workdir, tmp_path / str(step), step)
    train(experiment, again, report=False)
    assert_same_bits(state_of(again), state_of(workdir))
    assert computed(again, "train") == computed(workdir, "train")


def test_the_optimizer_of_a_group_may_change_for_the_steps_to_come(workdir, experiment, tmp_path):
  again = back_to(workdir, tmp_path / "again", 8)
  head, routing = experiment.groups
  changed = dataclasses.replace(routing.optimizer, weight_decay=0.1, learning_rate=2e-2)
  other = dataclasses.replace(
    experiment, groups=(head, dataclasses.replace(routing, optimizer=changed))
  )
  train(other, again, report=False)
  line = metrics_of(again, "train")[-1]
  assert line["learning_rate/routing"] == pytest.approx(
    2 * metrics_of(workdir, "train")[-1]["learning_rate/routing"]
  )
  wider = dataclasses.replace(head, parameters=("head", "output_norm"))
  other = dataclasses.replace(experiment, groups=(wider, routing))
  with pytest.raises(UserError, match=r"belongs to another configuration: groups.0.parameters"):
    train(other, again, report=False)


def test_a_run_with_groups_starts_from_a_trained_model(workdir, experiment, tmp_path):
  started = dataclasses.replace(experiment, start=str(workdir))
  state = set_up(started, tmp_path / "new", command="").fresh_state()
  params, _, _ = load_model_folder(workdir / "models" / "best")
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_groups_come_back_through_json_and_old_configurations_have_none(experiment):
  saved = to_json(experiment)
  assert from_json(Experiment, saved) == experiment
  del saved["groups"]
  saved["phases"] = [{"name": "old", "steps": 3, "trainable": "rest"}]
  opened = from_json(Experiment, saved)
  assert opened.groups == ()
  assert opened.phases == (Phase("old", steps=3, trainable="rest"),)
