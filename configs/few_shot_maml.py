"""Few-shot classification of generated characters by MAML (Finn et al. 2017).

Parameters are learned from which one step of gradient descent on a few examples of new classes
leads to a classifier of them; evaluation takes three.

Run:      python -m train.main --config configs/few_shot_maml.py --workdir runs/maml
Variants: (none)       5-way 1-shot, to the second order
          5shot        with 5 examples of a class
          20way        20-way 1-shot, 10,000 steps without a time limit
          first_order  without second derivatives
          meta_sgd     a step size for every number, learned, too (Li et al. 2017)
          anil         the head alone adapts (Raghu et al. 2020)
          omniglot     Omniglot in place of generated characters, through TensorFlow Datasets
          digits       2-way on handwritten digits in $COMPMOD_DATA/digits, 4 of them for training
Data:     the project's own characters: 50 alphabets, 1,623 classes of 20 examples
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.sources.classes import DigitsData, TfdsClasses
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.few_shot import FewShotConfig, Maml
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_VARIANTS = ("", "5shot", "20way", "first_order", "meta_sgd", "anil", "omniglot", "digits")


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, _VARIANTS)
  many = variant == "20way"
  shots = 5 if variant == "5shot" else 1
  task = FewShotConfig(
    episodes=ClassEpisodeConfig(
      ways=20 if many else 5, shots=shots, queries=3 if many else 5, batch=5 if many else 16
    ),
    method=Maml(
      steps=1,
      evaluate_steps=3,
      rate=0.4,
      learned="element" if variant == "meta_sgd" else "no",
      parameters=("head",) if variant == "anil" else ("*",),
      first_order=variant == "first_order",
    ),
  )
  if variant == "omniglot":
    task = dataclasses.replace(task, data=TfdsClasses("omniglot"))
  if variant == "digits":
    few = dataclasses.replace(task.episodes, ways=2)
    task = dataclasses.replace(task, data=DigitsData(), episodes=few)
  return Experiment(
    name="few-shot classification by MAML",
    task=task,
    model=ConvNetConfig(halve="stride"),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20),
    phases=(Phase(steps=10_000 if many else 1500),),
    evaluate_every=250,
    evaluate_sentences=100,
    watch_sentences=0,
    time_limit_minutes=0 if many else 9,
  )
