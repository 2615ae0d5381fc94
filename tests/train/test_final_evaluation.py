"""Why a run ended, and what its best score was measured on."""

import pytest

from compmod_jax.training.final_evaluation import ending
from compmod_jax.training.history import TIME_UP, History


@pytest.mark.parametrize(
  ("stopped", "step", "reason", "text"),
  [
    ("", 1900, "all_steps", "all 1,900 steps were done"),
    (TIME_UP, 1484, "time_limit", "time limit (5 minutes) at step 1,484 of 1,900"),
    (TIME_UP, 1900, "all_steps", "all 1,900 steps were done"),
    (
      "no better bleu in 3 evaluations",
      900,
      "no_better_score",
      "early stopping at step 900 of 1,900: no better bleu in 3 evaluations",
    ),
  ],
)
def test_the_end_of_a_run_says_why_and_where(stopped, step, reason, text):
  found = ending(History(step=step, stopped=stopped), 1900, 5.0)
  assert found == {"reason": reason, "step": step, "total_steps": 1900, "text": text}


def test_a_limit_of_one_minute_is_one_minute():
  assert "(1 minute)" in ending(History(step=1, stopped=TIME_UP), 2, 1.0)["text"]
