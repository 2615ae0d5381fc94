"""A masked language modelling experiment that trains in seconds, on text in which words agree."""

import random
from pathlib import Path

from compmod_jax.data.corruption import MaskingConfig
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

STEPS, EVERY = 12, 4


def write_text(folder: Path, counts: dict[str, int]) -> Path:
  """Files `SPLIT.txt` of paragraphs, in which a word is followed by its own number."""
  folder.mkdir(parents=True)
  rng = random.Random(0)
  words = ["bat", "cow", "dog", "emu", "fox"]
  for split, count in counts.items():
    paragraphs = []
    for _ in range(count):
      chosen = rng.choices(range(len(words)), k=rng.randint(2, 8))
      paragraphs.append(" ".join(f"{words[i]} {i}" for i in chosen))
    (folder / f"{split}.txt").write_text("\n\n".join(paragraphs) + "\n")
  return folder


def make_task(folder: Path, **fields) -> MaskedLMConfig:
  """The task on what `write_text` wrote."""
  data = TextDocuments(
    folder=str(folder), train=("train.txt",), valid=("valid.txt",), test=("test.txt",)
  )
  settings = {"length": 16, "batch_tokens": 128, "masking": MaskingConfig(share=0.25)}
  return MaskedLMConfig(
    data=data, tokenizer=TokenizerConfig(kind="words", vocab_size=24), **{**settings, **fields}
  )


def make_model(**fields) -> EncoderConfig:
  """A model of one layer whose heads compete."""
  sizes = {"encoder_layers": 1, "dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 16}
  return EncoderConfig(**{**sizes, "compete": ("encoder_self",), **fields})


def make_experiment(folder: Path) -> Experiment:
  """Three evaluations and checkpoints in twelve steps."""
  return Experiment(
    name="tiny",
    task=make_task(folder),
    model=make_model(),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=4),
    phases=(Phase(steps=STEPS),),
    evaluate_every=EVERY,
    evaluate_sentences=2,
    watch_sentences=2,
    log_every=2,
    keep_last=9,
    keep_models=1,
  )
