"""How the process uses memory on CPU, and whether a model fits into what there is."""

import ctypes
import os
import platform
from pathlib import Path

from compmod_jax.core.errors import check
from compmod_jax.core.types import Params

# Names in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
  """Makes the C library keep freed memory for the next allocation, where it is glibc.

  XLA:CPU allocates the working memory of a training step, hundreds of megabytes, anew for every
  step. By default glibc returns it to the system each time and every page is faulted in and zeroed
  again; a step of 2,048 tokens of a model 512 wide takes 1.4 times as long. The price: memory
  stays at its peak. To be called before other threads allocate.

  Returns:
    Whether it took effect.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))
  return all(mallopt(name, value) == 1 for name, value in settings)


def check_fits(params: Params, *held: tuple[Params, int]) -> None:
  """Refuses a model whose training state alone is larger than the memory.

  Activations come on top of it, so that what passes may still not fit.

  Args:
    params: shapes of the parameters, a tree of `jax.ShapeDtypeStruct`.
    *held: how arrays of the parameters' shapes lie, a tree of shardings, and how many of them a
      step needs: the parameter, its gradient and average; moments.

  Raises:
    UserError: it does not fit; the message has both sizes.
  """
  import jax

  needed = sum(
    copies * float(leaf.dtype.itemsize) * _product(place.shard_shape(leaf.shape))
    for shardings, copies in held
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
  )
  total = sum(_product(leaf.shape) for leaf in jax.tree.leaves(params))
  size, sharing, where = room()
  check(
    needed * sharing <= size,
    f"The model has {total:,.0f} parameters; with gradients and the optimizer's state they need"
    f" {_size(needed * sharing)} of memory, and {where} has {_size(size)}. Lower"
    " model.dim, model.ffn_dim, the layers or task.tokenizer.vocab_size, or share the parameters"
    " out among devices (--config.mesh.fsdp), or the optimizer's state (--config.shard_optimizer).",
  )


def room() -> tuple[int, int, str]:
  """Bytes of memory of the first device, how many devices share them, and whose they are."""
  import jax

  device = jax.local_devices()[0]
  stats = None if device.platform == "cpu" else device.memory_stats()
  if stats and stats.get("bytes_limit"):
    return int(stats["bytes_limit"]), 1, f"each {device.device_kind}"
  sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
    try:
      sizes.append(int(Path(path).read_text()))
    except (OSError, ValueError):  # none there, or "max"
      continue
  shared = len(jax.local_devices()) if device.platform == "cpu" else 1
  return min(sizes), shared, "this machine"


def _product(shape: tuple[int, ...]) -> float:
  size = 1.0  # as a float: no configuration overflows it
  for length in shape:
    size *= length
  return size


def _size(count: float) -> str:
  for unit in ("MB", "GB", "TB"):
    count /= 1e6 if unit == "MB" else 1e3
    if count < 1000 or unit == "TB":
      break
  return f"{count:,.1f} {unit}"
