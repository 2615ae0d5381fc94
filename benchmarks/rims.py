"""Recurrent independent mechanisms beside an LSTM of as many units, and beside PyTorch's.

    python -m benchmarks.rims [--quick] [--json FILE] [--check] [--device gpu]

Needs the environment of `make test-peers`. Six modules of 100 units, 3 active, against an LSTM of
600 units; 64 sequences of 100 steps, inputs of width 100, float32, without dropout: the value and
the gradient, by parameters and inputs, of a mean square of outputs. PyTorch's mechanisms are
written with a loop over modules. In full about five minutes on 2 cores.
"""

import argparse
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.peer_rims import TorchRims
from compmod_jax.layers.lstm import LSTMCell
from compmod_jax.mechanisms.rims import RimConfig

ROUNDS = 10
EMBED = 100


def ours(cell: Any, params: Any, x: jax.Array) -> Callable[[], Any]:
  """A call that gives value and gradients over a sequence."""
  state = cell.initial_state(len(x))

  def loss(params: Any, x: jax.Array) -> jax.Array:
    y, _ = cell.apply({"params": params}, x, state, method="unroll")
    return jnp.mean(y * y)

  jitted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
  return lambda: jax.block_until_ready(jitted(params, x))


def peer(config: RimConfig, params: Any, x: jax.Array, device: str) -> Callable[[], Any]:
  """The same of a loop over modules in PyTorch."""
  import torch

  place = "cuda" if device == "gpu" else "cpu"
  cell = TorchRims(config, params, place)
  read = torch.tensor(np.array(x)).to(place).requires_grad_()
  zeros = torch.zeros(len(x), config.modules, config.dim, device=place)

  def run() -> Any:
    state, total = (zeros, zeros), torch.zeros((), device=place)
    for time in range(read.shape[1]):
      y, state = cell(read[:, time], state)
      total = total + (y * y).mean() / read.shape[1]
    found = torch.autograd.grad(total, [*cell.weights.values(), read])
    if place == "cuda":
      torch.cuda.synchronize()
    return total.detach(), found

  return run


def main() -> None:
  options = common.options(__doc__).parse_args()
  report = common.start("Recurrent independent mechanisms", options)
  config, rows, time = sizes(options)
  x = jax.random.normal(jax.random.key(0), (rows, time, EMBED))
  cells = {"modules": config.build(EMBED), "LSTM": LSTMCell(EMBED, config.units)}
  params = {
    name: nn.unbox(cell.init(jax.random.key(1), x[:, 0], cell.initial_state(rows)))["params"]
    for name, cell in cells.items()
  }
  runs = {name: ours(cell, params[name], x) for name, cell in cells.items()}
  runs["PyTorch, module by module"] = peer(config, params["modules"], x, options.device)
  mine, theirs = (float(runs[name]()[0]) for name in ("modules", "PyTorch, module by module"))
  report.note(f"the same value: {mine:.6g} and {theirs:.6g} by PyTorch")
  rounds = 3 if options.quick else ROUNDS
  seconds = report.measure("training", runs, rounds, amount=rows * time, unit="steps")
  modules = seconds["modules"]
  report.claim("modules / LSTM of as many units", modules, seconds["LSTM"], at_most=2.5)
  report.claim(
    "ours / PyTorch's loop over modules",
    modules,
    seconds["PyTorch, module by module"],
    at_most=0.6,
  )
  report.finish()


def sizes(options: argparse.Namespace) -> tuple[RimConfig, int, int]:
  """The cell, rows and steps."""
  if options.quick:
    return RimConfig(active=3, dim=20, dropout=0.0), 16, 20
  return RimConfig(active=3, dropout=0.0), 64, 100


if __name__ == "__main__":
  main()
