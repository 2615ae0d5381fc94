"""How many transformations get an expert of their own: Parascandolo et al. 2018, section 5."""

import dataclasses

from compmod_jax.core.errors import check_choice
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec
from compmod_jax.training.experiment import load_config

SCALES = {"tiny": "handwritten digits of 12 x 12 pixels, on a CPU"}


def experts(scale: str) -> Spec:
  """Ten experts for ten transformations; published, each has its own in 7 of 10 runs.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, SCALES)
  # Every run is made for the same halves: its seed is that of parameters and batches.
  experiment = dataclasses.replace(load_config("competing_experts"), time_limit_minutes=0.0)
  columns = (
    Column("all specialised", "test", "experts/all_specialised", 1),
    Column("specialised", "test", "experts/specialised", 1),
    Column("idle", "test", "experts/idle", 1, lower=True),
    Column("restored", "test", "experts/restored_loss", 4, lower=True),
    Column("transformed", "test", "experts/transformed_loss", 4, lower=True),
  )
  title = "Experts that compete for transformed digits (Kolios 2023, section 4.6.7)"
  rows = {"experts": Row(experiment, {"all specialised": 0.7})}
  return Spec(title, SCALES[scale], rows, "experts", columns)
