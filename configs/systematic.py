"""Expressions and sequences, tested deeper and longer than they are trained.

Run:      python -m train.main --config configs/systematic.py --workdir runs/systematic
Variants: table_lookup          tables of three bits, composed; the first one applied stands last
          table_lookup_forward  the same, the first one applied stands first
          arithmetic            sums and products modulo 10, nested
          list_operations       least, largest, middle and sum of nested lists
          copy, reverse, addition, parity, sorting
                                sequences up to 20 symbols, tested up to 60
          (none)                table_lookup
Steps:    8,000 of 1,024 tokens (2,048 for arithmetic and lists), cut after 9 minutes; for tables
          5,000 of 2,048, at a lower learning rate, without which the networks that can learn them
          stay at chance
Data:     made by the project; `compmod_jax/data/synthetic/expressions.py` and `lengths.py` say
          which parts there are. Every part is scored by exact match at the end.
"""

import typing

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.expressions import ArithmeticData, ListOpsData, TableLookupData
from compmod_jax.data.synthetic.lengths import LengthData, LengthTask
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_LENGTHS = typing.get_args(LengthTask)
_DATA = {
  "table_lookup": TableLookupData(),
  "table_lookup_forward": TableLookupData(backward=False),
  "arithmetic": ArithmeticData(),
  "list_operations": ListOpsData(),
  **{task: LengthData(task=task) for task in _LENGTHS},
}


def get_config(variant: str) -> Experiment:
  variant = variant or "table_lookup"
  errors.check_choice("variant", variant, tuple(_DATA))
  tables = variant.startswith("table_lookup")
  steps = 5000 if tables else 8000
  return Experiment(
    name=f"systematic generalisation: {variant.replace('_', ' ')}",
    task=TranslationConfig(
      data=_DATA[variant],
      tokenizer=TokenizerConfig(kind="words"),
      target_tokenizer=TokenizerConfig(kind="words"),
      batch=BatchConfig(
        tokens=1024 if variant in _LENGTHS else 2048, ceiling=128, bucket_count=4, own_lengths=True
      ),
      label_smoothing=0.0,
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=4),
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
    ),
    optimizer=OptimizerConfig(
      learning_rate=3e-4 if tables else 2e-3,
      schedule="cosine",
      warmup_steps=200,
      b2=0.98,
      clip=1.0,
    ),
    phases=(Phase(steps=steps),),
    evaluate_every=steps // 4,
    evaluate_sentences=500,
    ema=0.99,
    time_limit_minutes=90 if tables else 9,
  )
