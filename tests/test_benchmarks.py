"""What benchmarks measure with; what they find is no matter here."""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import common, devices, ingredients, routing
from benchmarks.designs import Sizes


class Here(devices.Device):
  """The CPU, by what is best on it."""

  @property
  def kernels(self):
    return None


PEAKS = {"float32": 1e9}
GPU, TPU = (Here("here", kind, "", 1, 1e9, PEAKS, here=True) for kind in ("CPU", "TPU"))
SIZES = Sizes(tokens=16, heads=2, head_dim=4, embed=8, hidden=6, key=3, dtype="float32")
CASE = routing.Case(batch=2, time=4, dim=8, heads=2)


@pytest.fixture
def report():
  return common.Report("nothing", argparse.Namespace(device="cpu", json=None, check=False))


def test_a_repeated_function_runs_so_often_and_returns_what_it_returns():
  turns = []

  def function(a, b):
    jax.debug.callback(lambda: turns.append(1))
    return {"product": a @ b, "sum": a.sum()}

  args = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 4))
  found = jax.jit(common.repeat(function, 5))(*args)
  jax.effects_barrier()
  assert len(turns) == 5
  np.testing.assert_array_equal(found["product"], args[0] @ args[1])
  assert found["sum"] == 15


@pytest.fixture(autouse=True)
def few_designs(monkeypatch):
  every = routing.designs
  kept = ("no routing", "plain XLA", "packed")
  monkeypatch.setattr(
    routing, "designs", lambda kernel: {name: every(kernel)[name] for name in kept}
  )


def test_designs_are_compared_with_the_definition_and_timed(report):
  counted = routing.count_designs(report, GPU, SIZES)
  found = routing.measure_designs(report, GPU, SIZES, rounds=1)
  assert found.keys() == counted.keys()
  assert {name.split(", ")[1] for name in found} == set(routing.PASSES)
  for one in found.values():
    assert one["measured us"] > 0
    assert one["error"] < 1e-5
  assert all(one["MiB"] > 0 for one in counted.values())


@pytest.mark.parametrize("factor", [2.0, np.nan])
def test_a_design_with_another_result_is_seen(report, monkeypatch, factor):
  made = routing.designs

  def wrong(kernel):
    found = made(kernel)
    right = found["packed"].program
    if kernel is None:
      found["packed"] = dataclasses.replace(found["packed"], program=lambda a: factor * right(a))
    return found

  monkeypatch.setattr(routing, "designs", wrong)
  found = routing.measure_designs(report, TPU, SIZES, rounds=1)
  expected = pytest.approx(factor - 1, abs=1e-5, nan_ok=True)
  assert found["packed, forward"]["error"] == expected
  missed = {claim.name for claim in report.claims if claim.met is False}
  assert missed == {"packed, forward: error", "packed, training: error"}


def test_a_loop_out_of_which_something_was_moved_is_seen(report, monkeypatch):
  monkeypatch.setattr(common, "repeat", lambda function, times: function)
  routing.several(report, GPU, "a sum", lambda a: a @ a, (jnp.ones((64, 64)),))
  (claim,) = report.claims
  assert (claim.name, claim.met) == ("a sum: MiB of a run in the loop / alone", False)
  assert claim.ratio.median == pytest.approx(1 / routing.REPEATS)


def test_layers_are_timed_several_runs_at_once(report):
  routing.measure_layers(report, CASE, rounds=1, device=TPU)
  timing = report.timings["here training: competing"]
  seconds, rate = timing["seconds"]["median"], timing["rate"]["median"]
  assert rate * seconds == pytest.approx(routing.REPEATS * 8)


def test_a_device_that_is_not_here_is_refused_by_name():
  options = argparse.Namespace(device="gpu", json=None, check=False)
  with pytest.raises(SystemExit, match="--device is gpu, but JAX cannot use one here"):
    common.Report("nothing", options)


def test_an_accelerator_of_which_nothing_is_known_is_refused():
  with pytest.raises(
    SystemExit, match=r"no figures of 'cpu' are known; compmod_jax/tools/devices.py has"
  ):
    devices.attached()


def test_a_ratio_without_a_target_is_neither_met_nor_missed(tmp_path):
  file = tmp_path / "found.json"
  report = common.Report("nothing", argparse.Namespace(device="cpu", json=file, check=True))
  report.claim("free", [2.0, 2.0], 1.0)
  report.claim("bound", [2.0, 2.0], 1.0, at_most=3.0)
  report.finish()  # does not exit: nothing is missed
  found = {claim["name"]: claim["met"] for claim in json.loads(file.read_text())["claims"]}
  assert found == {"free": None, "bound": True}
  report.claim("missed", [2.0, 2.0], 1.0, at_least=3.0)
  with pytest.raises(SystemExit):
    report.finish()


FILES = sorted((Path(__file__).parents[1] / "results" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_committed_verdicts_are_those_of_their_ratios_and_targets(file):
  for row in json.loads(file.read_text()).get("claims", []):
    ratio = common.Spread(**row["ratio"])
    claim = common.Claim(row["name"], ratio, row["at_most"], row["at_least"])
    assert row["met"] is claim.met, row["name"]


def test_each_option_of_a_model_is_timed_beside_the_plain_step(report, monkeypatch):
  monkeypatch.setattr(ingredients, "our_step", lambda case, **fields: lambda: case.task(**fields))
  ingredients.measure(report, ingredients.INGREDIENTS, quick=True)
  assert [claim.name for claim in report.claims] == [
    f"{name} / plain" for name in ingredients.INGREDIENTS
  ]
