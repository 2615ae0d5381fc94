"""Few-shot classification of generated characters by prototypical networks (Snell et al. 2017).

A class is the mean of the features of its support; a query belongs to the nearest mean. Training
episodes have more classes than those that are scored, as there.

Run:      python -m train.main --config configs/few_shot_prototypes.py --workdir runs/prototypes
Variants: (none)     20-way 1-shot training, scored 5-way and 20-way 1-shot
          5shot      the same with 5 examples of a class
          matching   cosine attention in place of prototypes (Vinyals et al. 2016)
          omniglot   Omniglot in place of generated characters, through TensorFlow Datasets
          digits     2-way on handwritten digits in $COMPMOD_DATA/digits, 4 of them for training
Data:     the project's own characters: 50 alphabets, 1,623 classes of 20 examples
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.sources.classes import DigitsData, TfdsClasses
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.few_shot import FewShotConfig, Matching, Prototypes
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, ("", "5shot", "matching", "omniglot", "digits"))
  task = FewShotConfig(
    episodes=ClassEpisodeConfig(ways=5, shots=5 if variant == "5shot" else 1, queries=5, batch=4),
    method=Matching() if variant == "matching" else Prototypes(),
    train_ways=20,
    also_ways=(20,),
  )
  if variant == "omniglot":
    task = dataclasses.replace(task, data=TfdsClasses("omniglot"))
  if variant == "digits":
    few = dataclasses.replace(task.episodes, ways=2)
    task = dataclasses.replace(task, data=DigitsData(), episodes=few, train_ways=4, also_ways=(3,))
  return Experiment(
    name="few-shot classification by prototypes",
    task=task,
    model=ConvNetConfig(halve="stride"),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20),
    phases=(Phase(steps=1000),),
    evaluate_every=250,
    evaluate_sentences=100,
    watch_sentences=0,
    time_limit_minutes=9,
  )
