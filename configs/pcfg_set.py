"""String edits to the strings that they give (PCFG SET, Hupkes et al. 2020).

Run:      python -m train.main --config configs/pcfg_set.py:productivity --workdir runs/pcfg_set
Variants: iid            test sentences as those of training
          systematicity  four pairs of functions stand next to each other in the test alone
          productivity   test sentences have more than eight functions
          (none)         iid
Data:     made by the project. The published files: add --config.task.data.folder=PATH, and raise
          --config.task.batch.ceiling, --config.model.max_length and
          --config.task.decode.max_extra to their longest string.
"""

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.pcfg_set import PcfgSetData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

_DATA = {
  "iid": PcfgSetData(),
  "systematicity": PcfgSetData(split="systematicity"),
  "productivity": PcfgSetData(split="productivity"),
}


def get_config(variant: str) -> Experiment:
  variant = variant or "iid"
  errors.check_choice("variant", variant, _DATA)
  data = _DATA[variant]
  length = data.longest + 1  # with the end of the sentence
  return Experiment(
    name=f"PCFG SET, {variant} split",
    task=TranslationConfig(
      data=data,
      tokenizer=TokenizerConfig(kind="words"),
      target_tokenizer=TokenizerConfig(kind="words"),
      batch=BatchConfig(tokens=4096, ceiling=length, bucket_count=6, own_lengths=True),
      label_smoothing=0.0,
      # `repeat` doubles a string: the shortest sentences may have the longest ones.
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=data.longest),
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
      max_length=length,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=3000),),
    evaluate_every=1000,
    evaluate_sentences=500,
    ema=0.99,
  )
