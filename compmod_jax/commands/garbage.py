"""How often Python looks for garbage: objects that only refer to each other."""

import gc

THRESHOLDS = 50_000, 20, 20
"""Of `gc.set_threshold`; 700, 10 and 10 by default."""


def look_rarely() -> None:
  """For programs that trace and compile.

  These make many objects that stay, and few cycles. By default Python goes through all of them
  again with every quarter more, a tenth of the time until the first step of training; so rarely,
  garbage still goes every 20 million objects.
  """
  gc.set_threshold(*THRESHOLDS)
