"""Digits pixel by pixel, by recurrent independent mechanisms (Kolios 2023, Table 4.1).

Trained on images of 14 x 14 pixels, tested on the same test images at 14, 16, 19 and 24.

Run:      python -m train.main --config configs/rim_digits.py --workdir runs/rim_digits
Variants: (none)     6 modules of 100 units (LSTM), 4 active; $COMPMOD_DATA/digits
          lstm-300   an LSTM of 300 units
          lstm-600   an LSTM of 600 units
          cpu        6 modules of 40 units, 4 active; 40 epochs
          lstm-240-cpu
                     an LSTM of 240 units; 40 epochs
          debug      a model so small, on images so small, that a run ends within minutes
Report:   python -m train.analyse modules --workdir W --split pixels_24
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.sequences import DigitsData
from compmod_jax.mechanisms.rims import RimConfig
from compmod_jax.models.recurrent import LstmCellConfig, RecurrentConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

CELLS = {
  "": RimConfig(active=4),
  "lstm-300": LstmCellConfig(300),
  "lstm-600": LstmCellConfig(600),
}
SMALL = {"cpu": RimConfig(active=4, dim=40), "lstm-240-cpu": LstmCellConfig(240)}


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, [*CELLS, *SMALL, "debug"])
  if variant == "debug":
    return debug()
  if variant in SMALL:
    return dataclasses.replace(digits(SMALL[variant]), phases=(Phase(epochs=40),))
  return digits(CELLS[variant])


def digits(cell: RimConfig | LstmCellConfig) -> Experiment:
  return Experiment(
    name=f"digits by {cell.describe()}",
    task=SequenceConfig(data=DigitsData()),
    model=RecurrentConfig(cell=cell),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=1e-3, schedule="constant", warmup_steps=0, b2=0.999, clip=1.0
    ),
    phases=(Phase(epochs=100),),
  )


def debug() -> Experiment:
  base = digits(CELLS[""])
  return dataclasses.replace(
    base,
    name="digits by tiny recurrent independent mechanisms",
    task=SequenceConfig(data=DigitsData(size=4, test_sizes=(4, 6), valid=200)),
    model=RecurrentConfig(cell=RimConfig(active=4, dim=8, head_dim=4), embedding_dim=8),
    phases=(Phase(steps=50),),
    evaluate_every=25,
  )
