"""The table of neural interpreters: expressions, and others by some of the parameters."""

import dataclasses
from collections.abc import Mapping

from compmod_jax.core.errors import check_choice
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec
from compmod_jax.tasks.fuzzy_logic import FuzzyLogicConfig
from compmod_jax.training.experiment import Experiment, load_config

FIRST = "pre-training"
# Row -> variant of the configuration, and the published coefficient of determination.
ROWS: Mapping[str, tuple[str, float | None]] = {
  FIRST: ("", 0.9983),
  "CLS vectors": ("cls", 0.9202),
  "and types": ("types", 0.9857),
  "and all else": ("everything", 0.9953),
  "fresh": ("fresh", None),
}


def fuzzy_expressions(scale: str) -> Spec:
  """Table 4.2 of Kolios 2023: 20 expressions, and 10 others from there; each seed has its own.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, ("tiny",))

  def seeded(experiment: Experiment, seed: int) -> Experiment:
    assert isinstance(experiment.task, FuzzyLogicConfig)
    data = dataclasses.replace(experiment.task.data, seed=seed)
    return dataclasses.replace(
      experiment, seed=seed, task=dataclasses.replace(experiment.task, data=data)
    )

  rows = {}
  for name, (variant, published) in ROWS.items():
    experiment = load_config(f"neural_interpreter:{variant}")
    figures = {} if published is None else {"R2 test": published}
    rows[name] = Row(experiment, figures, seeded, starts_from=FIRST if experiment.start else "")
  columns = (
    Column("R2 test", "test", "fuzzy/r2", 4),
    Column("least R2 test", "test", "fuzzy/r2_min", 4),
  )
  title = "Fuzzy expressions by a neural interpreter (Kolios 2023, Table 4.2)"
  return Spec(title, "random expressions of 5 variables, on a CPU", rows, "CLS vectors", columns)
