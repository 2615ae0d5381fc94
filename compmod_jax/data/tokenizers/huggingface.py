"""Tokenizers of Hugging Face, through the package `tokenizers`, which is needed for them alone."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from compmod_jax.core import extras
from compmod_jax.core.errors import check
from compmod_jax.core.untrusted import MIB, parse_json
from compmod_jax.data.tokenizers.vocabulary import Tokenizer, whole_characters

MOST = 256 * MIB
"""Most bytes of a tokenizer's file."""
SPECIAL = ("pad", "unk", "bos", "eos", "mask")
"""Our names of the special tokens."""
_PADDING = 1 << 16  # most rows that are added to a small vocabulary to round its size up


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
    kind = model_type(state)
    with as_value_error("it is no tokenizer"):
      self._tokenizer = tokenizers_package().Tokenizer.from_str(state)
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
    missing += [f"for {name}" for name in SPECIAL if name not in self.names]
    check(
      not missing,
      f"The vocabulary lacks the special token {', '.join(missing)}; name the right ones in"
      ' tokenizer_config.json, such as "mask_token".',
    )
    self.pad, self.unk, self.bos, self.eos = (ids[name] for name in SPECIAL[:4])
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


def model_type(state: str) -> str:
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
def as_value_error(what: str) -> Iterator[None]:
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
