"""A recurrent language modelling experiment that trains in seconds."""

from pathlib import Path

import tiny_masked

from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def make_task(folder: Path, **fields) -> LanguageModelConfig:
  """The task on what `tiny_masked.write_text` wrote."""
  data = tiny_masked.make_task(folder).data
  settings = {"rows": 8, "length": 5, "eval_rows": 4}
  tokenizer = TokenizerConfig(kind="words", vocab_size=24)
  return LanguageModelConfig(data=data, tokenizer=tokenizer, **{**settings, **fields})


def make_model(signal="surprisal", **fields) -> LstmConfig:
  """A small model that recodes."""
  recoding = RecodingConfig(signal=signal, samples=2, size=0.5)
  return LstmConfig(
    **{"dim": 8, "embedding_dim": 8, "dropout": 0.1, "recoding": recoding, **fields}
  )


def make_experiment(folder: Path) -> Experiment:
  """Evaluations and checkpoints at the end of every epoch, two of them."""
  return Experiment(
    name="tiny",
    task=make_task(folder),
    model=make_model(),
    optimizer=OptimizerConfig(
      name="sgd", learning_rate=20.0, schedule="plateau", warmup_steps=0, clip=0.25
    ),
    phases=(Phase(epochs=3),),
    log_every=2,
    keep_last=9,
  )
