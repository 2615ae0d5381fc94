"""German to English by a decoder alone: it reads the German sentence and goes on in English.

Run:      python -m train.main --config configs/nmt_decoder.py --workdir runs/nmt_decoder
Variants: (none)     the project's own grammar, minutes on 2 CPU cores
          compete    the same; the heads of all layers compete
          tatoeba    $COMPMOD_DATA/tatoeba_en_de
          debug      a model and data so small that a run ends within a minute, and learns nothing
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {"": grammar, "compete": compete, "tatoeba": tatoeba, "debug": debug}
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def grammar() -> Experiment:
  return Experiment(
    name="a decoder that translates, on the grammar",
    task=TranslationConfig(
      data=GrammarData(train=100_000),
      tokenizer=TokenizerConfig(vocab_size=3000),  # one for both languages
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=4, own_lengths=True),
    ),
    model=DecoderConfig(
      decoder_layers=4,
      dim=128,
      heads=4,
      ffn_dim=256,
      activation="relu",
      positions="rotary",
      scale_embeddings=True,
      max_length=128,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=2500),),
    ema=0.98,
    evaluate_every=500,
    evaluate_sentences=200,
    time_limit_minutes=10,
  )


def compete() -> Experiment:
  base = grammar()
  model = dataclasses.replace(base.model, compete=("decoder_self",), ffn_dim=176)
  return dataclasses.replace(
    base, name="a decoder whose heads compete, on the grammar", model=model
  )


def tatoeba() -> Experiment:
  base = grammar()
  return dataclasses.replace(
    base,
    name="a decoder that translates Tatoeba, German to English",
    task=TranslationConfig(
      data=TextData(folder="$COMPMOD_DATA/tatoeba_en_de", unseen=True),
      tokenizer=TokenizerConfig(vocab_size=8000),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=12, bucket_multiple=1),
    ),
    model=dataclasses.replace(base.model, dim=256, ffn_dim=1024),
    phases=(Phase(steps=5200),),
    ema=0.99,
    evaluate_every=1300,
    evaluate_sentences=300,
    time_limit_minutes=57,
  )


def debug() -> Experiment:
  base = grammar()
  return dataclasses.replace(
    base,
    name="a tiny decoder that translates",
    task=TranslationConfig(
      data=GrammarData(train=300, valid=40, test=20, shifted=10),
      tokenizer=TokenizerConfig(vocab_size=600),
      batch=BatchConfig(tokens=512, ceiling=64, bucket_count=1),
      decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=2),
    ),
    model=dataclasses.replace(base.model, decoder_layers=1, dim=16, heads=2, ffn_dim=16),
    phases=(Phase(steps=20),),
    evaluate_every=10,
    evaluate_sentences=4,
  )
