"""All mechanisms in one model: heads and experts that compete, a gate, recoding while it answers.

Run:      python -m train.main --config configs/everything.py --workdir runs/everything
Variants: (none)     the model of configs/nemot_qa.py on its worlds with competing heads in the
                     vanilla and output sets, competing experts in the vanilla set, the gate, and
                     the last output layer recoded by the entropy of the next token
          without-heads, without-experts, without-gate, without-recoding  all but one
          plain      none of them
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, load_config

MECHANISMS: tuple[str, ...] = ("heads", "experts", "gate", "recoding")


def get_config(variant: str) -> Experiment:
  choices = {f"without-{name}": {name} for name in MECHANISMS}
  choices |= {"": set(), "plain": set(MECHANISMS)}
  errors.check_choice("variant", variant, choices)
  return using(set(MECHANISMS) - choices[variant])


def using(mechanisms: set[str]) -> Experiment:
  """The experiment with these mechanisms and no other."""
  base = load_config("configs/nemot_qa.py:worlds")
  model = dataclasses.replace(
    base.model,
    heads=4,
    compete=("vanilla_self", "output_self") if "heads" in mechanisms else (),
    expert_layers=("vanilla",) if "experts" in mechanisms else (),
    experts=ExpertsConfig(count=4, matched=True),
    gate="on" if "gate" in mechanisms else "off",
  )
  task = base.task
  assert isinstance(task, AnsweringConfig)
  if "recoding" in mechanisms:
    decode = dataclasses.replace(task.decode, recode_layer=-1, recode_size=0.1)
    task = dataclasses.replace(task, decode=decode)
  names = " and ".join(name for name in MECHANISMS if name in mechanisms)
  return dataclasses.replace(
    base, name=f"{names or 'no mechanism'} on worlds", task=task, model=model
  )
