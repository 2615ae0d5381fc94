"""A workdir as training leaves it, with random parameters in place of trained ones."""

import dataclasses
import json
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.configs import ModelConfig
from compmod_jax.tasks.translation import Translation, TranslationConfig
from compmod_jax.training.experiment import Experiment

STEPS = (10, 20, 30)
GERMAN = (
  "der",
  "hund",
  "schläft",
  "die",
  "katze",
  "sieht",
  "einen",
  "vogel",
  "und",
  "ein",
  "fisch",
)
ENGLISH = ("the", "dog", "sleeps", "A", "cat", "sees", "One", "bird", "and", "fish", "swims")


def sentences(words: tuple[str, ...], count: int, seed: int) -> list[str]:
  """Random sentences of 2 to 6 words."""
  random = np.random.default_rng(seed)
  return [" ".join(random.choice(words, random.integers(2, 7))) for _ in range(count)]


def write_data(folder: Path) -> TextData:
  """Parallel text whose validation split has a sentence longer than any in training."""
  folder.mkdir(parents=True)
  for seed, (split, count) in enumerate((("train", 30), ("valid", 7), ("test", 9))):
    for words, language in ((GERMAN, "de"), (ENGLISH, "en")):
      lines = sentences(words, count, 2 * seed + (language == "en"))
      if split == "train":
        lines += [" ".join(words)]
      if split == "valid":
        lines += [" ".join(words * 2)]
      (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
  return TextData(folder=str(folder))


def make_experiment(data: TextData, *, joint: bool = False) -> Experiment:
  """An experiment with a model so small that it compiles fast; `joint`: of one vocabulary."""
  words = TokenizerConfig(kind="words", vocab_size=40)
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=data,
      tokenizer=words,
      target_tokenizer=None if joint else words,
      batch=BatchConfig(tokens=128, ceiling=12, bucket_count=1),
      decode=DecodeConfig(beams=3, max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1,
      decoder_layers=1,
      dim=16,
      heads=2,
      ffn_dim=16,
      norm="pre",
      max_length=48,
      compete=("encoder_self", "cross"),
    ),
  )


def random_parameters(task: Translation, seed: int) -> dict:
  """Parameters large enough that outputs depend on every part of the model."""
  shapes = jax.eval_shape(lambda: nn.unbox(task.model.init(jax.random.key(0))))
  random = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: np.float32(random.normal(size=leaf.shape) * 0.7), shapes)


def make_workdir(workdir: Path, model: ModelConfig | None = None, *, joint: bool = False) -> Path:
  """A workdir whose models are `best` and one for each of STEPS; `best` is the last of them.

  `model` is the configuration of another model than that of `make_experiment`, `joint` as there.
  """
  experiment = make_experiment(write_data(workdir / "data"), joint=joint)
  experiment = dataclasses.replace(experiment, model=model or experiment.model)
  config = {"experiment": to_json(experiment), "command": "", "provenance": {}}
  (workdir / "config.json").write_text(json.dumps(config))
  task = experiment.task.build(experiment.model)
  meta = {
    "task": to_json(task.dataset.resolved_config()),
    # Without a tag, as those of older versions are, it is a Transformer.
    "model": to_json(experiment.model, None if model is None else ModelConfig),
    "name": experiment.name,
    "metric": task.metric,
  }
  for step in STEPS:
    params = random_parameters(task, step)
    for name in (f"step-{step:08d}", *(("best",) if step == STEPS[-1] else ())):
      save_model_folder(
        workdir / "models" / name,
        params=params,
        files=task.dataset.files(),
        meta={**meta, "step": step},
      )
  return workdir
