"""Tokenizers of Hugging Face, through the package `tokenizers`, which is needed for them alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compmod_jax.data.vocabulary import Tokenizer, whole_characters
from compmod_jax.errors import UserError, check

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_NAMES = ("pad", "unk", "bos", "eos", "mask")
_ROBERTA: dict[str, str] = dict(
  zip(_NAMES, ("<pad>", "<unk>", "<s>", "</s>", "<mask>"), strict=True)
)
_BERT: dict[str, str] = dict(
  zip(_NAMES, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), strict=True)
)


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
    self._tokenizer: Any = tokenizers_package().Tokenizer.from_str(state)
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    self._vocab = max(vocab, self._tokenizer.get_vocab_size())
    self._word_pieces = json.loads(state)["model"].get("type") == "WordPiece"
    ids = {name: self._tokenizer.token_to_id(text) for name, text in self.names.items()}
    missing = [text for name, text in self.names.items() if ids[name] is None]
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
  folder = Path(folder)
  settings = {}
  try:
    if (folder / SETTINGS).is_file():
      settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    if (folder / WHOLE).is_file():
      state = (folder / WHOLE).read_text("utf-8")
    elif (folder / "vocab.json").is_file():
      state = _byte_pairs(folder)
    elif (folder / "vocab.txt").is_file():
      state = _word_pieces(folder, bool(settings.get("do_lower_case", True)))
    else:
      raise UserError(
        f"There is no tokenizer in {folder}: neither {WHOLE}, nor vocab.json and merges.txt, nor"
        " vocab.txt. Copy the files that belong to the model there."
      )
    kind = json.loads(state)["model"].get("type")
  except (OSError, ValueError, KeyError) as error:
    raise UserError(f"The tokenizer in {folder} cannot be read: {error}.") from error
  names: dict[str, str] = dict(_BERT if kind == "WordPiece" else _ROBERTA)
  for name, setting in (
    ("bos", "cls_token"),
    ("eos", "sep_token"),
    *((n, f"{n}_token") for n in names),
  ):
    given = settings.get(setting)
    given = given.get("content") if isinstance(given, Mapping) else given
    names |= {name: given} if given else {}
  return HuggingFaceTokenizer(state, names, vocab)


def write_tokenizer(folder: str | Path, tokenizer: HuggingFaceTokenizer) -> None:
  """Writes `tokenizer.json` and `tokenizer_config.json`, which `transformers` opens."""
  names = tokenizer.names
  settings = {f"{name}_token": text for name, text in names.items()}
  settings |= {"cls_token": names["bos"], "sep_token": names["eos"]}
  settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
  (Path(folder) / WHOLE).write_text(tokenizer.state, "utf-8")
  (Path(folder) / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def tokenizers_package() -> Any:
  """The package `tokenizers`.

  Raises:
    UserError: it is not installed.
  """
  try:
    import tokenizers
  except ImportError as error:
    raise UserError(
      "Tokenizers of Hugging Face need the package tokenizers; install it with"
      " `pip install 'tokenizers>=0.21,<1'`."
    ) from error
  return tokenizers


def _byte_pairs(folder: Path) -> str:
  """RoBERTa's tokenizer from its vocabulary and merges."""
  package = tokenizers_package()
  made = package.ByteLevelBPETokenizer.from_file(
    str(folder / "vocab.json"), str(folder / "merges.txt")
  )
  special = [text for name, text in _ROBERTA.items() if name != "mask"]
  made.add_special_tokens(special)
  # A mask stands for a word with the space before it.
  made.add_special_tokens([package.AddedToken(_ROBERTA["mask"], lstrip=True)])
  return made.to_str()


def _word_pieces(folder: Path, lowercase: bool) -> str:
  """BERT's tokenizer from its vocabulary."""
  package = tokenizers_package()
  made = package.BertWordPieceTokenizer.from_file(str(folder / "vocab.txt"), lowercase=lowercase)
  made.add_special_tokens(list(_BERT.values()))
  return made.to_str()
