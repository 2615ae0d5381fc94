"""Copying symbols after a pause, by recurrent independent mechanisms (Kolios 2023, Table 4.1).

Trained with 50 blanks between the symbols and the cue, tested with 50 and 200.

Run:      python -m train.main --config configs/rim_copying.py --workdir runs/rim_copying
Variants: (none)     6 modules of 100 units (LSTM), 3 active
          gru        the same of GRUs
          lstm-300   an LSTM of 300 units
          lstm-600   an LSTM of 600 units
          gru-600    a GRU of 600 units
          cpu, lstm-300-cpu, lstm-600-cpu
                     the same, 6,000 steps of 32 sequences in place of 10,000 of 64, the rate falls
          small, small-lstm-96, small-lstm-192
                     4 symbols, 15 blanks (tests: 15 and 60), 6 modules of 32 units: minutes
          debug      a model and data so small that a run ends within a minute, and learns nothing
Modules:  add --config.model.cell.active=2
Report:   python -m train.analyse modules --workdir W --split blanks_200
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.sequences import CopyingData
from compmod_jax.mechanisms.rims import RimConfig
from compmod_jax.models.recurrent import GruCellConfig, LstmCellConfig, RecurrentConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

CELLS = {
  "": RimConfig(active=3),
  "gru": RimConfig(active=3, kind="gru"),
  "lstm-300": LstmCellConfig(300),
  "lstm-600": LstmCellConfig(600),
  "gru-600": GruCellConfig(600),
}
SHORT = {"cpu": "", "lstm-300-cpu": "lstm-300", "lstm-600-cpu": "lstm-600"}
SMALL = {
  "small": RimConfig(active=3, dim=32),
  "small-lstm-96": LstmCellConfig(96),
  "small-lstm-192": LstmCellConfig(192),
}


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, [*CELLS, *SHORT, *SMALL, "debug"])
  if variant in SHORT:
    return short(SHORT[variant])
  if variant in SMALL:
    return small(variant)
  return debug() if variant == "debug" else copying(variant)


def copying(variant: str = "") -> Experiment:
  cell = CELLS[variant]
  return Experiment(
    name=f"copying by {cell.describe()}",
    task=SequenceConfig(data=CopyingData()),
    model=RecurrentConfig(cell=cell),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=1e-3, schedule="constant", warmup_steps=0, b2=0.999, clip=1.0
    ),
    phases=(Phase(steps=10_000),),
    evaluate_every=250,
  )


def short(variant: str) -> Experiment:
  base = copying(variant)
  # Modules learn as fast as the rate allows; its fall makes long pauses as good as short ones.
  # (Without dropout, one run of one diverged near step 3,600 at this rate.)
  falling = dataclasses.replace(base.optimizer, schedule="cosine", falling_share=0.25)
  return dataclasses.replace(
    base,
    task=dataclasses.replace(base.task, rows=32),
    optimizer=falling,
    phases=(Phase(steps=6000),),
  )


def small(variant: str) -> Experiment:
  base, cell = copying(), SMALL[variant]
  data = CopyingData(length=4, blanks=15, test_blanks=(15, 60))
  return dataclasses.replace(
    base,
    name=f"copying 4 symbols by {cell.describe()}",
    task=SequenceConfig(data=data),
    model=RecurrentConfig(cell=cell, embedding_dim=32),
    optimizer=dataclasses.replace(base.optimizer, learning_rate=3e-3),
    phases=(Phase(steps=3000),),
    evaluate_every=500,
  )


def debug() -> Experiment:
  base = copying()
  return dataclasses.replace(
    base,
    name="copying by tiny recurrent independent mechanisms",
    task=SequenceConfig(
      data=CopyingData(length=3, blanks=4, test_blanks=(4, 8), train=200, valid=20, test=20),
      rows=16,
      eval_rows=16,
    ),
    model=RecurrentConfig(cell=RimConfig(active=3, dim=8, head_dim=4), embedding_dim=8),
    phases=(Phase(steps=20),),
    evaluate_every=10,
  )
