"""Associations of cues and answers, by recurrent networks with plastic connections.

Every sequence shows pairs of its own, and then asks for each (Knowles 2022, section 2.3; in the
manner of Miconi et al. 2020). Trained with 4 pairs, tested with 4 and 6.

Run:      python -m train.main --config configs/cue_association.py --workdir runs/cues
Variants: (none)       50 units with plastic connections, simple modulation
          hebbian      without modulation
          retroactive  with eligibility traces
          network      a plain recurrent network of as many parameters
          plastic-lstm an LSTM of 40 units whose connections to the cell input are plastic
          lstm         an LSTM of as many parameters
"""

from compmod_jax.core import errors
from compmod_jax.data.sequences import AssociationData
from compmod_jax.mechanisms.plasticity import PlasticConfig
from compmod_jax.models.recurrent import LstmCellConfig, NetworkCellConfig, RecurrentConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

CELLS = {
  "": PlasticConfig(dim=50, rule="simple"),
  "hebbian": PlasticConfig(dim=50, rule="hebbian"),
  "retroactive": PlasticConfig(dim=50, rule="retroactive"),
  "network": NetworkCellConfig(67),
  "plastic-lstm": PlasticConfig(kind="lstm", dim=40, rule="simple"),
  "lstm": LstmCellConfig(44),
}


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, CELLS)
  cell = CELLS[variant]
  return Experiment(
    name=f"associations by {cell.describe()}",
    task=SequenceConfig(data=AssociationData()),
    model=RecurrentConfig(cell=cell, embedding_dim=32),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=3e-3, schedule="constant", warmup_steps=0, b2=0.999, clip=1.0
    ),
    phases=(Phase(steps=2000),),
    evaluate_every=250,
  )
