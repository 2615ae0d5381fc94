"""Converts masked language models from and to Hugging Face's format (RoBERTa, BERT).

    python -m train.convert --huggingface FOLDER --workdir imported
    python -m train.convert --workdir runs/mlm --huggingface FOLDER --export

A folder of theirs holds config.json, model.safetensors and a tokenizer. An imported model is used
like one that was trained here: `train.predict`, `compmod_jax.load`.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from compmod_jax.commands import cli


@dataclasses.dataclass(frozen=True)
class Args:
  """Converts masked language models from and to Hugging Face's format."""

  huggingface: Path
  """Their folder: read, or with --export written."""
  workdir: Path
  """Our folder: made, or with --export that of the model (a workdir or a model's folder)."""
  export: bool = False
  """Convert from ours to theirs."""
  model: str | None = None
  """Export: which of the workdir's models; best if not given."""
  kind: Literal["roberta", "bert"] = "roberta"
  """Export: the layout that is written."""


def main(argv: list[str]) -> None:
  """Converts and says what was made."""
  args = cli.options(Args, argv)
  if args.export:
    export_model(args.workdir, args.model, args.huggingface, args.kind)
    print(f"{args.huggingface} holds the model in the format of Hugging Face's {args.kind}")
  else:
    import_model(args.huggingface, args.workdir)
    print(cli.as_started(f"{args.workdir} holds the model; use it with python -m train.predict"))


def import_model(theirs: Path, ours: Path) -> None:
  """Makes a model folder of ours from a folder of theirs.

  Raises:
    UserError: the folder of theirs is incomplete or of a kind that cannot be imported, or what is
      at the place of ours is no model's folder.
  """
  from compmod_jax.checkpoints.huggingface import read_checkpoint
  from compmod_jax.checkpoints.huggingface_tokenizer import read_tokenizer
  from compmod_jax.checkpoints.model_folder import MODEL, save_model_folder
  from compmod_jax.core.config import to_json
  from compmod_jax.core.errors import check
  from compmod_jax.data.text_tokenizer import FILE
  from compmod_jax.tasks.configs import ModelConfig, TaskConfig
  from compmod_jax.tasks.masked_lm import MaskedLMConfig

  check(
    not ours.exists() or (ours / MODEL).is_file() or (ours.is_dir() and not any(ours.iterdir())),
    f"--workdir is {ours}, which is there and is no model's folder: what it holds would be"
    " replaced. Name a folder that is new or empty, or a model's folder to replace.",
  )
  found = read_checkpoint(theirs)
  tokenizer = read_tokenizer(theirs, vocab=found.vocab)
  check(
    tokenizer.pad == found.pad and tokenizer.vocab_size == found.vocab,
    f"The tokenizer in {theirs} has {tokenizer.vocab_size} tokens and padding {tokenizer.pad}, but"
    f" the model has {found.vocab} and {found.pad}; they do not belong together. Copy the model's"
    " own tokenizer there.",
  )
  length = min(128, found.config.max_length)
  task = MaskedLMConfig(length=length, batch_tokens=32 * length)
  meta: dict[str, Any] = {
    "task": to_json(task, TaskConfig),
    "model": to_json(found.config, ModelConfig),
    "name": theirs.name,
    "metric": "loss",
    "score": None,
    "kind": found.kind,
  }
  files = {FILE: tokenizer.to_bytes()}
  save_model_folder(ours, params=found.params, files=files, meta=meta)


def export_model(
  ours: Path, name: str | None, theirs: Path, kind: Literal["roberta", "bert"]
) -> None:
  """Makes a folder of theirs from a model of ours; the tokenizer goes along if it was theirs.

  Raises:
    UserError: the model is no masked language model, or has what their layout cannot hold, or the
      place for theirs is taken by something else.
  """
  import jax
  import numpy as np

  from compmod_jax.api import MaskedModel, load
  from compmod_jax.checkpoints.huggingface import Checkpoint, write_checkpoint
  from compmod_jax.checkpoints.huggingface_folder import CONFIG, WEIGHTS
  from compmod_jax.checkpoints.huggingface_tokenizer import HuggingFaceTokenizer, write_tokenizer
  from compmod_jax.core.errors import UserError, check
  from compmod_jax.models.encoder import EncoderConfig

  # A workdir has a config.json of its own, which is not to be overwritten.
  check(
    not (theirs / CONFIG).exists() or (theirs / WEIGHTS).exists(),
    f"--huggingface is {theirs}, whose {CONFIG} is not that of a Hugging Face model; it would be"
    " overwritten. Name another folder.",
  )
  model = load(ours, model=name)
  if not isinstance(model, MaskedModel):
    raise UserError(f"The model in {ours} is no masked language model, so it cannot be exported.")
  tokenizer, config = model.tokenizer, model.model.config
  if not isinstance(config, EncoderConfig):
    raise UserError(
      f"The model in {ours} is a {type(config).__name__}; RoBERTa and BERT are encoders."
    )
  params = jax.tree.map(np.asarray, model.params)
  made = Checkpoint(config, params, tokenizer.vocab_size, tokenizer.pad, kind)
  write_checkpoint(theirs, made, bos=tokenizer.bos, eos=tokenizer.eos)
  if isinstance(tokenizer, HuggingFaceTokenizer):
    write_tokenizer(theirs, tokenizer)
