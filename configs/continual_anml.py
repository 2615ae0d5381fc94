"""Characters that are learned one class after the other by ANML (Beaulieu et al. 2020).

A neuromodulatory network gates a prediction network; both are meta-learned on trajectories of
single classes, so that new classes do not overwrite those before. At the end, 600 classes of
unseen alphabets are learned in order, from 15 examples each, once each.

Run:      python -m train.main --config configs/continual_anml.py --workdir runs/anml
Variants: (none)          ANML
          oml             a representation, no gate, two prediction layers (Javed & White 2019)
          pretrain        plain classification of the training classes, with as many parameters
          pretrain_gated  the same with the network of ANML
          first_order     ANML without second derivatives
          omniglot        ANML on Omniglot, through TensorFlow Datasets
          debug           ANML so small that a run ends within a minute
Report:   python -m train.analyse continual --workdir runs/anml
Data:     the project's own characters: 50 alphabets, 1,623 classes of 20 examples
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.sources.classes import TfdsClasses
from compmod_jax.models.neuromodulated import Kind, NeuromodulatedConfig
from compmod_jax.tasks.continual import ContinualConfig
from compmod_jax.tasks.protocols import UseConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_VARIANTS = ("", "oml", "pretrain", "pretrain_gated", "first_order", "omniglot", "debug")
# What every network is used in; the first one chooses the parameters that are kept.
_LAST_LAYER = ("last_layer", "interleaved", "rehearsal", "ewc", "lwf")
_OML = ("prediction_layers", *_LAST_LAYER)
_PRETRAIN = (*_LAST_LAYER, "fine_tuned", "scratch")


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, _VARIANTS)
  kinds: dict[str, Kind] = {"oml": "oml", "pretrain": "plain"}
  protocols = {"oml": _OML, "pretrain": _PRETRAIN}.get(variant, _LAST_LAYER)
  task = ContinualConfig(first_order=variant == "first_order", use=UseConfig(protocols=protocols))
  if variant == "oml":  # two linear layers overshoot at the step size of a gated last one
    task = dataclasses.replace(task, inner_rate=0.03)
  if variant.startswith("pretrain"):  # as many examples a step
    task = dataclasses.replace(task, trajectory=0, remember=task.rows)
  if variant == "omniglot":
    task = dataclasses.replace(task, data=TfdsClasses("omniglot"))
  experiment = Experiment(
    name="classes one after the other",
    task=task,
    model=NeuromodulatedConfig(kind=kinds.get(variant, "anml")),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=1e-3, schedule="cosine", warmup_steps=20, b2=0.999
    ),
    phases=(Phase(steps=4000),),
    evaluate_every=1000,
    evaluate_sentences=100,
    log_every=50,
    watch_sentences=0,
    time_limit_minutes=9,
  )
  return debug(experiment) if variant == "debug" else experiment


def debug(experiment: Experiment) -> Experiment:
  use = UseConfig(
    classes=(3, 6, 12),
    choice=8,
    rates=(0.01, 0.1),
    row_gains=(0.0,),
    strengths=(1.0,),
    protocols=_LAST_LAYER,
    buffer=20,
    replay=2,
  )
  return dataclasses.replace(
    experiment,
    task=ContinualConfig(trajectory=5, remember=8, use=use),
    model=NeuromodulatedConfig(filters=4, modulator_filters=2),
    phases=(Phase(steps=20),),
    evaluate_every=10,
    evaluate_sentences=6,
    log_every=5,
  )
