"""How often Python looks for garbage: objects that only refer to each other."""

import gc

THRESHOLDS = 50_000, 3, 3
"""Of `gc.set_threshold`; 700, 10 and 10 by default."""


def look_rarely() -> None:
  """For programs that trace and compile.

  These make many objects that stay, and few cycles. By default Python goes through them a thousand
  times before the first step of training, which is a tenth of the time. So rarely, it looks through
  all of them once in half a million new ones: about as many as a model makes while it is traced,
  so that the arrays of one that is no longer used are not kept for long.
  """
  gc.set_threshold(*THRESHOLDS)
