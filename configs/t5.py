"""T5: text to text, trained on spans of words that are cut out of text (Raffel et al. 2020).

Run:      python -m train.main --config configs/t5.py --workdir runs/t5
Variants: (none)   texts of the grammar, ReLU and a tied output as T5's first version
          v1_1     the same; GEGLU and an output of its own, as version 1.1
          mixed    missing spans and translation from German, known by their prefixes
          text     $COMPMOD_DATA/lm_public_domain
          debug    a model and data so small that a run ends within a minute, and learns nothing
Heads:    add --config.model.compete encoder_self (decoder_self, cross): these heads compete
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.documents import GrammarTopics, TextDocuments
from compmod_jax.data.sources.text_to_text import (
  PrefixedData,
  SpanCorruptionData,
  TextToTextData,
  sentinels,
)
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.t5 import t5, t5_v1_1
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

SENTINELS = 20
SIZES = {
  "encoder_layers": 2,
  "decoder_layers": 2,
  "dim": 128,
  "heads": 4,
  "ffn_dim": 512,
  "max_length": 128,
  "dropout": 0.05,
  "attention_dropout": 0.0,
  "ffn_dropout": 0.0,
}


def get_config(variant: str) -> Experiment:
  variants = {"": spans, "v1_1": v1_1, "mixed": mixed, "text": text, "debug": debug}
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def corrupted() -> SpanCorruptionData:
  return SpanCorruptionData(
    data=GrammarTopics(GrammarData(train=60_000, valid=2000, test=2000)),
    sentinels=SENTINELS,
    draws=4,
  )


def spans() -> Experiment:
  return Experiment(
    name="T5 on spans of the grammar",
    task=TranslationConfig(
      data=corrupted(),
      tokenizer=TokenizerConfig(vocab_size=2000, special_tokens=sentinels(SENTINELS)),
      batch=BatchConfig(tokens=4096, ceiling=128, bucket_count=4),
      label_smoothing=0.0,
    ),
    model=t5(**SIZES),
    optimizer=OptimizerConfig(learning_rate=4e-3, schedule="cosine", warmup_steps=200, clip=1.0),
    phases=(Phase(steps=2000),),
    ema=0.98,
    evaluate_every=500,
    evaluate_sentences=100,
    time_limit_minutes=9,
  )


def v1_1() -> Experiment:
  base = spans()
  sizes = {
    **SIZES,
    "head_dim": None,
    "ffn_dim": 340,
  }  # as many parameters in three layers as in two
  return dataclasses.replace(
    base, name="T5 of version 1.1 on spans of the grammar", model=t5_v1_1(**sizes)
  )


def mixed() -> Experiment:
  base = spans()
  assert isinstance(base.task, TranslationConfig)
  fill = PrefixedData("fill", "fill:", corrupted())
  translate = PrefixedData("translate", "translate German to English:", GrammarData(train=60_000))
  data = TextToTextData((fill, translate), limit=60_000)
  task = dataclasses.replace(
    base.task, data=data, tokenizer=dataclasses.replace(base.task.tokenizer, vocab_size=4000)
  )
  return dataclasses.replace(base, name="T5 on spans and translation of the grammar", task=task)


def text() -> Experiment:
  base = spans()
  assert isinstance(base.task, TranslationConfig)
  data = SpanCorruptionData(
    data=TextDocuments(folder="$COMPMOD_DATA/lm_public_domain"), sentinels=SENTINELS
  )
  task = dataclasses.replace(
    base.task, data=data, tokenizer=dataclasses.replace(base.task.tokenizer, vocab_size=8000)
  )
  return dataclasses.replace(base, name="T5 on spans of public domain text", task=task)


def debug() -> Experiment:
  base = spans()
  grammar = GrammarData(train=400, valid=40, test=40, shifted=40)
  fill = SpanCorruptionData(data=GrammarTopics(grammar, sentences=2), sentinels=SENTINELS)
  data = TextToTextData(
    (PrefixedData("fill", "fill:", fill), PrefixedData("translate", "translate:", grammar))
  )
  task = dataclasses.replace(
    base.task,
    data=data,
    tokenizer=TokenizerConfig(vocab_size=400, special_tokens=sentinels(SENTINELS)),
    batch=BatchConfig(tokens=1024, ceiling=128, bucket_count=1),
    decode=DecodeConfig(beams=2, max_ratio=0.5, max_extra=4),
  )
  sizes = {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "dim": 16, "heads": 2, "ffn_dim": 16}
  return dataclasses.replace(
    base,
    name="a tiny T5",
    task=task,
    model=t5(**sizes),
    phases=(Phase(steps=20),),
    evaluate_every=10,
    evaluate_sentences=4,
  )
