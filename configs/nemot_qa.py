"""General question answering with a Neuromodulated Transformer (Knowles 2022, chapter 3.4).

Run:      python -m train.main --config configs/nemot_qa.py --workdir runs/nemot_qa
Variants: (none)  worlds: the project's own questions about small simulated worlds: needs no data,
                  half an hour on a CPU core
          general the sets of $COMPMOD_DATA/qa together, and others that are only scored: an hour
          paper   the thesis's model and recipe, on your files (GPUs)
Baseline: NAME-decoder: a decoder shaped as GPT-2 with as many parameters;
          --config.model.gate=off: the same model without its gate
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.qa.file_sets import DEVELOPMENT_SETS, QASet
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.synthetic.worlds import FEW_KINDS, WorldsData
from compmod_jax.models.matching_decoder import matching_decoder
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {"worlds": worlds, "general": general, "paper": paper}
  decoders = {f"{name}-decoder": name for name in variants}
  errors.check_choice("variant", variant, {"", *variants, *decoders})
  if variant in decoders:
    return decoder(variants[decoders[variant]]())
  return variants[variant or "worlds"]()


def decoder(given: Experiment) -> Experiment:
  """The same experiment with a decoder that has as many parameters."""
  assert isinstance(given.model, NemotConfig)
  assert isinstance(given.task, AnsweringConfig)
  model = matching_decoder(given.model, given.task.tokenizer.vocab_size)
  return dataclasses.replace(given, name=f"{given.name}, a plain decoder", model=model)


def worlds() -> Experiment:
  data = WorldsData(train=240_000, asked=6, words=8, kinds=FEW_KINDS, easy_options=0.5)
  return Experiment(
    name="NeMoT on worlds",
    task=AnsweringConfig(
      data=Mixed(seeds=(data,)),
      tokenizer=dataclasses.replace(AnsweringConfig().tokenizer, vocab_size=400),
      length=192,
      answer_length=24,
      batch_questions=8,
      turns=6,
      answer_mean="question",
    ),
    model=NemotConfig(
      tasks=("mqa", "gqa"),
      vanilla_layers=4,
      modulatory_layers=1,
      output_layers=1,
      dim=64,
      heads=2,
      ffn_dim=256,
      max_length=192,
      convolution=8,
      dropout=0.0,
    ),
    optimizer=OptimizerConfig(
      name="muon",
      learning_rate=2e-3,
      schedule="cosine",
      warmup_steps=200,
      clip=1.0,
      final_fraction=0.1,
    ),
    phases=(Phase(steps=20_000),),
    evaluate_every=2000,
    evaluate_sentences=480,
    time_limit_minutes=40,
  )


_DOMAINS = ("electronics", "grocery", "restaurants")


def general() -> Experiment:
  """One model for the sets below $COMPMOD_DATA, from scratch; a domain of reviews is left out."""
  seeds = ("race_middle", "mctest", "arc", "openbookqa", "fairytaleqa", "boolq")
  unseen = ("siqa", "piqa", "winogrande", "subjqa_tripadvisor")
  train, valid, test = (
    tuple(f"{domain}/{split}.csv.gz" for domain in _DOMAINS) for split in ("train", "dev", "test")
  )
  folder = "$COMPMOD_DATA/qa/subjqa"
  subjqa = QASet("subjqa", "subjqa", folder, train=train, valid=valid, test=test)
  base = worlds()
  assert isinstance(base.task, AnsweringConfig)
  task = dataclasses.replace(
    base.task,
    data=Mixed(
      seeds=(*(DEVELOPMENT_SETS[name] for name in seeds), subjqa),
      unseen=tuple(DEVELOPMENT_SETS[name] for name in unseen),
    ),
    tokenizer=dataclasses.replace(base.task.tokenizer, vocab_size=8000),
    length=256,
    answer_length=32,
    batch_questions=16,
    turns=1,
  )
  return dataclasses.replace(
    base,
    name="NeMoT for general question answering",
    task=task,
    model=dataclasses.replace(
      base.model, dim=192, heads=4, ffn_dim=768, max_length=256, dropout=0.1, convolution=1
    ),
    optimizer=dataclasses.replace(base.optimizer, name="adamw", learning_rate=1e-3),
    phases=(Phase(steps=6000),),
    evaluate_every=1000,
    evaluate_sentences=4000,
    time_limit_minutes=60,
  )


def paper() -> Experiment:
  """The thesis's general model: 400,000 batches of two questions, from a pre-trained model."""
  read = {
    "race": ("race", ("train/*/*.txt",), ("dev/*/*.txt",), ("test/*/*.txt",)),
    "squad2": ("squad", ("train-v2.0.json",), ("dev-v2.0.json",), ()),
    "narrativeqa": ("narrativeqa", ("train*",), ("valid*",), ("test*",)),
    "boolq": ("boolq", ("train.jsonl",), ("dev.jsonl",), ()),
    "arc": ("arc", ("*/*-Train.jsonl",), ("*/*-Dev.jsonl",), ("*/*-Test.jsonl",)),
    "openbookqa": ("arc", ("train.jsonl",), ("dev.jsonl",), ("test.jsonl",)),
    "mctest": ("mctest", ("*train.tsv",), ("*dev.tsv",), ("*test.tsv",)),
  }
  seeds = tuple(
    QASet(name, reader, f"data/qa/{name}", train=train, valid=valid, test=test)
    for name, (reader, train, valid, test) in read.items()
  )
  base = worlds()
  assert isinstance(base.task, AnsweringConfig)
  task = dataclasses.replace(
    base.task,
    data=Mixed(seeds=seeds),
    tokenizer=dataclasses.replace(base.task.tokenizer, vocab_size=50_000),
    length=768,
    answer_length=64,
    batch_questions=2,
    turns=1,
    answer_mean="token",
  )
  return dataclasses.replace(
    base,
    name="NeMoT for general question answering, at the thesis's size",
    task=task,
    model=NemotConfig(tasks=("lm", "mqa", "gqa")),
    optimizer=OptimizerConfig(
      name="adam",
      learning_rate=1e-4,
      schedule="cosine",
      warmup_steps=2000,
      final_fraction=0.1,
      b2=0.999,
    ),
    start="runs/nemot_pretrain",
    phases=(Phase(steps=400_000),),
    evaluate_every=10_000,
    evaluate_sentences=2000,
    time_limit_minutes=0,
  )
