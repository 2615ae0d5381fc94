"""Bare products of two matrices in JAX and in PyTorch, which bound what models in either can do.

Machines differ in how fast either library multiplies: a ratio of two models' times says little
without that of their products beside it.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common

Size = tuple[int, int, int]
"""Rows, terms that are added, and columns of a product."""


def compare(report: common.Report, sizes: Iterable[Size], rounds: int = 20) -> None:
  """Times float32 products of each size in turn, and claims the ratios; CPUs alone.

  Args:
    report: where times and ratios go.
    sizes: of the products.
    rounds: alternations.
  """
  import torch

  random = np.random.default_rng(0)
  product = jax.jit(jnp.matmul)
  for rows, inner, columns in dict.fromkeys(sizes):
    left, right = (
      random.standard_normal(shape, np.float32) for shape in ((rows, inner), (inner, columns))
    )
    ours = jnp.asarray(left), jnp.asarray(right)
    theirs = torch.from_numpy(left), torch.from_numpy(right)
    group = f"product of {rows:,} x {inner:,} and {inner:,} x {columns:,}"
    runs = {
      "JAX": lambda ours=ours: jax.block_until_ready(product(*ours)),
      "PyTorch": lambda theirs=theirs: torch.mm(*theirs),
    }
    work = 2e-9 * rows * inner * columns
    seconds = report.measure(group, runs, rounds, amount=work, unit="GFLOP")
    report.claim(f"{group}: JAX's time / PyTorch's", seconds["JAX"], seconds["PyTorch"])
