"""Expert feed-forward networks beside a plain one of the same width, and beside PyTorch.

    python -m benchmarks.experts [--quick] [--json FILE] [--check] [--device gpu]
    python -m benchmarks.experts --compiled weights gather exchange [--json FILE] [--check]

The first needs the environment of `make test-peers`. One layer: 8 experts of 512 hidden units,
width 512, 2,048 tokens; the plain network has 4,096 hidden units. A training step is the gradient
with respect to parameters and inputs. The router, InfF and signatures, is part of every layer with
experts.
PyTorch's layers are written as one would: the plain network, a batched product over experts, and a
loop over experts that gathers the tokens of each. In full about two minutes on 2 cores.

The second, in the environment of `make aot`, compiles for accelerators that are not here and runs
nothing. `weights`: the gradient of four experts' matrices, 8,192 rows, 1,024 x 4,096, bfloat16, in
bytes as `benchmarks/census.py` counts them, by the kernel and as XLA alone would do it (a minute).
`gather`, `exchange`: the step of configs/mlm_cah.py:billion on 16 v5e chips with that way to
dispatch tokens, as `--aot` counts it (a quarter of an hour each; `--layers 2`, which has no target,
a fifth of it).
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, devices
from compmod_jax.commands.config_option import load_experiment
from compmod_jax.kernels import grouped
from compmod_jax.layers.basic import FeedForward
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.tools import aot
from compmod_jax.tools.devices import Topology

ROUNDS = 20
TOP_2 = CompetitionConfig(rule="top_k", keep=2)


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes of the layer and of its batch."""

  batch: int = 16
  time: int = 128
  dim: int = 512
  experts: int = 8
  width: int = 512
  dtype: str = "float32"

  @property
  def tokens(self) -> int:
    """Tokens of a call."""
    return self.batch * self.time

  def layers(self) -> dict[str, nn.Module]:
    """The layers that are compared."""
    dtype = jnp.dtype(self.dtype)
    wide = self.experts * self.width

    def experts(competition: CompetitionConfig, implementation: Any = "auto") -> Experts:
      config = ExpertsConfig(self.experts, False, competition, implementation)
      return Experts(self.dim, self.width, config, dtype=dtype)

    return {
      "plain": FeedForward(self.dim, wide, dtype=dtype),
      "dense": experts(CompetitionConfig()),
      "top-2": experts(TOP_2),
      "top-2, all run": experts(TOP_2, "dense"),
    }

  def arrays(self) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs, and the output's gradient."""
    random, shape = np.random.default_rng(0), (self.batch, self.time, self.dim)
    return random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)

  def params(self) -> Any:
    """Parameters of the layers with experts."""
    layer, tokens = self.layers()["dense"], jnp.ones((1, 1, self.dim))
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), tokens))["params"]
    # Signatures of a trained size: no expert is left out, and none gets an even share.
    params["router"]["signatures"] *= 3
    return params


def wide_params(params: Any) -> Any:
  """The plain network whose hidden units are all the experts'."""
  up, down = params["up"], params["down"]
  return {
    "up": {"kernel": up["kernel"].reshape(len(up["kernel"]), -1), "bias": up["bias"].reshape(-1)},
    "down": {
      "kernel": down["kernel"].reshape(-1, down["kernel"].shape[-1]),
      "bias": jnp.sum(down["bias"], axis=0),
    },
  }


def our_runs(case: Case, name: str, params: Any) -> dict[str, Callable[[], Any]]:
  """Calls for a forward pass and for a gradient of one of our layers; they return its arrays."""
  layer = case.layers()[name]
  params = wide_params(params) if name == "plain" else params
  inputs, cotangent = map(jnp.asarray, case.arrays())

  def forward(params: Any, inputs: jax.Array) -> Any:
    return layer.apply({"params": params}, inputs)

  def gradient(params: Any, inputs: jax.Array, cotangent: jax.Array) -> Any:
    output, pull = jax.vjp(forward, params, inputs)
    return output, pull(cotangent.astype(output.dtype))

  forward_jit, gradient_jit = jax.jit(forward), jax.jit(gradient)
  return {
    "forward": lambda: jax.block_until_ready(forward_jit(params, inputs)),
    "training": lambda: jax.block_until_ready(gradient_jit(params, inputs, cotangent)),
  }


def their_runs(case: Case, name: str, params: Any, device: str) -> dict[str, Callable[[], Any]]:
  """The same in PyTorch."""
  import torch

  place = "cuda" if device == "gpu" else "cpu"
  dtype = getattr(torch, case.dtype)

  def tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value)).to(place)

  inputs, cotangent = (tensor(x).to(dtype).flatten(0, 1) for x in case.arrays())
  tree = wide_params(params) if name == "plain" else params
  leaves = jax.tree.map(lambda leaf: tensor(leaf).to(dtype).requires_grad_(), tree)
  function = {"plain": _plain, "dense": _dense, "top-2": _top_2}[name]
  inputs.requires_grad_()
  wanted = [inputs, *jax.tree.leaves(leaves)]

  def done(result: Any) -> Any:
    if device == "gpu":
      torch.cuda.synchronize()
    return result

  def forward() -> Any:
    with torch.no_grad():
      return done(function(leaves, inputs))

  def training() -> Any:
    return done(torch.autograd.grad(function(leaves, inputs), wanted, cotangent))

  return {"forward": forward, "training": training}


def _plain(p: Mapping[str, Any], x: Any) -> Any:
  import torch

  hidden = torch.relu(torch.addmm(p["up"]["bias"], x, p["up"]["kernel"]))
  return torch.addmm(p["down"]["bias"], hidden, p["down"]["kernel"])


def _scores(p: Mapping[str, Any], x: Any) -> Any:
  import torch

  hidden = torch.relu(torch.addmm(p["hidden"]["bias"], x, p["hidden"]["kernel"]))
  keys = torch.addmm(p["key"]["bias"], hidden, p["key"]["kernel"])
  return keys @ p["signatures"].T / keys.shape[-1] ** 0.5


def _dense(p: Mapping[str, Any], x: Any) -> Any:
  import torch

  weights = torch.softmax(_scores(p["router"], x).float(), -1).to(x.dtype)
  up, down = p["up"], p["down"]
  every = x.expand(len(up["bias"]), *x.shape)
  hidden = torch.relu(torch.baddbmm(up["bias"][:, None], every, up["kernel"].transpose(0, 1)))
  outputs = torch.baddbmm(down["bias"][:, None], hidden, down["kernel"])
  return torch.einsum("end,ne->nd", outputs, weights)


def _top_2(p: Mapping[str, Any], x: Any) -> Any:
  import torch

  best = torch.topk(_scores(p["router"], x).float(), 2)
  weights = torch.softmax(best.values, -1).to(x.dtype)
  up, down = p["up"], p["down"]
  result = torch.zeros_like(x)
  for expert in range(len(up["bias"])):
    token, place = torch.where(best.indices == expert)
    hidden = torch.relu(torch.addmm(up["bias"][expert], x[token], up["kernel"][:, expert]))
    output = torch.addmm(down["bias"][expert], hidden, down["kernel"][expert])
    result = result.index_add(0, token, output * weights[token, place, None])
  return result


def check_agreement(report: common.Report, case: Case, params: Any) -> None:
  """Checks that every layer computes what it is compared with."""

  def largest(one: Any, two: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(
      float(np.abs(np.float32(a) - np.float32(b)).max()) / max(1.0, float(np.abs(b).max()))
      for a, b in pairs
    )

  sparse, every = (our_runs(case, n, params)["training"]() for n in ("top-2", "top-2, all run"))
  differences = {"top-2 against all experts with the same weights": largest(sparse, every)}
  for name in ("plain", "dense", "top-2"):
    ours = np.asarray(our_runs(case, name, params)["forward"]()).reshape(-1, case.dim)
    theirs = their_runs(case, name, params, report.options.device)["forward"]()
    differences[f"{name} against PyTorch"] = largest(ours, theirs.float().cpu().numpy())
  for what, difference in differences.items():
    report.note(f"{what}: differ by {difference:.1e} of the largest number at most")
    if case.dtype == "float32" and difference > 1e-5:
      raise RuntimeError(f"{what} do not do the same")


# Compiled for accelerators that are not here.

SLICE, BILLION, LAYERS = "v5e:4x4", "configs/mlm_cah.py:billion", 8
LAYOUT = ("mesh.data=1", "mesh.fsdp=4", "mesh.tensor=4")
MOST_MEBIBYTES = 130.0  # of operands and result 112 have to move
LEAST_UTILISATION = {"gather": 0.24, "exchange": 0.60}


def weights_compiled(report: common.Report) -> None:
  """What the gradient of experts' matrices moves."""
  rows, inner, outer, groups, dtype = 8192, 1024, 4096, 4, "bfloat16"
  left, right = (jax.ShapeDtypeStruct((rows, n), jnp.dtype(dtype)) for n in (inner, outer))
  sizes, table = jax.ShapeDtypeStruct((groups,), jnp.int32), {}
  ways = {"kernel": grouped.outer, "batches": grouped._batched_outer}
  for name in ("v5e", "v5p", "v6e", "h100"):
    device = devices.DEVICES[name]
    for way in ways if name in ("v5e", "h100") else ("kernel",):
      function = functools.partial(ways[way], axis=0)
      cuda = device.platform == "cuda"
      made = devices.compile_for(device, function, (left, right, sizes), dtype, kernels=cuda)
      table[f"{name}, {way}"] = {
        "MiB": made.census.mebibytes,
        "instructions": made.census.instructions,
        "kernels": made.census.kernels,
        "model us": made.seconds * 1e6,
        "registers": max((r for r, _ in made.kernels.values()), default=None),
        "spilt": max((s for _, s in made.kernels.values()), default=None),
      }
      report.say(f"{name}, {way}: {table[f'{name}, {way}']}")
    moved, title = table[f"{name}, kernel"]["MiB"], f"weight gradient, {name}: MiB"
    report.claim(f"{title}, kernel", moved, 1.0, at_most=MOST_MEBIBYTES)
    if f"{name}, batches" in table:
      report.claim(f"{title}, XLA's batches / kernel", table[f"{name}, batches"]["MiB"], moved)
  report.tables["weight gradient"] = table


def step_compiled(report: common.Report, way: str) -> None:
  """What the step of the billion parameters costs on TPUs, by a way to dispatch tokens."""
  layers = report.options.layers
  changes = f"model.encoder_layers={layers}", f"model.experts.dispatch={way}"
  flags = [f"--config.{one}" for one in (*LAYOUT, *changes)]
  topology = Topology.parse(SLICE)
  run, _ = aot.assemble(load_experiment(BILLION, flags), aot.devices_of(topology))
  cost = aot.cost_of(run, topology, "all", aot.batch_of(run))
  for line in cost.lines():
    report.say(line)
  report.tables[f"step, {layers} layers, {way}"] = {
    "peak GB": cost.memory["peak"] / 1e9,
    "TFLOP, step": cost.products / 1e12,
    "TFLOP laid out, chip": cost.laid_out / topology.chips / 1e12,
    "HBM GB, chip": cost.traffic / 1e9,
    "sent GB, chip": cost.sent / 1e9,
    "ms": cost.seconds * 1e3,
    "ms, collectives beside": cost.hidden * 1e3,
    "MFU at most": cost.utilisation(cost.seconds),
    "MFU at most, collectives beside": cost.utilisation(cost.hidden),
    "loops that run only if needed": cost.spare,
  }
  target = {"at_least": LEAST_UTILISATION[way]} if layers == LAYERS else {}
  title = f"billion on {SLICE}, {layers} layers, dispatch = {way}: MFU at most"
  report.claim(title, cost.utilisation(cost.seconds), 1.0, **target)


COMPILED = {
  "weights": weights_compiled,
  **{way: functools.partial(step_compiled, way=way) for way in LEAST_UTILISATION},
}


def main() -> None:
  parser = common.options(__doc__)
  parser.add_argument("--compiled", nargs="+", choices=COMPILED, metavar="NAME", default=[])
  parser.add_argument("--layers", type=int, default=LAYERS, help="of the compiled step")
  options = parser.parse_args()
  if options.compiled:
    devices.use_compilers()
    report = common.start("Experts compiled for accelerators", options)
    for name in options.compiled:
      COMPILED[name](report)
    report.finish()
    return
  report = common.start("Expert feed-forward networks", options)
  case = sizes(options)
  params = case.params()
  check_agreement(report, case, params)
  gpu = options.device == "gpu"
  limits = {
    "forward": (1.05, 0.40) if gpu else (1.12, 0.45),
    "training": (1.05, 0.40) if gpu else (1.12, 0.60),
  }
  runs = {name: our_runs(case, name, params) for name in ("plain", "dense", "top-2")}
  runs |= {
    f"PyTorch {name}": their_runs(case, name, params, options.device)
    for name in ("plain", "dense", "top-2")
  }
  for kind, (most_dense, most_sparse) in limits.items():
    calls = {name: both[kind] for name, both in runs.items()}
    seconds = report.measure(kind, calls, ROUNDS, amount=case.tokens, unit="tokens")
    report.claim(f"{kind}: dense / plain", seconds["dense"], seconds["plain"], at_most=most_dense)
    report.claim(f"{kind}: top-2 / dense", seconds["top-2"], seconds["dense"], at_most=most_sparse)
    for name in ("plain", "dense", "top-2"):
      report.claim(f"{kind}: {name}, ours / PyTorch", seconds[name], seconds[f"PyTorch {name}"])
  report.finish()


def sizes(options: argparse.Namespace) -> Case:
  """What is measured."""
  if options.quick:
    return Case(batch=8, dim=128, width=128)
  if options.device == "gpu":
    return Case(batch=128, dtype="bfloat16")
  return Case()


if __name__ == "__main__":
  main()
