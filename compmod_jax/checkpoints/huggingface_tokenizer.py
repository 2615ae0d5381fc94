"""Files of Hugging Face's tokenizers, read and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compmod_jax.checkpoints.huggingface_folder import read_object
from compmod_jax.core.errors import UserError
from compmod_jax.core.untrusted import read_bounded
from compmod_jax.data.tokenizers.huggingface import (
  MOST,
  SPECIAL,
  HuggingFaceTokenizer,
  as_value_error,
  model_type,
  tokenizers_package,
)

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_DEFAULTS: dict[str, dict[str, Any]] = {
  "roberta": {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
    "add_prefix_space": False,
    "trim_offsets": True,
  },
  "bert": {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "do_lower_case": True,
    "strip_accents": None,
    "tokenize_chinese_chars": True,
  },
}
"""Kind of model -> what a field means that `tokenizer_config.json` leaves out.

Source: the tokenizers of `transformers`, with which tests/peers compares it.
"""


def read_tokenizer(folder: str | Path, *, vocab: int = 0) -> HuggingFaceTokenizer:
  """The tokenizer of a model's folder.

  Args:
    folder: holds `tokenizer.json`, or RoBERTa's `vocab.json` and `merges.txt`, or BERT's
      `vocab.txt`; special tokens are named in `tokenizer_config.json`, if not in the usual way.
    vocab: number of tokens of the model.

  Raises:
    UserError: there is none of these, one is damaged, or the package `tokenizers` is missing.
  """
  folder, settings = Path(folder), dict[str, Any]()
  if (folder / SETTINGS).is_file():
    settings = read_object(folder / SETTINGS, f"There is no {SETTINGS} in {folder}.")
  try:
    if (folder / WHOLE).is_file():
      state = read_bounded(folder / WHOLE, MOST).decode("utf-8")
    elif (folder / "vocab.json").is_file():
      state = _byte_pairs(folder, _with_defaults("roberta", settings))
    elif (folder / "vocab.txt").is_file():
      state = _word_pieces(folder, _with_defaults("bert", settings))
    else:
      raise UserError(
        f"There is no tokenizer in {folder}: neither {WHOLE}, nor vocab.json and merges.txt, nor"
        " vocab.txt. Copy the files that belong to the model there."
      )
    kind = "bert" if model_type(state) == "WordPiece" else "roberta"
    return HuggingFaceTokenizer(state, _special(_with_defaults(kind, settings)), vocab)
  except UserError:
    raise
  except (OSError, ValueError) as error:
    raise UserError(f"The tokenizer in {folder} cannot be read: {error}. Copy it again.") from error


def write_tokenizer(folder: str | Path, tokenizer: HuggingFaceTokenizer) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json`, which `transformers` opens."""
  names = tokenizer.names
  settings = {f"{name}_token": text for name, text in names.items()}
  settings |= {"cls_token": names["bos"], "sep_token": names["eos"]}
  settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
  (Path(folder) / WHOLE).write_text(tokenizer.state, "utf-8")
  (Path(folder) / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _with_defaults(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings with `TOKENIZER_DEFAULTS` in place of those that are missing or null."""
  given = {name: value for name, value in settings.items() if value is not None}
  return TOKENIZER_DEFAULTS[kind] | given


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
  """Our names of the special tokens -> their texts."""
  found = {}
  for name, given in (("bos", "cls"), ("eos", "sep"), *((name, name) for name in SPECIAL)):
    text = settings.get(f"{given}_token")
    text = text.get("content") if isinstance(text, Mapping) else text
    found |= {name: str(text)} if text else {}
  return {name: found[name] for name in SPECIAL if name in found}


def _bounded(path: Path) -> Path:
  """The path of a file that the package may read: a plain one, and not too large."""
  read_bounded(path, MOST)
  return path


def _byte_pairs(folder: Path, settings: Mapping[str, Any]) -> str:
  """RoBERTa's tokenizer from its vocabulary and merges."""
  package, special = tokenizers_package(), _special(settings)
  files = [str(_bounded(folder / name)) for name in ("vocab.json", "merges.txt")]
  with as_value_error("vocab.json and merges.txt are no vocabulary"):
    made = package.ByteLevelBPETokenizer.from_file(
      *files,
      add_prefix_space=bool(settings["add_prefix_space"]),
      trim_offsets=bool(settings["trim_offsets"]),
    )
  mask = special.pop("mask")
  made.add_special_tokens(list(special.values()))
  # A mask stands for a word with the space before it.
  made.add_special_tokens([package.AddedToken(mask, lstrip=True)])
  return made.to_str()


def _word_pieces(folder: Path, settings: Mapping[str, Any]) -> str:
  """BERT's tokenizer from its vocabulary."""
  package = tokenizers_package()
  file = str(_bounded(folder / "vocab.txt"))
  with as_value_error("vocab.txt is no vocabulary"):
    made = package.BertWordPieceTokenizer.from_file(
      file,
      lowercase=bool(settings["do_lower_case"]),
      strip_accents=settings["strip_accents"],
      handle_chinese_chars=bool(settings["tokenize_chinese_chars"]),
    )
  made.add_special_tokens(list(_special(settings).values()))
  return made.to_str()
