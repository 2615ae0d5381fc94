"""Tokenizers of Hugging Face, through the package `tokenizers`, which is needed for them alone."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compmod_jax.checkpoints.huggingface_folder import MOST, read_object
from compmod_jax.core import extras
from compmod_jax.core.errors import UserError, check
from compmod_jax.core.untrusted import parse_json, read_bounded
from compmod_jax.data.tokenizers.vocabulary import Tokenizer, whole_characters

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PADDING = 1 << 16  # most rows that are added to a small vocabulary to round its size up
_NAMES = ("pad", "unk", "bos", "eos", "mask")
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


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer with the token numbers of Hugging Face's; its text is not normalised further.

  Args:
    state: what `tokenizer.json` holds.
    names: of the special tokens: pad, unk, bos, eos and mask.
    vocab: number of ids, where the model has more than the tokenizer knows.

  Raises:
    UserError: the package is missing, or a special token is not in the vocabulary.
  """

  kind = "huggingface"
  special_tokens = ()
  lowercase = False

  def __init__(self, state: str, names: Mapping[str, str], vocab: int = 0):
    self.state, self.names = state, dict(names)
    kind = _kind(state)
    with _as_value_error("it is no tokenizer"):
      self._tokenizer: Any = tokenizers_package().Tokenizer.from_str(state)
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    known = self._tokenizer.get_vocab_size()
    check(
      vocab <= known + max(known, _PADDING),
      f"The model has {vocab:,} rows for the {known:,} tokens of the vocabulary; they do not belong"
      " together. Copy the model's own tokenizer.",
    )
    self._vocab = max(vocab, known)
    self._word_pieces = kind == "WordPiece"
    ids = {name: self._tokenizer.token_to_id(text) for name, text in self.names.items()}
    missing = [text for name, text in self.names.items() if ids[name] is None]
    missing += [f"for {name}" for name in _NAMES if name not in self.names]
    check(
      not missing,
      f"The vocabulary lacks the special token {', '.join(missing)}; name the right ones in"
      f' {SETTINGS}, such as "mask_token".',
    )
    self.pad, self.unk, self.bos, self.eos = (ids[name] for name in _NAMES[:4])
    self._mask, self.mask_text = ids["mask"], self.names["mask"]

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return self._vocab

  @property
  def mask(self) -> int:
    """Id of the mask token."""
    return self._mask

  @functools.cached_property
  def unused(self) -> frozenset[int]:
    """Ids of no token: rows that were added to a vocabulary to round its size up."""
    used = set(self._tokenizer.get_vocab().values())
    return frozenset(range(self._vocab)) - used

  def piece(self, number: int) -> str:
    """The token with this id, as the vocabulary spells it."""
    return self._tokenizer.id_to_token(int(number)) or ""

  def text_of(self, number: int) -> str:
    """Text of one token; that of a sub-word that begins a word starts with a space."""
    if not self._word_pieces:
      return self._tokenizer.decode([int(number)], skip_special_tokens=False)
    piece = self.piece(number)
    return piece[2:] if piece.startswith("##") else f" {piece}"

  def normalise(self, text: str) -> str:
    """The text itself: the tokenizer has a normaliser of its own."""
    return whole_characters(text)

  def _encode(self, texts: list[str]) -> list[list[int]]:
    found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
    return [one.ids for one in found]

  def _decode(self, ids: list[int]) -> str:
    return self._tokenizer.decode(ids, skip_special_tokens=False).strip()

  def _pieces(self, text: str) -> list[str]:
    return self._tokenizer.encode(text, add_special_tokens=False).tokens

  def _model(self) -> dict[str, Any]:
    return {"state": self.state, "names": self.names, "vocab": self._vocab}


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
    kind = "bert" if _kind(state) == "WordPiece" else "roberta"
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


def _kind(state: str) -> str:
  """The `type` of model that `tokenizer.json` describes, "" for none.

  Raises:
    ValueError: it is no such file.
  """
  found = parse_json(state, size=MOST)
  model = found.get("model") if isinstance(found, dict) else None
  if not isinstance(model, dict):
    raise ValueError("it has no field model that says what the tokenizer is")
  return str(model.get("type") or "")


@contextlib.contextmanager
def _as_value_error(what: str) -> Iterator[None]:
  """Makes a `ValueError` of what the package raises, which is a plain `Exception`."""
  try:
    yield
  except Exception as error:
    raise ValueError(f"{what} ({error})") from error


def tokenizers_package() -> Any:
  """The package `tokenizers`.

  Raises:
    MissingExtraError: it is not installed.
  """
  with extras.needed():
    import tokenizers

  return tokenizers


def _with_defaults(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """The settings with `TOKENIZER_DEFAULTS` in place of those that are missing or null."""
  given = {name: value for name, value in settings.items() if value is not None}
  return TOKENIZER_DEFAULTS[kind] | given


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
  """Our names of the special tokens -> their texts."""
  found = {}
  for name, given in (("bos", "cls"), ("eos", "sep"), *((name, name) for name in _NAMES)):
    text = settings.get(f"{given}_token")
    text = text.get("content") if isinstance(text, Mapping) else text
    found |= {name: str(text)} if text else {}
  return {name: found[name] for name in _NAMES if name in found}


def _bounded(path: Path) -> Path:
  """The path of a file that the package may read: a plain one, and not too large."""
  read_bounded(path, MOST)
  return path


def _byte_pairs(folder: Path, settings: Mapping[str, Any]) -> str:
  """RoBERTa's tokenizer from its vocabulary and merges."""
  package, special = tokenizers_package(), _special(settings)
  files = [str(_bounded(folder / name)) for name in ("vocab.json", "merges.txt")]
  with _as_value_error("vocab.json and merges.txt are no vocabulary"):
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
  with _as_value_error("vocab.txt is no vocabulary"):
    made = package.BertWordPieceTokenizer.from_file(
      file,
      lowercase=bool(settings["do_lower_case"]),
      strip_accents=settings["strip_accents"],
      handle_chinese_chars=bool(settings["tokenize_chinese_chars"]),
    )
  made.add_special_tokens(list(_special(settings).values()))
  return made.to_str()
