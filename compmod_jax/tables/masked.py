"""Tables of masked language models: competing heads, and independent mechanisms."""

import dataclasses

from compmod_jax.core.errors import check_choice
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.training.experiment import load_config

SCALES = {
  "tiny": "English sentences of the project's grammar, on a CPU",
  "public_domain": "Tiny Shakespeare and War and Peace, 10 minutes a run on a CPU core",
  "paper": "RoBERTa base on Wikipedia, on many GPUs",
}
_VARIANTS = {"tiny": "grammar", "public_domain": "public_domain", "paper": "wikipedia"}


def roberta(scale: str) -> Spec:
  """Masked language models after Kolios 2023, section 5.4: plain, and with competing heads.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, SCALES)
  base = load_config(f"mlm_cah:{_VARIANTS[scale]}")
  # A run that its clock stops is another run on another machine.
  base = dataclasses.replace(base, time_limit_minutes=0.0, score_train=scale != "paper")
  rows = {
    "none": Row(with_model(base, compete=()), {"PPL valid": 10.04, "PPL train": 12.55}),
    "enc": Row(
      with_model(base, compete=("encoder_self",)), {"PPL valid": 10.15, "PPL train": 12.76}
    ),
  }
  columns = (
    Column("loss test", "test", "loss", 3, lower=True),
    Column("unigram test", "test", "unigram", 3, lower=True),
    Column("accuracy test", "test", "accuracy", 4),
    Column("PPL test", "test", "perplexity", lower=True),
    Column("PPL valid", "valid", "perplexity", lower=True),
    Column("PPL train", "train", "perplexity", lower=True),
  )
  title = "RoBERTa with competing heads (Kolios 2023, section 5.4)"
  return Spec(title, SCALES[scale], rows, "none", columns)


def mechanisms(scale: str) -> Spec:
  """Independent mechanisms with and without competition, and plain models beside them.

  Parameters are equal within 2 % but for the row `plain, same layers`, and with them the operations
  of a token, two for each parameter of a product.

  Raises:
    UserError: an unknown scale.
  """
  scales = {name: text for name, text in SCALES.items() if name != "paper"}
  check_choice("--scale", scale, scales)
  base = load_config(f"mlm_tim:{'' if scale == 'tiny' else scale}")
  base = dataclasses.replace(base, time_limit_minutes=0.0)
  assert isinstance(base.model, EncoderConfig)
  silent = dataclasses.replace(base.model.mechanisms, competition=False)
  rows = {
    "none": Row(with_model(base, mechanism_layers=(), ffn_dim=384)),
    "plain, same layers": Row(with_model(base, mechanism_layers=())),
    "TIM-NoComp": Row(with_model(base, mechanisms=silent)),
    "TIM": Row(base),
  }
  columns = (
    Column("loss test", "test", "loss", 4, lower=True),
    Column("accuracy test", "test", "accuracy", 4),
    Column("PPL valid", "valid", "perplexity", 3, lower=True),
  )
  title = "Independent mechanisms in masked language models (Kolios 2023, Table 4.4)"
  return Spec(title, scales[scale], rows, "none", columns)
