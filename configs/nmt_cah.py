"""German to English with competitive attention heads (Kolios 2023, section 5.3.2).

Run:      python -m train.main --config configs/nmt_cah.py
"""

from compmod_jax.data.grammar import GrammarData
from compmod_jax.data.tokenizer import TokenizerConfig
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from train.experiment import Experiment, Phase
from train.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  return Experiment(
    name="nmt_cah on the grammar",
    task=TranslationConfig(
      data=GrammarData(),
      tokenizer=TokenizerConfig(kind="bpe", vocab_size=1500),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=4),
    ),
    model=TransformerConfig(
      encoder_layers=3,
      decoder_layers=3,
      dim=192,
      heads=4,
      ffn_dim=512,
      norm="pre",
      dropout=0.1,
      share_embeddings="all",
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=200),
    phases=(Phase(steps=1500),),
  )
