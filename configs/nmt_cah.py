"""German to English with competitive attention heads (Kolios 2023, section 5.3.2).

Run:      python -m train.main --config configs/nmt_cah.py
Variants: (none)      the project's own grammar, 5 minutes on 2 CPU cores
          tatoeba     $COMPMOD_DATA/tatoeba_en_de, an hour on 2 CPU cores
          speedrun    the same in 3,600 steps of Muon, a quarter of an hour; docs/speedrun.md
          multi30k    $COMPMOD_DATA/multi30k
          iwslt14     data/iwslt14, the thesis's model and recipe (a GPU)
          wmt14       wmt14_translate/de-en from TensorFlow Datasets, the same model
Ways:     NAME-joint, NAME-sequential, NAME-iterative, such as grammar-iterative: 15 epochs in each
          of the thesis's training regimes (section 5.4, Table 5.4); the grammar with 15,000 pairs
Meta:     NAME-meta, a fourth way (section 6.2): routers learn on the small part of the data,
          through a step of the rest on the large part; NAME-meta-experts: those of 4 expert
          networks in each encoder layer. On the grammar 3 epochs, or what 8 minutes have
Plain:    add --config.model.compete (nothing after it): no heads compete
Measured: tatoeba, test BLEU 50.2 (plain 50.1; seed 0, 57 and 47 minutes of training on two cores of
          a shared AMD EPYC machine, 2026-11-21); speedrun, 50.6 (mean of 3 seeds; 15 to 18
          minutes, nothing beside it, 2026-11-27)
"""

import dataclasses
from collections.abc import Callable

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.sources.tfds import TfdsData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.bilevel import BilevelConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig
from compmod_jax.training.regimes import REGIMES


def get_config(variant: str) -> Experiment:
  variants = {
    "grammar": grammar,
    "tatoeba": tatoeba,
    "multi30k": multi30k,
    "iwslt14": iwslt14,
    "wmt14": wmt14,
  }
  regimes = {f"{name}-{regime}": (name, regime) for name in variants for regime in REGIMES}
  learned = {f"{name}-{kind}": (name, kind) for name in variants for kind in META}
  errors.check_choice("variant", variant, {"", "speedrun", *variants, *regimes, *learned})
  if variant == "speedrun":
    return speedrun()
  if variant in regimes:
    name, regime = regimes[variant]
    return trained(variants[name](), regime)
  if variant in learned:
    name, kind = learned[variant]
    return meta(META[kind](variants[name]()))
  return variants[variant or "grammar"]()


def trained(base: Experiment, regime: str, epochs: int = 15) -> Experiment:
  """An experiment in one of the training regimes, evaluated at the end of every epoch."""
  task = base.task
  if isinstance(task.data, GrammarData):
    task = dataclasses.replace(task, data=GrammarData(train=15_000))
  # A rate that ends at 0 would leave nothing for the routers, which train last.
  optimizer = dataclasses.replace(base.optimizer, schedule="inverse_sqrt")
  return dataclasses.replace(
    base,
    name=f"{base.name}, {regime} training",
    task=task,
    optimizer=optimizer,
    phases=REGIMES[regime](epochs),
    evaluate_every=0,
    score_train=True,
    time_limit_minutes=0,
  )


def meta(base: Experiment) -> Experiment:
  """Routers are meta-parameters: they learn by what the rest makes of them."""
  generated = isinstance(base.task.data, GrammarData)
  epochs = 3 if generated else 15
  given = trained(base, "joint", epochs)
  return dataclasses.replace(
    given,
    name=f"{base.name}, meta-learned routers",
    task=dataclasses.replace(given.task, bilevel=BilevelConfig()),
    phases=(Phase("meta", epochs=epochs),),
    time_limit_minutes=8 if generated else 0,
  )


def with_experts(base: Experiment) -> Experiment:
  """Expert networks compete in the encoder in place of heads."""
  model = dataclasses.replace(
    base.model,
    compete=(),
    expert_layers=("encoder",),
    experts=ExpertsConfig(count=4, matched=True),
  )
  return dataclasses.replace(base, name=base.name.replace("heads", "experts"), model=model)


META: dict[str, Callable[[Experiment], Experiment]] = {
  "meta": lambda base: base,
  "meta-experts": with_experts,
}


def grammar() -> Experiment:
  return Experiment(
    name="competitive heads on the grammar",
    task=TranslationConfig(
      data=GrammarData(train=100_000),
      tokenizer=TokenizerConfig(vocab_size=3000),
      target_tokenizer=TokenizerConfig(vocab_size=1200),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=4),
    ),
    model=TransformerConfig(
      encoder_layers=2,
      decoder_layers=2,
      dim=128,
      heads=4,
      ffn_dim=512,
      norm="pre",
      dropout=0.05,
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(learning_rate=4e-3, schedule="cosine", warmup_steps=200, clip=1.0),
    phases=(Phase(steps=1900),),
    ema=0.98,
    evaluate_every=475,
    evaluate_sentences=200,
    time_limit_minutes=5,
  )


def tatoeba() -> Experiment:
  return Experiment(
    name="competitive heads on Tatoeba, German to English",
    task=TranslationConfig(
      data=TextData(folder="$COMPMOD_DATA/tatoeba_en_de", unseen=True),
      tokenizer=TokenizerConfig(vocab_size=6000),
      target_tokenizer=TokenizerConfig(vocab_size=4000),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=12, bucket_multiple=1),
    ),
    model=TransformerConfig(
      encoder_layers=4,
      decoder_layers=2,
      dim=224,
      heads=4,
      ffn_dim=896,
      norm="pre",
      dropout=0.1,
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=400, clip=1.0),
    phases=(Phase(steps=5200),),
    ema=0.99,
    evaluate_every=1300,
    evaluate_sentences=300,
    time_limit_minutes=57,
  )


def speedrun() -> Experiment:
  """For test BLEU 50 on Tatoeba in the least time on 2 CPU cores; see docs/speedrun.md."""
  base, steps = tatoeba(), 3600
  return dataclasses.replace(
    base,
    name="competitive heads on Tatoeba, in the least time",
    model=dataclasses.replace(base.model, dropout=0.05),
    optimizer=OptimizerConfig(
      name="muon",
      learning_rate=4e-3,
      schedule="cosine",
      warmup_steps=200,
      clip=1.0,
      newton_schulz_steps=3,
      preconditioning="aol",
    ),
    phases=(Phase(steps=steps),),
    products="bfloat16",
    evaluate_every=steps // 2,
    evaluate_sentences=200,
    model_selection="last",
    time_limit_minutes=25,
  )


def multi30k() -> Experiment:
  base = tatoeba()
  tests = ("test_2016_flickr", "test_2017_flickr")
  data = TextData(folder="$COMPMOD_DATA/multi30k", valid="val", tests=tests)
  task = dataclasses.replace(base.task, data=data)
  return dataclasses.replace(base, name="competitive heads on Multi30k", task=task)


def iwslt14() -> Experiment:
  """The recipe of Kolios 2023 (fairseq's for this data set), its 41 M parameters."""
  return Experiment(
    name="competitive heads on IWSLT14, German to English",
    task=TranslationConfig(
      data=TextData(folder="data/iwslt14", lowercase=True),
      tokenizer=TokenizerConfig(vocab_size=8848),
      target_tokenizer=TokenizerConfig(vocab_size=6632),
      batch=BatchConfig(tokens=4096, ceiling=175, bucket_count=8, bucket_multiple=8),
    ),
    model=TransformerConfig(compete=("encoder_self",)),
    optimizer=OptimizerConfig(weight_decay=1e-4),
    phases=(Phase(epochs=15),),
    evaluate_sentences=1000,
  )


def wmt14() -> Experiment:
  base = iwslt14()
  task = dataclasses.replace(
    base.task,
    data=TfdsData(name="wmt14_translate/de-en"),
    tokenizer=TokenizerConfig(vocab_size=32000),
    target_tokenizer=None,
    batch=BatchConfig(tokens=16384, ceiling=175, bucket_count=8, bucket_multiple=8),
  )
  return dataclasses.replace(
    base,
    name="competitive heads on WMT14, German to English",
    task=task,
    model=dataclasses.replace(base.model, share_embeddings="all", dropout=0.1),
    phases=(Phase(steps=100_000),),
    evaluate_every=5000,
  )
