"""English sentences to logical forms (COGS, Kim & Linzen 2020).

Run:      python -m train.main --config configs/cogs.py:held_out --workdir runs/cogs
Variants: published      train.tsv, dev.tsv, test.tsv and gen.tsv in $COMPMOD_DATA/cogs
          exposures_100  train_100.tsv in place of train.tsv
          held_out       without gen.tsv: nouns in new roles and deeper recursion are kept from
                         training, and scored by category
          (none)         published
Data:     another folder: add --config.task.data.folder=PATH
"""

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.cogs import CogsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_FOLDER = "$COMPMOD_DATA/cogs"
_LENGTH = 512  # longer than any published form: those of gen have up to 480 words (Csordas 2021)
_DATA = {
  "published": CogsData(folder=_FOLDER),
  "exposures_100": CogsData(folder=_FOLDER, exposures=100),
  "held_out": CogsData(folder=_FOLDER, gen="held_out"),
}


def get_config(variant: str) -> Experiment:
  variant = variant or "published"
  errors.check_choice("variant", variant, _DATA)
  return Experiment(
    name=f"COGS, {variant.replace('_', ' ')}",
    task=TranslationConfig(
      data=_DATA[variant],
      tokenizer=TokenizerConfig(kind="words"),
      target_tokenizer=TokenizerConfig(kind="words"),
      batch=BatchConfig(tokens=4096, ceiling=_LENGTH, bucket_count=6, own_lengths=True),
      label_smoothing=0.0,
      # Recursion adds eight words of the form for every word of the sentence.
      decode=DecodeConfig(method="greedy", max_ratio=10.0, max_extra=16),
    ),
    model=TransformerConfig(
      encoder_layers=2,
      decoder_layers=2,
      dim=128,
      heads=4,
      ffn_dim=256,
      norm="pre",
      dropout=0.1,
      compete=("encoder_self",),
      max_length=_LENGTH,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=3000),),
    evaluate_every=1000,
    evaluate_sentences=500,
    ema=0.99,
  )
