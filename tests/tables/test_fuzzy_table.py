"""Tables whose rows start from their first row's run of the same seed; for neural interpreters
every seed has expressions of its own, too."""

from pathlib import Path

import pytest

from compmod_jax.commands.reproduce import Args, grid


def test_every_seed_has_expressions_of_its_own_and_starts_from_its_own_first_run():
  spec, cells = grid(Args("neural_interpreters", seeds=2))
  assert list(dict.fromkeys(cell.row for cell in cells)) == list(spec.rows)
  for cell in cells:
    experiment, first = cell.experiment, cell.row == "pre-training"
    assert experiment.seed == experiment.task.data.seed == cell.seed
    assert experiment.task.data.first == (0 if first else 20)
    assert bool(experiment.start) != (cell.row in ("pre-training", "fresh"))
    if experiment.start:
      begun = next(c for c in cells if (c.row, c.seed) == ("pre-training", cell.seed))
      assert experiment.start == f"runs/reproduce/neural_interpreters/tiny/{begun.file.stem}"


@pytest.mark.parametrize("table", ["leopard", "neural_interpreters"])
def test_rows_start_where_their_first_run_is_made(table):
  _, cells = grid(Args(table, seeds=1, steps=20, workdir=Path("elsewhere")))
  first = f"elsewhere/{table}/tiny-20-steps/{cells[0].file.stem}"
  assert {cell.experiment.start for cell in cells} == {"", first}


def test_rows_of_other_tables_differ_from_seed_to_seed_in_the_seed_alone():
  _, cells = grid(Args("tim", seeds=2))
  one, other = (cell.experiment for cell in cells if cell.row == "TIM")
  assert (one.seed, other.seed) == (0, 1)
  assert one.task == other.task
  assert one.start == other.start == ""
