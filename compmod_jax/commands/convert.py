"""Converts models from and to Hugging Face's format: RoBERTa, BERT, and from it also GPT-2.

    python -m train.convert --huggingface FOLDER --workdir imported
    python -m train.convert --huggingface FOLDER --workdir imported --data FOLDER_OF_TEXT
    python -m train.convert --workdir runs/mlm --huggingface FOLDER --export

A folder of theirs holds config.json, model.safetensors and a tokenizer. An imported model is used
like one that was trained here: `train.predict`, `train.analyse roles`, `compmod_jax.load`. What is
scored or analysed are sentences of the project's grammar, or the text that --data names.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from compmod_jax.commands import cli

if TYPE_CHECKING:
  from compmod_jax.data.text_tokenizer import DocumentData
  from compmod_jax.data.tokenizers import Tokenizer
  from compmod_jax.tasks.configs import ModelConfig, TaskConfig


@dataclasses.dataclass(frozen=True)
class Args:
  """Converts language models from and to Hugging Face's format."""

  huggingface: Path
  """Their folder: read, or with --export written."""
  workdir: Path
  """Our folder: made, or with --export that of the model (a workdir or a model's folder)."""
  export: bool = False
  """Convert from ours to theirs."""
  data: str = ""
  """Import: folder of text files on which the model is scored and analysed; may start with an
  environment variable; none: English sentences of the project's grammar."""
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
    import_model(args.huggingface, args.workdir, args.data)
    print(cli.as_started(f"{args.workdir} holds the model; use it with python -m train.predict"))


class Imported(NamedTuple):
  """A model of theirs as one of ours.

  Attributes:
    task: the configuration of its task.
    model: its own.
    params: its parameters.
    tokenizer: its tokenizer.
  """

  task: "TaskConfig"
  model: "ModelConfig"
  params: dict[str, Any]
  tokenizer: "Tokenizer"


def import_model(theirs: Path, ours: Path, data: str = "") -> None:
  """Makes a model folder of ours from a folder of theirs.

  Args:
    theirs: a Hugging Face model's folder.
    ours: where the model goes.
    data: folder of text on which it is scored and analysed; the project's grammar if empty.

  Raises:
    UserError: the folder of theirs is incomplete or of a kind that cannot be imported, there is no
      text, or what is at the place of ours is no model's folder.
  """
  from compmod_jax.checkpoints.huggingface_folder import read_config
  from compmod_jax.checkpoints.model_folder import MODEL, save_model_folder
  from compmod_jax.core.config import to_json
  from compmod_jax.core.errors import check
  from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments
  from compmod_jax.data.text_tokenizer import FILE
  from compmod_jax.tasks.configs import ModelConfig, TaskConfig

  check(
    not ours.exists() or (ours / MODEL).is_file() or (ours.is_dir() and not any(ours.iterdir())),
    f"--workdir is {ours}, which is there and is no model's folder: what it holds would be"
    " replaced. Name a folder that is new or empty, or a model's folder to replace.",
  )
  text = TextDocuments(folder=data) if data else GrammarDocuments()
  text.load("train")  # what is missing is named before anything is written
  kind = read_config(theirs, IMPORTS)["model_type"]
  found = IMPORTS[kind](theirs, text)
  meta: dict[str, Any] = {
    "task": to_json(found.task, TaskConfig),
    "model": to_json(found.model, ModelConfig),
    "name": theirs.name,
    "metric": "loss",
    "score": None,
    "kind": kind,
  }
  files = {FILE: found.tokenizer.to_bytes()}
  save_model_folder(ours, params=found.params, files=files, meta=meta)


def _masked(theirs: Path, data: "DocumentData") -> Imported:
  """A masked language model."""
  from compmod_jax.checkpoints.huggingface import read_checkpoint
  from compmod_jax.checkpoints.huggingface_tokenizer import read_tokenizer
  from compmod_jax.core.errors import check
  from compmod_jax.tasks.masked_lm import MaskedLMConfig

  found = read_checkpoint(theirs)
  tokenizer = read_tokenizer(theirs, vocab=found.vocab)
  check(
    tokenizer.pad == found.pad and tokenizer.vocab_size == found.vocab,
    f"The tokenizer in {theirs} has {tokenizer.vocab_size} tokens and padding {tokenizer.pad}, but"
    f" the model has {found.vocab} and {found.pad}; they do not belong together. Copy the model's"
    " own tokenizer there.",
  )
  length = min(128, found.config.max_length)
  task = MaskedLMConfig(data=data, length=length, batch_tokens=32 * length)
  return Imported(task, found.config, found.params, tokenizer)


def _causal(theirs: Path, data: "DocumentData") -> Imported:
  """A decoder; its tokenizer has tokens more than theirs, for padding, for example."""
  from compmod_jax.checkpoints.gpt2 import read_gpt2, with_tokens
  from compmod_jax.core.errors import check
  from compmod_jax.data.tokenizers.gpt2 import read_gpt2_tokenizer
  from compmod_jax.tasks.causal_lm import CausalLMConfig

  found = read_gpt2(theirs)
  tokenizer = read_gpt2_tokenizer(theirs)
  check(
    tokenizer.pieces == found.vocab,
    f"The tokenizer in {theirs} has {tokenizer.pieces} tokens, but the model has {found.vocab};"
    " they do not belong together. Copy the model's own tokenizer there.",
  )
  length = min(128, found.config.max_length + 1)
  task = CausalLMConfig(data=data, length=length, batch_tokens=32 * length)
  return Imported(task, found.config, with_tokens(found, tokenizer.vocab_size).params, tokenizer)


IMPORTS = {
  "roberta": _masked,
  "bert": _masked,
  "gpt2": _causal,
}
"""Their `model_type` -> how it is imported."""


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
