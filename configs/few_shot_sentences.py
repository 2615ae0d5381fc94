"""Few-shot classification of sentences by hidden properties: LEOPARD and what it is compared with.

A property of a sentence, such as the tense of its main clause, is hidden in eight examples of each
of its values; those of meta-training, validation and test are different ones (Bansal et al. 2020;
Kolios 2023, section 4.8.8). All variants start from the encoder that `fine_tune` trains, a masked
language model.

Run:      python -m train.main --config configs/few_shot_sentences.py:fine_tune \\
            --workdir runs/sentence_encoder
          python -m train.main --config configs/few_shot_sentences.py --workdir runs/leopard
Variants: (none)      LEOPARD: a generated softmax layer, adapted on the second half of a support;
                      evaluation fine-tunes it further on the whole support
          first_order  the same
          second_order with second derivatives
          mixed       episodes of two to four classes, scored on three and four, too
          black_box   a network of the support conditions the predictor
          prototypes  the nearest mean of a class's features (Snell et al. 2017)
          maml        a step of gradient descent from learned parameters (Finn et al. 2017)
          fine_tune   no meta-learning: the masked language model, fine-tuned on every support
          questions_fine_tune, questions   fine_tune and LEOPARD on questions by the set that they
                      are from, in $COMPMOD_DATA/qa; the second from runs/question_encoder
          debug       LEOPARD on few sentences from fresh parameters, in seconds
Data:     English sentences of the project's own grammar; texts of your own with `TextLines` as
          `data` (docs/leopard.md)
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.text_classes import QuestionsBySet, SentenceData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.few_shot import BlackBox, FineTune, Leopard, Maml, Method, Prototypes
from compmod_jax.tasks.few_shot_text import FewShotTextConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig, ParamGroup

# The layers of the encoder adapt, its embeddings do not.
_LAYERS = ("encoder_*", "output_norm")
# What fine-tuning and LEOPARD choose from on validation properties.
_TUNED = FineTune(rates=(3e-4, 1e-3, 3e-3), steps=(5, 10, 20), choose_on=60)
_LEOPARD = Leopard(parameters=_LAYERS, first_order=True, tuned=_TUNED)
_METHODS: dict[str, Method] = {
  "": _LEOPARD,
  "first_order": _LEOPARD,
  "second_order": dataclasses.replace(_LEOPARD, first_order=False),
  "mixed": _LEOPARD,
  "black_box": BlackBox(),
  "prototypes": Prototypes(),
  "maml": Maml(steps=1, evaluate_steps=3, rate=0.1, learned="parameter"),
  "fine_tune": _TUNED,
  "questions": _LEOPARD,
  "questions_fine_tune": _TUNED,
  "debug": Leopard(
    parameters=_LAYERS, dim=16, hidden=16, tuned=FineTune(rates=(1e-3,), steps=(1,), choose_on=2)
  ),
}


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, _METHODS)
  mixed = variant == "mixed"
  task = FewShotTextConfig(
    data=SentenceData(),
    length=22,
    episodes=ClassEpisodeConfig(ways=2, shots=8, queries=8, batch=8),
    method=_METHODS[variant],
    mixed_ways=(2, 3, 4) if mixed else (),
    also_ways=(3, 4) if mixed else (),
    also_shots=(4, 16),
    evaluate_episodes=200,
  )
  questions = variant.startswith("questions")
  if questions:
    task = dataclasses.replace(
      task, data=QuestionsBySet(), tokenizer=TokenizerConfig(vocab_size=4000), length=32
    )
  experiment = Experiment(
    name=f"few-shot classification of sentences, {variant or 'leopard'}",
    task=task,
    model=EncoderConfig(
      encoder_layers=2,
      dim=64,
      heads=4,
      ffn_dim=256,
      max_length=32,
      norm="pre",
      sinusoids_first=True,
      dropout=0.0,
      attention_dropout=0.0,
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3, schedule="cosine", warmup_steps=50, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=1000),),
    start="runs/question_encoder" if questions else "runs/sentence_encoder",
    evaluate_every=250,
    evaluate_sentences=100,
    watch_sentences=0,
    time_limit_minutes=9,
  )
  if variant.endswith("fine_tune"):
    rate = dataclasses.replace(experiment.optimizer, learning_rate=3e-3, warmup_steps=200)
    return dataclasses.replace(
      experiment,
      optimizer=rate,
      phases=(Phase(steps=2500),),
      start="",
      evaluate_every=1250,
      evaluate_sentences=20,
    )
  if isinstance(task.method, Leopard):
    # A low rate for the encoder, which would forget what meta-training does not use.
    rate = OptimizerConfig(learning_rate=6e-4, schedule="cosine", warmup_steps=50, b2=0.98)
    experiment = dataclasses.replace(
      experiment,
      optimizer=dataclasses.replace(experiment.optimizer, learning_rate=2e-3),
      groups=(ParamGroup("encoder", ("embedding", "positions", *_LAYERS), rate),),
      phases=(Phase(steps=300),),
      evaluate_every=300,
      evaluate_sentences=20,
    )
  if variant == "debug":
    few = ("adjectives", "construction", "length", "nouns", "preposition", "subject form")
    data = SentenceData(sentences=2000, examples=20, train=few)
    small = ClassEpisodeConfig(ways=2, shots=4, queries=4, batch=2)
    task = dataclasses.replace(task, data=data, episodes=small, also_shots=(), evaluate_episodes=10)
    return dataclasses.replace(
      experiment, task=task, phases=(Phase(steps=4),), start="", evaluate_every=2
    )
  return experiment
