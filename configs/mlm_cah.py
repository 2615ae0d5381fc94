"""Masked language modelling with competitive heads (RoBERTa; Kolios 2023, section 5.4).

Run:      python -m train.main --config configs/mlm_cah.py --workdir runs/mlm_cah
Variants: (none)         public_domain where COMPMOD_DATA is set, else grammar
          public_domain  $COMPMOD_DATA/lm_public_domain: 10 minutes on a CPU core
          grammar        English sentences of the project's own grammar: needs no data, 5 minutes
          c4             $COMPMOD_DATA/c4_sample, or your files of C4
          base           RoBERTa base and its recipe, your text in data/text (a GPU or TPU)
          billion        1.2 billion parameters, most of them in experts (TPUs; docs/pods-aot.md)
          wikipedia      base, wiki40b/en from TensorFlow Datasets, 7 epochs as in the thesis
Plain:    add --config.model.compete (nothing after it): no heads compete
"""

import dataclasses
import os

from compmod_jax.core import errors
from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments, TfdsDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {
    "": public_domain if os.environ.get("COMPMOD_DATA") else grammar,
    "public_domain": public_domain,
    "grammar": grammar,
    "c4": c4,
    "base": base,
    "billion": billion,
    "wikipedia": wikipedia,
  }
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def public_domain() -> Experiment:
  return Experiment(
    name="masked language model with competitive heads on public domain text",
    task=MaskedLMConfig(
      data=TextDocuments(folder="$COMPMOD_DATA/lm_public_domain"),
      tokenizer=TokenizerConfig(vocab_size=2000),
      length=64,
      batch_tokens=2048,
    ),
    model=EncoderConfig(
      encoder_layers=4,
      dim=128,
      heads=4,
      ffn_dim=512,
      max_length=64,
      sinusoids_first=True,
      norm="pre",
      dropout=0.0,
      attention_dropout=0.0,
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(
      learning_rate=1e-3, schedule="cosine", warmup_steps=400, b2=0.98, clip=1.0, weight_decay=0.01
    ),
    phases=(Phase(steps=2000),),
    ema=0.99,
    evaluate_every=1000,
    evaluate_sentences=20,
    time_limit_minutes=20,
  )


def grammar() -> Experiment:
  base = public_domain()
  task = dataclasses.replace(
    base.task,
    data=GrammarDocuments(GrammarData(train=50_000)),
    tokenizer=TokenizerConfig(vocab_size=1200),
  )
  return dataclasses.replace(
    base,
    name="masked language model with competitive heads on the grammar",
    task=task,
    phases=(Phase(steps=2500),),
    evaluate_every=500,
    time_limit_minutes=5,
  )


def c4() -> Experiment:
  base = public_domain()
  data = TextDocuments(
    folder="$COMPMOD_DATA/c4_sample", train=("*train*",), valid=("*validation*",)
  )
  task = dataclasses.replace(base.task, data=data, tokenizer=TokenizerConfig(vocab_size=8000))
  return dataclasses.replace(
    base,
    name="masked language model with competitive heads on C4",
    task=task,
    phases=(Phase(steps=10_000),),
  )


def base() -> Experiment:
  """RoBERTa base (Liu et al. 2019) as fairseq trains it: a million tokens a batch."""
  return Experiment(
    name="RoBERTa base with competitive heads",
    task=MaskedLMConfig(
      data=TextDocuments(folder="data/text"),
      tokenizer=TokenizerConfig(vocab_size=50_000, character_coverage=0.9995),
      length=512,
      batch_tokens=2048 * 512,
    ),
    model=EncoderConfig(compete=("encoder_self",), dtype="bfloat16"),
    optimizer=OptimizerConfig(
      learning_rate=5e-4,
      schedule="linear",
      warmup_steps=10_000,
      b2=0.98,
      eps=1e-6,
      weight_decay=0.01,
    ),
    phases=(Phase(steps=125_000),),
    micro_batches=64,
    evaluate_every=5000,
    evaluate_sentences=20,
  )


def billion() -> Experiment:
  """Eight layers with sixteen experts each, of which two see a token; recipe and data of base."""
  given = base()
  experts = ExpertsConfig(
    count=16, competition=CompetitionConfig(rule="top_k", keep=2, balance=0.01, z=0.001)
  )
  model = EncoderConfig(
    encoder_layers=8,
    dim=1024,
    heads=16,
    ffn_dim=4096,
    compete=("encoder_self",),
    expert_layers=("encoder",),
    experts=experts,
    dtype="bfloat16",
  )
  return dataclasses.replace(
    given, name="masked language model of a billion parameters with competing experts", model=model
  )


def wikipedia() -> Experiment:
  given = base()
  return dataclasses.replace(
    given,
    name="RoBERTa base with competitive heads on Wikipedia",
    task=dataclasses.replace(given.task, data=TfdsDocuments(name="wiki40b/en")),
    phases=(Phase(epochs=7),),
  )
