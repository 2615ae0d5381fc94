"""Translates with a small Transformer whose attention heads compete for every token.

Run: compmod train --config translate.py --workdir runs/first

Sizes are for the ten sentences of `data`; README.md says what to change for more.
"""

from compmod_jax.core.errors import check_choice
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  """The experiment that `--config translate.py` names; `translate.py:plain` has no competition."""
  check_choice("variant", variant, ("", "plain"))
  return Experiment(
    name="first model",
    task=TranslationConfig(
      data=TextData(folder="data", pattern="{split}.tsv", tests=()),
      tokenizer=TokenizerConfig(kind="words", vocab_size=1000),
      batch=BatchConfig(tokens=512, ceiling=32, bucket_count=1),
      decode=DecodeConfig(beams=4),
    ),
    model=TransformerConfig(
      encoder_layers=1,
      decoder_layers=1,
      dim=64,
      heads=4,
      ffn_dim=128,
      norm="pre",
      max_length=64,
      dropout=0.0,
      compete=() if variant == "plain" else ("encoder_self", "cross"),
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=20, clip=1.0),
    phases=(Phase(steps=300),),
    evaluate_every=100,
    time_limit_minutes=5,
  )
