"""Compiles the training step of an experiment for TPUs that are not there, and says what it costs.

    python -m train.main --config configs/nmt_cah.py:wmt14 --aot v5e:4x4

No data are needed and nothing runs: the compiler for TPUs, libtpu, works on any Linux machine.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import jax

from compmod_jax.core import errors, sharding
from compmod_jax.tasks.question_answering import Answering
from compmod_jax.tools import describe, matmul_flops, shapes
from compmod_jax.tools.cost import Cost
from compmod_jax.tools.devices import Topology
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.run import Run, sharing_of

# Without these, libtpu asks the cloud what machine this is, and only one process may compile.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Where phases are given in epochs the data would tell; no program depends on it.
_BATCHES_PER_EPOCH = 1000
_WIDTH = 100


def page(experiment: Experiment, topology: str, cache: Path | None = None) -> str:
  """What the step of an experiment costs on a slice of TPUs, as text.

  Args:
    experiment: any.
    topology: such as v5e:4x4.
    cache: folder in which trained tokenizers are kept.

  Raises:
    UserError: no such topology, libtpu is missing, or the experiment does not fit the mesh.
  """
  where = Topology.parse(topology)
  run, note = assemble(experiment, devices_of(where), cache)
  batch = batch_of(run)
  head = f"{experiment.name}: {run.task.describe()} {describe.count_parameters(run.task):,}"
  shape = " x ".join(f"{size} {axis}" for axis, size in run.mesh.shape.items())
  inputs = ", ".join(f"{name} {' x '.join(map(str, it.shape))}" for name, it in batch.items())
  chip = where.chip
  lines = [
    f"{head} parameters.",
    *([f"{note.rstrip('.')}."] if note else []),
    f"{where}: {where.chips} chips ({chip.kind}; {chip.source}), mesh {shape}",
    f"a batch: {inputs}; {experiment.micro_batches} micro-batches",
  ]
  for trainable in dict.fromkeys(phase.trainable for phase in experiment.phases):
    lines += ["", *([f"trainable = {trainable}"] if trainable != "all" else [])]
    lines += costs(run, where, trainable, batch)
  return "\n".join(row for line in lines for row in textwrap.wrap(line, _WIDTH) or [""])


def devices_of(topology: Topology) -> list[Any]:
  """The devices of a slice that is not there; programs can be compiled for them.

  Raises:
    UserError: libtpu is missing, or does not know such a slice.
  """
  # JAX's own requirements name the version that goes with it.
  listed = [it.split(";")[0] for it in importlib.metadata.requires("jax") or []]
  package = next((it.strip() for it in listed if it.startswith("libtpu")), "libtpu")
  errors.check(
    importlib.util.find_spec("libtpu") is not None,
    "--aot needs libtpu, the compiler for TPUs, which is not installed; no TPU is needed. Run"
    f" `pip install '{package}'` (0.7 GB, Linux on x86-64) in this environment.",
  )
  os.environ.update(_ENVIRONMENT)
  jax.config.update("jax_platforms", "cpu")
  from jax.experimental import topologies

  try:
    return list(topologies.get_topology_desc(str(topology), platform="tpu").devices)
  except Exception as error:
    raise errors.UserError(
      f"--aot is {str(topology)!r}, for which libtpu cannot compile: {error}. Slices consist of"
      " whole hosts, of 2 x 2 chips each; for example v5e:2x2, v5e:4x4, v5p:2x2x1."
    ) from error


def assemble(
  experiment: Experiment, devices: list[Any], cache: Path | None = None
) -> tuple[Run, str]:
  """A run on devices, without data, and a note if its vocabulary may be smaller in truth."""
  mesh = sharding.make_mesh(experiment.mesh, devices)
  task, note = describe.assemble(experiment, cache)
  if isinstance(task, Answering):
    # What the data would tell: answers are as long as the longest that are generated.
    config = task.dataset.config
    task.dataset.longest_answer = config.answer_length * config.turns
  sharing = sharing_of(mesh, experiment.micro_batches)
  epochs = [_BATCHES_PER_EPOCH] * len(experiment.phases)
  return Run(experiment, Path(), task, mesh, sharing, [], epochs, []), note


def batch_of(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
  """The run's longest batch, laid over its mesh."""
  found = shapes.largest_batch(run.task, run.sharing.multiple)

  def laid_out(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    where = sharding.column_sharding(leaf.shape, run.mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  return jax.tree.map(laid_out, found)


def costs(run: Run, topology: Topology, trainable: str, batch: shapes.Shapes) -> list[str]:
  """Compiles a step and tells its cost; or why there is no program for it."""
  began = time.monotonic()
  try:
    cost = cost_of(run, topology, trainable, batch)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return [out_of_memory(str(error), topology)]
  return [*cost.lines(), "", f"compiled in {time.monotonic() - began:.0f} s"]


def cost_of(run: Run, topology: Topology, trainable: str, batch: shapes.Shapes) -> Cost:
  """Compiles a step; what it costs.

  Raises:
    JaxRuntimeError: it does not fit into the chips' memory.
  """
  traced = trace(run, trainable, batch)
  laid_out = matmul_flops.count(traced.jaxpr)
  alone = matmul_flops.count(trace_alone(run, trainable).jaxpr, model=True)
  return Cost.of(traced.lower().compile(), topology, alone, laid_out)


def trace(run: Run, trainable: str, batch: shapes.Shapes) -> jax.stages.Traced:
  """The step as a program that is still to be compiled."""
  whole = sharding.replicated(run.mesh)
  key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=whole)
  return run.jitted_step(trainable).trace(run.abstract_state(), batch, key)


def trace_alone(run: Run, trainable: str) -> jax.stages.Traced:
  """The same step on the same batch as one device would do it, which knows of no layout."""
  one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
  alone = dataclasses.replace(run, mesh=one)
  return trace(alone, trainable, shapes.largest_batch(run.task, run.sharing.multiple))


def out_of_memory(message: str, topology: Topology) -> str:
  """What XLA says of a step that has no place in memory, in short."""
  found = re.search(r"Used (\S+) of (\S+) hbm", message)
  size = f"it needs {found[1]} of {found[2]} (binary units)" if found else message.split("\n")[0]
  return (
    f"DOES NOT FIT into the memory of a {topology.generation}: {size}. Split parameters over more"
    " chips (mesh.fsdp, mesh.tensor), or the optimizer's state (shard_optimizer), take more"
    " micro_batches or smaller batches, recompute activations (model.remat), or compute in bfloat16"
    " (model.dtype)."
  )
