"""Experts that compete to invert transformations of digits (Parascandolo et al. 2018, section 5).

Eight translations, inverted contrast and noise; ten experts, pre-trained to the identity, that
learn from the images which they win under a discriminator (Kolios 2023, section 4.6.7).

Run:      python -m train.main --config configs/competing_experts.py --workdir runs/experts
Variants: (none)   10 experts on images of 12 x 12 pixels; $COMPMOD_DATA/digits
          balanced with a bias of every expert that rises while it wins less than its share
          debug    experts so small, on images so small, that a run ends within a minute
Report:   python -m train.analyse image-experts --workdir runs/experts
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.transformed_digits import TransformedDigits
from compmod_jax.models.competing_experts import CompetingExpertsConfig
from compmod_jax.tasks.image_experts import ImageExpertsConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig, ParamGroup


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, ("", "balanced", "debug"))
  return {"": digits, "balanced": balanced, "debug": debug}[variant]()


def phases(pretraining: int, competition: int) -> tuple[Phase, ...]:
  """The discriminator stands still while experts learn the identity."""
  return (
    Phase("identity", trainable="experts", steps=pretraining),
    Phase("competition", steps=competition),
  )


def digits() -> Experiment:
  # A discriminator that learns faster than experts settles who wins before they have parted.
  fast = OptimizerConfig(
    name="adam", learning_rate=1e-3, schedule="constant", warmup_steps=0, b1=0.5, b2=0.99
  )
  slow = dataclasses.replace(fast, learning_rate=5e-4)
  return Experiment(
    name="experts that compete for transformed digits",
    task=ImageExpertsConfig(data=TransformedDigits(), pretraining_steps=300),
    model=CompetingExpertsConfig(filters=8),
    optimizer=fast,
    groups=(
      ParamGroup("experts", ("experts",), fast),
      ParamGroup("discriminator", ("discriminator",), slow),
    ),
    phases=phases(300, 1500),
    evaluate_every=250,
    log_every=10,
    watch_sentences=0,
    keep_models=0,
  )


def balanced() -> Experiment:
  base = digits()
  # An expert that wins nothing gains a tenth of a logit a step.
  rate = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", warmup_steps=0)
  return dataclasses.replace(
    base,
    name=f"{base.name}, with a bias for those that win little",
    task=dataclasses.replace(base.task, balance=True),
    groups=(*base.groups, ParamGroup("bias", ("bias",), rate)),
  )


def debug() -> Experiment:
  base = digits()
  return dataclasses.replace(
    base,
    name="tiny experts that compete for transformed digits",
    task=ImageExpertsConfig(
      data=TransformedDigits(side=6, border=1, shift=1, valid=40), pretraining_steps=20, rows=8
    ),
    model=CompetingExpertsConfig(
      experts=3, layers=2, filters=4, discriminator_layers=2, discriminator_filters=4
    ),
    phases=phases(20, 40),
    evaluate_every=20,
  )
