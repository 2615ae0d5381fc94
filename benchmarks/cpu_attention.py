"""Attention on CPUs, a few heads of one example at a time, beside one operation and PyTorch's.

    python -m benchmarks.cpu_attention [--quick] [--json FILE] [--check]

Needs the environment of `make test-peers`. Forward passes, and values with the gradients by
queries, keys, values and bias, of causal attention in float32. `blocks` is what layers run, `as
one` what they ran before: the logits of all examples and heads as one array. PyTorch's is
`scaled_dot_product_attention`, which has a kernel of its own where no bias is learned. In full
about a minute on 2 cores.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from compmod_jax.kernels.attention import blocks
from compmod_jax.layers.attention import attend
from compmod_jax.layers.context import AttentionMask

ROUNDS = 12
Run = Callable[[], object]


class Case(NamedTuple):
  """Sizes of attention, and whether a bias of all pairs is learned."""

  batch: int
  time: int
  heads: int
  width: int
  bias: bool


CASES = {
  "steps of SCAN, 20 x 200, bias": Case(20, 200, 4, 32, True),
  "steps of PCFG SET, 6 x 640, bias": Case(6, 640, 4, 32, True),
  "text, 8 x 512": Case(8, 512, 8, 64, False),
  "text, 4 x 1,024": Case(4, 1024, 12, 64, False),
}


def ours(given: Mapping[str, np.ndarray]) -> tuple[Run, Run]:
  """A forward pass, and one with gradients, of what is traced here."""
  arrays = {name: jnp.asarray(one) for name, one in given.items()}

  def run(arrays: Mapping[str, jax.Array]) -> jax.Array:
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    mask = AttentionMask(causal=True)
    return attend(query, key, value, mask, bias=arrays.get("bias"))

  def loss(arrays: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.mean(run(arrays) ** 2)

  forward = jax.jit(run).lower(arrays).compile()
  training = jax.jit(jax.value_and_grad(loss)).lower(arrays).compile()
  return (
    lambda: jax.block_until_ready(forward(arrays)),
    lambda: jax.block_until_ready(training(arrays)),
  )


def peer(given: Mapping[str, np.ndarray]) -> tuple[Run, Run]:
  """The same of PyTorch."""
  import torch

  leaves = {name: torch.tensor(one).requires_grad_() for name, one in given.items()}
  time = given["query"].shape[1]
  hidden = torch.full((time, time), float("-inf")).triu(1)

  def run() -> Any:
    rows = (leaves[name].transpose(1, 2) for name in ("query", "key", "value"))
    attention = torch.nn.functional.scaled_dot_product_attention
    if "bias" in leaves:
      return attention(*rows, attn_mask=leaves["bias"] + hidden).transpose(1, 2)
    return attention(*rows, is_causal=True).transpose(1, 2)

  def forward() -> Any:
    with torch.no_grad():
      return run()

  def training() -> Any:
    loss = (run() ** 2).mean()
    return loss.detach(), torch.autograd.grad(loss, list(leaves.values()))

  return forward, training


def main() -> None:
  options = common.options(__doc__).parse_args()
  report = common.start("Attention on CPUs", options)
  cases = dict(list(CASES.items())[:1]) if options.quick else CASES
  for name, case in cases.items():
    random = np.random.default_rng(0)
    shape = (case.batch, case.time, case.heads, case.width)
    given = {
      part: random.normal(size=shape).astype(np.float32) for part in ("query", "key", "value")
    }
    if case.bias:
      square = (1, case.heads, case.time, case.time)
      given["bias"] = random.normal(size=square).astype(np.float32)
    runs = {"blocks": ours(given)}
    with blocks.as_one():
      runs["as one"] = ours(given)
    runs["PyTorch"] = peer(given)
    values = [np.asarray(one[0]()) for one in runs.values()]
    worst = max(float(np.abs(values[0] - other).max()) for other in values[1:])
    report.note(f"{name}: heads differ by at most {worst:.1e}")
    rounds = 3 if options.quick else ROUNDS
    for number, what in enumerate(("forward", "training")):
      seconds = report.measure(
        f"{name}, {what}",
        {way: both[number] for way, both in runs.items()},
        rounds,
        amount=case.batch * case.time,
        unit="tokens",
      )
      mine = seconds["blocks"]
      report.claim(f"{name}, {what}: blocks / as one", mine, seconds["as one"], at_most=0.8)
      report.claim(f"{name}, {what}: blocks / PyTorch", mine, seconds["PyTorch"])
  report.finish()


if __name__ == "__main__":
  main()
