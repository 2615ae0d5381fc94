"""What a run remembers between steps besides its arrays."""

import dataclasses
from typing import Any, Final

TIME_UP: Final = "the time limit was reached"
NO_BETTER: Final = "no better"
NO_LOG: Final[dict[str, Any]] = {"window": {"sums": {}}, "lines": []}
"""What a log holds before the first step."""


@dataclasses.dataclass
class History:
  """Where a run stands; part of every checkpoint.

  Attributes:
    step: batches seen.
    evaluated: step of the last evaluation.
    best: score of the best evaluation, None before the first.
    best_step: its step.
    stale: evaluations since the best one.
    seconds: wall time spent in training so far, evaluations included.
    stopped: why training ended before its last step; empty if it did not.
    log: what the log has added up since its last line.
    hooks: name of a hook -> its state.
  """

  step: int = 0
  evaluated: int = -1
  best: float | None = None
  best_step: int = 0
  stale: int = 0
  seconds: float = 0.0
  stopped: str = ""
  log: dict[str, Any] = dataclasses.field(default_factory=lambda: NO_LOG)
  hooks: dict[str, Any] = dataclasses.field(default_factory=dict)

  def go_on(self, *, patience: int, limit_minutes: float) -> None:
    """Forgets why training had ended, where that holds no longer."""
    if self.stopped == TIME_UP and (not limit_minutes or self.seconds < limit_minutes * 60):
      self.stopped = ""
    if self.stopped.startswith(NO_BETTER) and not 0 < patience <= self.stale:
      self.stopped = ""
