"""Meta-learning for compositionality on SCAN (Lake & Baroni 2023): study pairs say what words mean.

Run:      python -m train.main --config configs/mlc.py:addprim_jump
Variants: simple, length, addprim_jump, addprim_turn_left, template_right,
          template_opposite_right, template_around_right, template_jump_around_right,
          mcd1, mcd2, mcd3
                     SCAN's splits: training queries have permuted meanings, test queries true ones
          addprim_jump_exchanged, template_around_right_exchanged
                     primitives exchange their places in training commands besides
Sizes:    those of the paper, 3 + 3 layers of width 128 with 8 heads; query and study pairs are one
          sequence
"""

from typing import get_args

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.mlc import MlcData
from compmod_jax.data.synthetic.scan import ScanData, SplitName
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

# Variant -> split, and whether words are exchanged.
_DATA: dict[str, tuple[SplitName, bool]] = {
  **{split: (split, False) for split in get_args(SplitName)},
  "addprim_jump_exchanged": ("addprim_jump", True),
  "template_around_right_exchanged": ("template_around_right", True),
}


def get_config(variant: str) -> Experiment:
  variant = variant or "addprim_jump"
  errors.check_choice("variant", variant, _DATA)
  split, exchange = _DATA[variant]
  return Experiment(
    name=f"MLC on SCAN, {variant.replace('_', ' ')}",
    task=TranslationConfig(
      data=MlcData(ScanData(split), exchange_words=exchange),
      tokenizer=TokenizerConfig(kind="words"),
      target_tokenizer=TokenizerConfig(kind="words"),
      batch=BatchConfig(tokens=8192, ceiling=160, bucket_count=4, own_lengths=True),
      label_smoothing=0.0,
      # With its study pairs, a query has at least 25 words; actions are at most 48.
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=32),
    ),
    model=TransformerConfig(
      encoder_layers=3,
      decoder_layers=3,
      dim=128,
      heads=8,
      ffn_dim=512,
      norm="pre",
      activation="gelu",
      dropout=0.1,
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=3000),),
    evaluate_every=1000,
    evaluate_sentences=500,
    ema=0.99,
  )
