"""BERT: masked tokens and the next sentence, learned together (Devlin et al. 2019).

Run:      python -m train.main --config configs/bert.py --workdir runs/bert
Variants: (none)   documents of the grammar, each about one topic: needs no data
          text     $COMPMOD_DATA/lm_public_domain
          base     BERT base and its recipe, your text in data/text (a GPU or TPU)
          debug    a model and data so small that a run ends within a minute, and learns nothing
Heads:    add --config.model.compete encoder_self: heads compete
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.sources.documents import GrammarTopics, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {"": grammar, "text": text, "base": base, "debug": debug}
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def grammar() -> Experiment:
  return Experiment(
    name="BERT on the grammar",
    task=MaskedLMConfig(
      data=GrammarTopics(GrammarData(train=60_000, valid=2000, test=2000)),
      tokenizer=TokenizerConfig(vocab_size=1200),
      length=64,
      batch_tokens=2048,
      next_sentence=True,
    ),
    model=EncoderConfig(
      encoder_layers=4,
      dim=128,
      heads=4,
      ffn_dim=512,
      max_length=64,
      segments=2,
      next_sentence=True,
      sinusoids_first=True,
      dropout=0.0,
      attention_dropout=0.0,
    ),
    optimizer=OptimizerConfig(
      learning_rate=5e-4, schedule="cosine", warmup_steps=400, b2=0.98, clip=1.0, weight_decay=0.01
    ),
    phases=(Phase(steps=3000),),
    ema=0.99,
    evaluate_every=500,
    evaluate_sentences=20,
    time_limit_minutes=9,
  )


def text() -> Experiment:
  base = grammar()
  task = dataclasses.replace(
    base.task,
    data=TextDocuments(folder="$COMPMOD_DATA/lm_public_domain"),
    tokenizer=TokenizerConfig(vocab_size=2000),
  )
  return dataclasses.replace(base, name="BERT on public domain text", task=task)


def base() -> Experiment:
  """The sizes and the recipe of Devlin et al. 2019, appendix A.2, at 512 tokens from the start."""
  given = grammar()
  task = dataclasses.replace(
    given.task,
    data=TextDocuments(folder="data/text"),
    tokenizer=TokenizerConfig(vocab_size=30_000, lowercase=True, character_coverage=0.9995),
    length=512,
    batch_tokens=256 * 512,
  )
  return dataclasses.replace(
    given,
    name="BERT base",
    task=task,
    model=EncoderConfig(segments=2, next_sentence=True, norm_epsilon=1e-12, dtype="bfloat16"),
    optimizer=OptimizerConfig(
      learning_rate=1e-4, schedule="linear", warmup_steps=10_000, b2=0.999, weight_decay=0.01
    ),
    phases=(Phase(steps=1_000_000),),
    ema=0.0,
    micro_batches=8,
    evaluate_every=10_000,
    time_limit_minutes=0,
  )


def debug() -> Experiment:
  given = grammar()
  task = dataclasses.replace(
    given.task,
    data=GrammarTopics(GrammarData(train=600, valid=200, test=200), sentences=3),
    tokenizer=TokenizerConfig(vocab_size=300),
    batch_tokens=512,
  )
  model = dataclasses.replace(given.model, encoder_layers=1, dim=16, heads=2, ffn_dim=16)
  return dataclasses.replace(
    given, name="a tiny BERT", task=task, model=model, phases=(Phase(steps=20),), evaluate_every=10
  )
