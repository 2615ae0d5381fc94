"""How often Python looks for garbage: objects that only refer to each other."""

import gc

THRESHOLDS = 50_000, 3, 3
"""Of `gc.set_threshold`; 700, 10 and 10 by default."""


def look_rarely() -> None:
  """For programs that trace and compile.

  These make many objects that stay, and few cycles. By default Python looks for cycles a thousand
  times before the first step of training, which is a seventh of that time. So rarely, it looks
  through all objects once in half a million new ones. Imports and the tracing of a model make
  somewhat more, so that the arrays of a model that is no longer used are not kept for long.
  """
  gc.set_threshold(*THRESHOLDS)
