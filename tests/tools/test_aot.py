"""`--aot`: what a step costs, from its compiled program; the devices here stand in for a slice."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import pytest
import tiny_masked
import tiny_model
import tiny_recurrent

from compmod_jax.commands import train
from compmod_jax.commands.config_option import load_experiment
from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import MeshConfig
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tools import aot, describe, devices, matmul_flops, shapes
from compmod_jax.tools.cost import Cost
from compmod_jax.tools.devices import PEAK_FLOPS, TPUS, Topology
from compmod_jax.training.experiment import Experiment, Phase

ROOT = Path(__file__).parents[2]
EIGHT = Topology("v5e", (2, 4))
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 128}


# Slices and their chips.


def test_a_topology_is_a_generation_and_chips_along_each_dimension():
  found = Topology.parse("v5p:2x2x1")
  assert (found.generation, found.shape, found.chips) == ("v5p", (2, 2, 1), 4)
  assert found.chip is TPUS["v5p"]
  assert str(found) == "v5p:2x2x1"
  assert Topology.parse("v5e:4x4").chips == 16


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("v5:2x2", r"generation of --aot v5:2x2 is 'v5'; it must be one of: v5e, v5p, v6e\. Did you"),
    ("v5e", "chips along each of 2 dimensions, for example v5e:4x4"),
    ("v5e-16", "it must be one of: v5e, v5p, v6e"),
    ("v5e:2x2x1", "each of 2 dimensions"),
    ("v5p:2x2", "each of 3 dimensions, for example v5p:4x4x4"),
    ("v5e:2x0", "chips along"),
    ("v6e:2xb", "chips along"),
  ],
)
def test_what_is_no_topology_is_a_mistake_that_is_told_at_once(text, words):
  with pytest.raises(UserError, match=words):
    train.main(["--config", str(ROOT / "configs/nmt_cah.py"), "--aot", text])


def test_figures_of_chips_have_a_source_and_agree_with_those_that_the_log_uses():
  for name, chip in TPUS.items():
    assert chip.source.startswith("https://cloud.google.com/tpu/docs/v")
    assert PEAK_FLOPS[chip.kind] == PEAK_FLOPS[f"TPU {name}"] == chip.peak
    # Computing is far ahead of moving, and memory of the links to other chips.
    assert 100 < chip.peak / chip.bandwidth < 1000
    assert 1 < chip.bandwidth / chip.interconnect < 10
  assert devices.TPUS["v5e"].ring == 100e9


def test_without_libtpu_it_is_told_what_to_install(monkeypatch):
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
  )
  with pytest.raises(UserError, match=r"libtpu.*not installed.*pip install 'libtpu"):
    train.main(["--config", str(ROOT / "configs/nmt_cah.py"), "--aot", "v5e:2x2"])


# Batches.


def translation(folder):
  return tiny_model.make_experiment(tiny_model.write_data(folder / "data"))


def masked(folder):
  return tiny_masked.make_experiment(tiny_masked.write_text(folder / "data", {"train": 60}))


def recurrent(folder):
  return tiny_recurrent.make_experiment(tiny_masked.write_text(folder / "data", {"train": 60}))


def causal(folder):
  given = masked(folder)
  task = CausalLMConfig(
    data=given.task.data, tokenizer=given.task.tokenizer, length=17, batch_tokens=17 * 8
  )
  return dataclasses.replace(given, task=task, model=DecoderConfig(decoder_layers=1, **SIZES))


def answering(folder):
  task = AnsweringConfig(
    data=Mixed((WorldsData(train=48, valid=12, test=12, shifted=12, asked=4),)),
    tokenizer=dataclasses.replace(AnsweringConfig().tokenizer, vocab_size=160),
    **{"batch_questions": 8, "length": 128, "answer_length": 6, "turns": 3},
  )
  layers = {"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1}
  model = NemotConfig(tasks=("lm", "mqa", "gqa"), **layers, **SIZES)
  return Experiment(name="questions", task=task, model=model, phases=(Phase(steps=9),))


@pytest.mark.parametrize("make", [translation, masked, recurrent, causal, answering])
def test_a_batch_without_data_is_shaped_as_the_longest_with_data(make, tmp_path):
  experiment = make(tmp_path)
  task = experiment.task.build(experiment.model)
  iterator, _ = task.dataset.train_batches(part="all", seed=0, multiple=4, process=0, processes=1)
  real, found = next(iterator), shapes.largest_batch(task, 4)
  if make is answering:
    # How tasks share a batch is for the data to tell; they are as many rows in all.
    blocks = [sum(len(b[n]) for n in b if n.startswith("rows/")) for b in (real, found)]
    assert blocks[0] == blocks[1] == len(found["tokens"])
    real, found = ({n: b[n] for n in b if "/" not in n} for b in (real, found))
  # A translation's loss does not read its number.
  assert found.keys() | {"index"} == real.keys()
  for name, leaf in found.items():
    assert leaf.dtype == real[name].dtype
    assert len(leaf.shape) == real[name].ndim
    assert all(n <= m for n, m in zip(real[name].shape, leaf.shape, strict=True))
    assert leaf.shape[0] == len(real[name])


@pytest.mark.parametrize(("make", "field"), [(recurrent, "rows"), (answering, "batch_questions")])
def test_rows_that_devices_cannot_share_are_a_mistake(make, field, tmp_path):
  experiment = make(tmp_path)
  task = experiment.task.build(experiment.model, files=describe.placeholders(experiment.task))
  with pytest.raises(UserError, match=rf"task\.{field} is \d+, which 48 devices"):
    shapes.largest_batch(task, 48)


# Costs, with the devices that are here in place of a slice.


def priced(experiment, **fields):
  run, _ = aot.assemble(dataclasses.replace(experiment, **fields), jax.devices())
  lines = aot.costs(run, EIGHT, run.experiment.phases[0].trainable, aot.batch_of(run))
  return run, "\n".join(lines)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  """An experiment whose eight devices share the batch alone, and what its step costs."""
  experiment = masked(tmp_path_factory.mktemp("priced"))
  model = dataclasses.replace(experiment.model, dim=64, ffn_dim=128)
  return priced(experiment, model=model, mesh=MeshConfig(data=8))


def number(text, name, unit):
  found = re.search(rf"^ *{re.escape(name)} +([\d.,]+) {unit}\b", text, re.MULTILINE)
  assert found is not None, text
  return float(found[1].replace(",", ""))


def test_arguments_are_parameters_and_moments_and_the_update_takes_their_place(shared):
  run, text = shared
  state = 3 * 4 * describe.count_parameters(run.task) / 1e3
  unit = "kB" if state < 1000 else "MB"
  state = state if unit == "kB" else state / 1e3
  assert number(text, "arguments", unit) == pytest.approx(state, rel=0.01)
  assert number(text, "of these in place of arguments", unit) == pytest.approx(state, rel=0.01)
  assert number(text, "peak", unit) >= state
  assert "fits: 0% of 16.00 GB" in text


def test_of_moments_that_are_divided_a_device_keeps_its_part(shared):
  experiment = shared[0].experiment
  run, text = priced(experiment, shard_optimizer=True)
  kept = sum(
    leaf.size * 4 / (8 if any(size % 8 == 0 for size in leaf.shape) else 1)
    for leaf in jax.tree.leaves(nn.unbox(run.task.shapes))
  )
  state = (4 * describe.count_parameters(run.task) + 2 * kept) / 1e3
  assert number(text, "arguments", "kB") == pytest.approx(state, rel=0.01)
  assert number(text, "arguments", "kB") < 0.45 * number(shared[1], "arguments", "kB")


def test_devices_that_share_a_batch_add_up_their_gradients(shared):
  run, text = shared
  found = re.findall(r"^ +all-reduce +8 +(\d+) +([\d.]+) (k?B)", text, re.MULTILINE)
  sizes = {"B": 1, "kB": 1e3}
  reduced = sum(int(times) * float(size) * sizes[unit] for times, size, unit in found)
  # Of a router's last layer and signatures, the gradient of their product is added up.
  assert reduced >= 4 * describe.count_parameters(run.task) * 0.95


def test_model_time_is_that_of_the_slowest_and_of_collectives(shared):
  text = shared[1]
  arithmetic, memory, exchange = (
    number(text, name, "ms")
    for name in ("arithmetic, FLOPs / peak", "HBM, bytes / bandwidth", "collectives, sent / rings")
  )
  step = number(text, "step: the larger of the first two + the third", "ms")
  assert step == pytest.approx(max(arithmetic, memory) + exchange, abs=2e-3)
  hidden = number(text, "step, collectives beside the rest", "ms")
  assert hidden == pytest.approx(max(arithmetic, memory, exchange), abs=2e-3)


def test_a_layout_changes_what_chips_do_and_not_what_the_step_needs(tmp_path):
  given = masked(tmp_path)
  experts = ExpertsConfig(count=4, competition=CompetitionConfig(rule="top_k", keep=1))
  model = dataclasses.replace(given.model, ffn_dim=512, expert_layers=("encoder",), experts=experts)
  task = dataclasses.replace(given.task, batch_tokens=16 * 512)
  found = []
  for mesh in (MeshConfig(data=8), MeshConfig(data=2, tensor=4)):
    experiment = dataclasses.replace(given, task=task, model=model, mesh=mesh)
    run, _ = aot.assemble(experiment, jax.devices())
    laid_out = matmul_flops.count(aot.trace(run, "all", aot.batch_of(run)).jaxpr)
    found.append((matmul_flops.count(aot.trace_alone(run, "all").jaxpr), laid_out))
  (alone, batch_alone), (same, experts_apart) = found
  assert alone == same
  assert batch_alone == pytest.approx(alone, rel=1e-6)
  # Each of four devices makes room for all tokens, whichever expert they chose.
  assert experts_apart > 1.5 * alone


def test_phases_that_train_other_parameters_have_steps_of_their_own(tmp_path, monkeypatch):
  phases = (
    Phase("rest", trainable="rest", steps=5),
    Phase("routing", trainable="routing", steps=5),
  )
  experiment = dataclasses.replace(masked(tmp_path), phases=phases)
  monkeypatch.setattr(aot, "devices_of", lambda topology: jax.devices())
  monkeypatch.setattr(aot, "costs", lambda run, where, trainable, batch: [f"cost of {trainable}"])
  page = aot.page(experiment, "v5e:2x4")
  assert page.count("cost of ") == 2
  assert "trainable = rest\ncost of rest" in page
  assert "trainable = routing\ncost of routing" in page


def test_what_has_no_place_in_memory_is_told_with_what_to_change():
  message = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.33G of 15.75G hbm. Exceeded"
    " hbm capacity by 2.58G."
  )
  told = aot.out_of_memory(message, EIGHT)
  assert told.startswith("DOES NOT FIT into the memory of a v5e: it needs 18.33G of 15.75G")
  assert "mesh.fsdp" in told
  assert "model.remat" in told


def test_the_larger_count_of_operations_bounds_the_time():
  base = Cost(EIGHT, {"peak": 17_000_000_000}, 8e12, 8e12, 0.5e12, 819e6, 0, 0, {}, 0)
  assert not base.fits
  assert base.operations == 1e12
  assert base.seconds == base.hidden == 1e12 / 197e12
  assert base.utilisation(base.seconds) == pytest.approx(1)
  more = dataclasses.replace(base, counted=4e12)
  assert more.utilisation(more.seconds) == pytest.approx(0.25)


# Configurations.


def test_the_billion_has_a_billion_parameters_most_of_them_in_experts():
  experiment = load_experiment(str(ROOT / "configs/mlm_cah.py:billion"), [])
  files = describe.placeholders(experiment.task)
  task = experiment.task.build(experiment.model, files=files)
  plain = experiment.task.build(experiment.model.plain(), files=files)
  assert describe.count_parameters(task) > 1_000_000_000
  assert describe.count_parameters(plain) < 200_000_000


# The compiler for TPUs.


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_a_step_is_compiled_for_tpus_of_several_hosts(tmp_path):
  """A minute: XLA for TPUs compiles thoroughly. Run by `make aot-steps`, which installs libtpu."""
  kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  sizes = ["dim=128", "heads=2", "ffn_dim=128", "encoder_layers=1"]
  done = subprocess.run(
    [sys.executable, "-m", "train.main", "--config", "configs/mlm_cah.py:grammar"]
    + [f"--config.model.{size}" for size in sizes]
    + ["--config.mesh.data=4", "--config.mesh.fsdp=4", "--aot", "v5e:4x4"],
    cwd=ROOT,
    env=kept | {"COMPMOD_CACHE": str(tmp_path)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert "v5e:4x4: 16 chips (TPU v5 lite;" in done.stdout
  assert re.search(r"^  fits: ", done.stdout, re.MULTILINE)
  assert re.search(r"^  all-gather +4 ", done.stdout, re.MULTILINE)
  assert 0 < number(done.stdout, "step: the larger of the first two + the third", "ms") < 100
