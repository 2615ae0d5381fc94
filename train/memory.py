"""How the process uses memory on CPU."""

import ctypes
import platform

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
