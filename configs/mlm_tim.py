"""Masked language modelling with independent mechanisms that compete (TIM; Lamb et al. 2021).

Run:      python -m train.main --config configs/mlm_tim.py --workdir runs/mlm_tim
Variants: (none)         English sentences of the project's own grammar: 5 minutes on 2 CPU cores
          public_domain  $COMPMOD_DATA/lm_public_domain
Others:   --config.model.mechanisms.competition=False    TIM-NoComp: every mechanism has weight 1
          --config.model.mechanism_layers                (nothing after it): a plain Transformer
          --config.model.mechanisms.count=4              more and narrower mechanisms

The first two layers and the last one are ordinary, as in the original.
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.layers.mechanisms import MechanismsConfig
from compmod_jax.training.experiment import Experiment, load_config


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant or "grammar", ("grammar", "public_domain"))
  base = load_config(f"mlm_cah:{variant or 'grammar'}")
  model = dataclasses.replace(
    base.model,
    compete=(),
    encoder_layers=6,
    mechanism_layers=("encoder_2", "encoder_3", "encoder_4"),
    mechanisms=MechanismsConfig(count=2),
  )
  return dataclasses.replace(
    base,
    name=f"masked language model of independent mechanisms ({variant or 'grammar'})",
    model=model,
  )
