"""An outer step of MAML beside PyTorch's with torch.func, and to the first order.

    python -m benchmarks.maml [--quick] [--one-by-one] [--json FILE] [--check] [--device gpu]

Needs the environment of `make test-peers`. The network of configs/few_shot_maml.py with max-pooling
(4 convolutions of 64 filters), 5 inner steps of gradient descent, 16 tasks of 5-way 1-shot with 15
queries a class, float32: gradient of the mean query loss, and a step of SGD. PyTorch's is `vmap`
over tasks of `grad` through `functional_call`; with --one-by-one also the same without `vmap`, task
after task. Ours computes tasks one after the other too on a CPU (`tasks_at_once = 1`), as many of
them at a time as there are cores, each of which is a device (as with JAX_NUM_CPU_DEVICES); on a GPU
by `vmap`.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from compmod_jax.core import sharding
from compmod_jax.core.losses import objective
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.few_shot import FewShot, Maml
from compmod_jax.training.experiment import load_config

RATE, OUTER_RATE = 0.05, 0.001
Step = Callable[[], Any]


def task_of(options: Any, **changes: Any) -> FewShot:
  """The task of the configuration, with the benchmark's sizes."""
  experiment: Any = load_config("few_shot_maml")
  quick = options.quick
  config = dataclasses.replace(
    experiment.task,
    episodes=ClassEpisodeConfig(
      ways=5, shots=1, queries=2 if quick else 15, batch=4 if quick else 16
    ),
    method=Maml(steps=2 if quick else 5, rate=RATE, first_order=changes.pop("first_order", False)),
    **changes,
  )
  model = dataclasses.replace(experiment.model, halve="pool", filters=8 if quick else 64)
  return config.build(model)


def ours(task: FewShot, params: Any, batch: Any) -> Step:
  """A call that gives the loss and the parameters after a step."""
  context = StepContext(jax.random.key(0), jnp.int32(0), True)

  def step(params: Any) -> Any:
    def loss(params: Any) -> jax.Array:
      return objective(task.loss(params, (), batch, context)[0])

    value, slopes = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - OUTER_RATE * g, params, slopes)

  jitted = jax.jit(step)
  return lambda: jax.block_until_ready(jitted(params))


class Peer:
  """The same in PyTorch, with the same parameters and episodes."""

  def __init__(self, task: FewShot, params: Any, batch: Any, device: str):
    import torch

    module: Any = task.model.module
    self.torch, config = torch, module.config
    self.place = "cuda" if device == "gpu" else "cpu"
    layers, channels = [], 1
    for i in range(config.blocks):
      conv = torch.nn.Conv2d(channels, config.filters, 3, padding=1, bias=False)
      norm = torch.nn.BatchNorm2d(config.filters, track_running_stats=False)
      with torch.no_grad():
        kernel = np.transpose(np.array(params[f"block_{i}"]["kernel"]), (3, 2, 0, 1))
        conv.weight.copy_(torch.from_numpy(kernel.copy()))
      layers += [conv, norm, torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
      channels = config.filters
    head = torch.nn.Linear(channels, module.outputs)
    with torch.no_grad():
      head.weight.copy_(torch.from_numpy(np.array(params["head"]["kernel"]).T.copy()))
      head.bias.zero_()
    self.net = torch.nn.Sequential(*layers, torch.nn.Flatten(), head).to(self.place)
    self.params = {name: p.detach() for name, p in self.net.named_parameters()}
    inputs = np.moveaxis(np.asarray(batch["inputs"]), -1, -3).astype(np.float32) / 255
    self.inputs = torch.from_numpy(inputs.copy()).to(self.place)
    self.labels = torch.from_numpy(np.asarray(batch["labels"]).astype(np.int64)).to(self.place)
    self.method: Any = task.model.method
    self.support = task.dataset.trained.support

  def _loss(self, params: Any, inputs: Any, labels: Any) -> Any:
    logits = self.torch.func.functional_call(self.net, params, (inputs,))
    return self.torch.nn.functional.cross_entropy(logits, labels)

  def _episode(self, params: Any, inputs: Any, labels: Any, first_order: bool = False) -> Any:
    """The query's loss after adaptation."""
    count, moved = self.support, params
    for _ in range(self.method.steps):
      at = {name: p.detach() for name, p in moved.items()} if first_order else moved
      slopes = self.torch.func.grad(self._loss)(at, inputs[:count], labels[:count])
      moved = {
        name: p - RATE * (slopes[name].detach() if first_order else slopes[name])
        for name, p in moved.items()
      }
    return self._loss(moved, inputs[count:], labels[count:])

  def step(self, *, together: bool, first_order: bool = False) -> Step:
    """A call that gives the loss and the parameters after a step."""
    func = self.torch.func
    one = functools.partial(self._episode, first_order=first_order)

    def mean(params: Any, inputs: Any, labels: Any) -> Any:
      return func.vmap(one, (None, 0, 0))(params, inputs, labels).mean()

    def run() -> Any:
      if together:
        slopes, value = func.grad_and_value(mean)(self.params, self.inputs, self.labels)
      else:
        found = [
          func.grad_and_value(one)(self.params, inputs, labels)
          for inputs, labels in zip(self.inputs, self.labels, strict=True)
        ]
        value = sum(v for _, v in found) / len(found)
        slopes = {n: sum(s[n] for s, _ in found) / len(found) for n in self.params}
      moved = {name: p - OUTER_RATE * slopes[name] for name, p in self.params.items()}
      if self.place == "cuda":
        self.torch.cuda.synchronize()
      return value, moved

    return run


def check_agreement(report: common.Report, mine: Any, theirs: Any) -> None:
  """That both took the same step."""
  (value, after), (other, moved) = mine, theirs
  gap = abs(float(value) - float(other)) / float(other)
  report.note(f"relative gap of the losses: {gap:.1e}")
  kernel = np.transpose(np.asarray(after["block_1"]["kernel"]), (3, 2, 0, 1))
  worst = np.abs(kernel - moved["4.weight"].cpu().numpy()).max() / OUTER_RATE
  report.note(f"largest gap of a gradient of the second block: {worst:.1e}")
  report.claim("gap of the losses", [gap], 1.0, at_most=1e-3)


def main() -> None:
  parser = common.options(__doc__)
  parser.add_argument("--one-by-one", action="store_true", help="PyTorch without vmap, too")
  options = parser.parse_args()
  # Before JAX starts.
  cores = 1 if options.device == "gpu" else len(os.sched_getaffinity(0))
  jax.config.update("jax_num_cpu_devices", math.gcd(cores, 4 if options.quick else 16))
  report = common.start("An outer step of MAML", options)
  task = task_of(options)
  params = nn.unbox(task.model.init(jax.random.key(0)))
  batch = next(task.dataset.train_batches(seed=0, multiple=1)[0])
  peer = Peer(task, params, batch, options.device)
  at_once = 0 if options.device == "gpu" else 1
  mesh = sharding.make_mesh(sharding.MeshConfig())
  placed = (
    jax.device_put(params, sharding.replicated(mesh)),
    sharding.place_batch(batch, mesh),
  )
  second = ours(task_of(options, tasks_at_once=at_once), *placed)
  first = ours(task_of(options, tasks_at_once=at_once, first_order=True), *placed)
  runs = {
    "second order": second,
    "first order": first,
    "PyTorch": peer.step(together=True),
  }
  if options.one_by_one:
    runs["PyTorch, one by one"] = peer.step(together=False)
  # Each has run once then, which compiles ours; a step of PyTorch's takes long.
  results = {name: run() for name, run in runs.items()}
  check_agreement(report, results["second order"], results["PyTorch"])
  amount = len(batch["index"])
  seconds = report.measure("outer step", runs, 3, amount=amount, unit="tasks", warm_up=0)
  mine, theirs = seconds["second order"], seconds["PyTorch"]
  report.claim("our time / PyTorch's", mine, theirs, at_most=0.7)
  if options.one_by_one:
    report.claim("our time / PyTorch's, one by one", mine, seconds["PyTorch, one by one"])
  report.claim("first order / second order", seconds["first order"], mine, at_most=0.6)
  report.finish()


if __name__ == "__main__":
  main()
