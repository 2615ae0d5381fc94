"""SCAN as questions and answers, for NeMoT with and without its gate (Knowles 2022, chapter 3).

Run:      python -m train.main --config configs/nemot_scan.py --workdir runs/nemot_scan
Variants: (none)         commands of up to 22 actions in training, longer ones in the test
          addprim_jump, template_around_right, simple
                         other splits of `configs/scan.py`
Baseline: NAME-decoder: a decoder shaped as GPT-2 with as many parameters;
          --config.model.gate=off: the same model without its gate
Scores:   `extractive_exact_match` is the share of outputs that are right as a whole
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.pairs import PairQuestions
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS
from compmod_jax.data.synthetic.scan import ScanData, SplitName
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.matching_decoder import matching_decoder
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_SPLITS: tuple[SplitName, ...] = ("length", "addprim_jump", "template_around_right", "simple")
_WORDS = 34  # command words, actions and special tokens: the vocabulary of a matching decoder


def get_config(variant: str) -> Experiment:
  name = variant.removesuffix("-decoder") or "length"
  errors.check_choice("variant", name, _SPLITS)
  made = nemot(next(split for split in _SPLITS if split == name))
  if not variant.endswith("-decoder"):
    return made
  assert isinstance(made.model, NemotConfig)
  model = matching_decoder(made.model, _WORDS)
  return dataclasses.replace(made, name=f"{made.name}, a plain decoder", model=model)


def nemot(split: SplitName) -> Experiment:
  return Experiment(
    name=f"NeMoT on SCAN, {split} split",
    task=AnsweringConfig(
      data=Mixed(seeds=(PairQuestions("scan", ScanData(split=split)),)),
      tokenizer=TokenizerConfig(kind="words", special_tokens=TRAINED_TOKENS),
      length=64,
      answer_length=52,
      batch_questions=192,
      buckets=4,
    ),
    model=NemotConfig(
      tasks=("gqa",),
      vanilla_layers=2,
      modulatory_layers=1,
      output_layers=1,
      dim=128,
      heads=4,
      ffn_dim=256,
      max_length=64,
      dropout=0.1,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=3000),),
    evaluate_every=1000,
    evaluate_sentences=500,
    ema=0.99,
  )
