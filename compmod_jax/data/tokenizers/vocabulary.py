"""What a tokenizer is, and its trained kinds: sub-words by sentencepiece, and whole words."""

import abc
import base64
import dataclasses
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from compmod_jax.core import extras
from compmod_jax.core.errors import check, check_choice

PAD, UNK, BOS, EOS = 0, 1, 2, 3
CONTROLS = ("<pad>", "<unk>", "<s>", "</s>")
# Stands in text for a word that a masked language model is to fill in.
MASK = "<mask>"

# What some corpora write for words that their makers left out, and Penn Treebank's for a number.
UNKNOWN_WORDS = ("<unk>", "<UNK>", "[UNK]")
NUMBER_WORD = "N"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

LOOKALIKES = frozenset((*UNKNOWN_WORDS, NUMBER_WORD, CONTROLS[BOS], CONTROLS[EOS]))

Kind = Literal["bpe", "unigram", "words", "gpt2"]
FORMAT = "compmod_jax tokenizer 1"
_SURROGATE = re.compile("[\ud800-\udfff]")

Own = Literal["unknown", "number", "boundary"]
"""A kind of tokens that a corpus may have of its own; see `Tokenizer`."""
OWN: tuple[Own, ...] = get_args(Own)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """How a tokenizer is trained, or where it is read from."""

  kind: Kind = "bpe"
  """Sub-words by merging (bpe) or by likelihood (unigram), words between white space, or GPT-2's
  sub-words (gpt2), which are read from `folder`: nothing is trained then."""
  vocab_size: int = 8000
  """Most ids there may be, the four reserved ones included; a small text supports fewer. Without
  effect for gpt2, as is `character_coverage`: its files say what there is."""
  special_tokens: tuple[str, ...] = ()
  """Further tokens with ids of their own, from 4 on (gpt2: after GPT-2's); never split."""
  lowercase: bool = False
  """Lower-cases the text; decoded text is lower-case then."""
  character_coverage: float = 1.0
  """Share of the text's characters that get a token; the rarest of the others become unknown."""
  folder: str = ""
  """For gpt2 alone: holds vocab.json and merges.txt, also gzipped; may start with a variable."""

  def __post_init__(self) -> None:
    check_choice("kind", self.kind, get_args(Kind))
    gpt2 = self.kind == "gpt2"
    check(
      gpt2 == bool(self.folder) and not (gpt2 and self.lowercase),
      f"kind is {self.kind!r}, folder {self.folder!r} and lowercase {self.lowercase}; gpt2 needs a"
      " folder with its vocab.json and merges.txt, and lowercase = False, as it tells capitals"
      " apart. The other kinds are trained: leave folder empty.",
    )
    reserved = len(CONTROLS) + len(self.special_tokens)
    check(
      self.vocab_size > reserved,
      f"vocab_size is {self.vocab_size}, but {reserved} ids are reserved for controls and special"
      " tokens: give more.",
    )
    check(
      0.9 <= self.character_coverage <= 1,
      f"character_coverage is {self.character_coverage}; give a share from 0.9 to 1.",
    )
    tokens = self.special_tokens
    check(
      len(set(tokens)) == len(tokens)
      and all(t and t not in CONTROLS and not re.search(r"[\s▁]", t) for t in tokens),
      f"special_tokens is {tokens}; give different, non-empty tokens without white space or '▁',"
      f" none of them {', '.join(CONTROLS)}.",
    )


class Tokenizer(abc.ABC):
  """Text to ids and back; what it was trained on is all that it depends on.

  Text is brought to Unicode normalisation form C first, except for tokenizers of other libraries.
  The ids 0 to 3 are PAD, UNK, BOS and EOS for every kind that is trained here; none of them but UNK
  comes out of `encode`.

  Corpora have tokens of their own for what these stand for, and a model has been trained on those.
  `own` says which are taken for what they mean:

  - unknown: words that are not in a vocabulary of words become the corpus's `<unk>` (one of
    `UNKNOWN_WORDS`), which then is `unk`;
  - number: numbers that are not in a vocabulary of words become the corpus's `N`, if there is one
    and not a single number;
  - boundary: `<s>` at the beginning of a text and `</s>` at its end are left out, as tasks put
    their own start and end tokens there.

  Attributes:
    kind: how text is cut.
    special_tokens: tokens of their own that are never split.
    lowercase: whether text is lower-cased.
    pad: id that fills up.
    unk: id of what has none.
    bos: id that starts a text.
    eos: id that ends a text.
    mask_text: what MASK is called in text that is encoded.
    own: tokens of the corpus that are taken for what they mean.
  """

  kind: str
  special_tokens: tuple[str, ...]
  lowercase: bool
  pad: int = PAD
  unk: int = UNK
  bos: int = BOS
  eos: int = EOS
  mask_text: str = MASK
  own: tuple[Own, ...] = OWN

  @property
  def mask(self) -> int | None:
    """Id of MASK; none where there is no such token."""
    if MASK not in self.special_tokens:
      return None
    return len(CONTROLS) + self.special_tokens.index(MASK)

  @property
  def controls(self) -> frozenset[int]:
    """Ids that stand for no text: the four, MASK's, and those of no token at all."""
    four = {self.pad, self.unk, self.bos, self.eos}
    return frozenset(four | ({self.mask} if self.mask is not None else set()) | self.unused)

  @property
  def unused(self) -> frozenset[int]:
    """Ids of no token: rows that were added to a vocabulary to round its size up."""
    return frozenset()

  @property
  def never_produced(self) -> tuple[int, ...]:
    """What a search may not choose: `controls` but the end, ascending."""
    return tuple(sorted(self.controls - {self.eos}))

  @property
  @abc.abstractmethod
  def vocab_size(self) -> int:
    """Number of ids."""

  @abc.abstractmethod
  def _encode(self, texts: list[str]) -> list[list[int]]: ...

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str: ...

  @abc.abstractmethod
  def _pieces(self, text: str) -> list[str]: ...

  @abc.abstractmethod
  def _model(self) -> Any: ...

  def _more(self) -> dict[str, Any]:
    """What else belongs into `to_bytes`."""
    return {}

  @abc.abstractmethod
  def piece(self, number: int) -> str:
    """The token with this id; sub-words that follow a space begin with '▁'."""

  def text_of(self, number: int) -> str:
    """Text of one token; that of a sub-word that begins a word starts with a space."""
    return self.piece(number).replace("▁", " ")

  def added_text(self, number: int) -> str:
    """What one token adds to a text that is there already."""
    return self.text_of(number)

  def encode(self, text: str) -> list[int]:
    """Ids of a text, without BOS and EOS."""
    return self._encode([self.normalise(text)])[0]

  def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
    """`encode` of every text, much faster than one by one."""
    return self._encode([self.normalise(text) for text in texts])

  def decode(self, ids: Iterable[int]) -> str:
    """Text of the ids up to the first end; padding and starts are left out.

    Raises:
      UserError: an id is not in the vocabulary, so the ids are another tokenizer's.
    """
    kept = []
    for number in map(int, ids):
      if number == self.eos:
        break
      check(
        0 <= number < self.vocab_size,
        f"Token id {number} is not in this tokenizer's vocabulary of {self.vocab_size}; the ids"
        " were made with another tokenizer: use that one.",
      )
      if number not in (self.pad, self.bos):
        kept.append(number)
    return self._decode(kept)

  def unknown(self, text: str) -> list[str]:
    """The parts of a text that have no token, in order; not an unknown word that it has itself."""
    own = self.piece(self.unk)
    pairs = zip(self.encode(text), self.surfaces(text), strict=True)
    return [piece for number, piece in pairs if number == self.unk and piece != own]

  def surfaces(self, text: str) -> list[str]:
    """How every token of `encode(text)` is spelt in the text, as the tokenizer marks blanks."""
    return self._pieces(self.normalise(text))

  def normalise(self, text: str) -> str:
    """What `encode` sees.

    Form C, without marks of its beginning and end (see `own`), and, if so set, in lower case with
    special tokens left alone. Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is
    U+FFFD.
    """
    text = unicodedata.normalize("NFC", whole_characters(text))
    if "boundary" in self.own:
      text = _without_boundaries(text)
    if not self.lowercase:
      return text
    if not self.special_tokens:
      return text.lower()
    tokens = sorted(self.special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return "".join(part if i % 2 else part.lower() for i, part in enumerate(parts))

  def to_bytes(self) -> bytes:
    """What `tokenizer_from_bytes` needs, as JSON; the same tokenizer gives the same bytes."""
    state = {
      "format": FORMAT,
      "kind": self.kind,
      "lowercase": self.lowercase,
      "special_tokens": list(self.special_tokens),
      "model": self._model(),
      **self._more(),
    }
    return json.dumps(state, ensure_ascii=False).encode()

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_bytes()`, in hexadecimal."""
    return hashlib.sha256(self.to_bytes()).hexdigest()


def _without_boundaries(text: str) -> str:
  """The text without `<s>` at its beginning and `</s>` at its end, where these are words."""
  begins, ends = CONTROLS[BOS], CONTROLS[EOS]
  inner = text.strip()
  if inner.startswith(begins) and not inner.removeprefix(begins)[:1].strip():
    text = inner = inner.removeprefix(begins).strip()
  if inner.endswith(ends) and not inner.removesuffix(ends)[-1:].strip():
    text = inner.removesuffix(ends).strip()
  return text


def whole_characters(text: str) -> str:
  """The text with U+FFFD for every half of a surrogate pair."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return _SURROGATE.sub("\ufffd", text)
  return text


class SentencePiece(Tokenizer):
  """Sub-words by the sentencepiece library; white space is kept, so known text round-trips."""

  def __init__(
    self, model: bytes, *, kind: Kind, special_tokens: tuple[str, ...] = (), lowercase: bool = False
  ):
    with extras.needed():
      import sentencepiece

    check_choice("kind", kind, ("bpe", "unigram"))
    self.kind, self.special_tokens, self.lowercase = kind, special_tokens, lowercase
    self._proto = model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    found = tuple(self._processor.id_to_piece(i) for i in range(len(CONTROLS)))
    check(found == CONTROLS, f"the first ids are {found}, not {CONTROLS}")

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return self._processor.get_piece_size()

  def piece(self, number: int) -> str:
    """The token with this id; sub-words that follow a space begin with '▁'."""
    return self._processor.id_to_piece(int(number))

  def _encode(self, texts: list[str]) -> list[list[int]]:
    if len(texts) == 1:  # a list makes the package start threads
      return [self._processor.encode(texts[0])]
    return self._processor.encode(texts) if texts else []

  def _decode(self, ids: list[int]) -> str:
    return self._processor.decode(ids)

  def _pieces(self, text: str) -> list[str]:
    return self._processor.encode(text, out_type=str)

  def _model(self) -> str:
    return base64.b64encode(self._proto).decode()


class Words(Tokenizer):
  """Words between white space; text whose words are known round-trips with single spaces."""

  kind = "words"

  def __init__(
    self,
    words: Sequence[str],
    *,
    special_tokens: tuple[str, ...] = (),
    lowercase: bool = False,
    own: tuple[Own, ...] = OWN,
  ):
    self.special_tokens, self.lowercase, self.own = special_tokens, lowercase, own
    self._words = list(words)
    listed = (*special_tokens, *self._words)
    check(all(isinstance(word, str) for word in listed), "a word is not a string")
    check(len(set(listed)) == len(listed), "a word is listed twice")
    self._all = (*CONTROLS, *listed)
    # A word spelt like a control is a word: text cannot end a sentence or unpad it.
    self._ids = {word: number for number, word in enumerate(listed, start=len(CONTROLS))}
    if "unknown" in own:
      found = (self._ids[word] for word in UNKNOWN_WORDS if word in self._ids)
      self.unk = next(found, UNK)
    numbers = "number" not in own or any(NUMBER.fullmatch(word) for word in self._words)
    self._number = None if numbers else self._ids.get(NUMBER_WORD)

  @property
  def controls(self) -> frozenset[int]:
    """Ids that stand for no text: the four, MASK's, and the corpus's own unknown word."""
    return super().controls | {UNK}

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return len(self._all)

  def piece(self, number: int) -> str:
    """The token with this id."""
    return self._all[number]

  def added_text(self, number: int) -> str:
    """What one token adds to a text that is there already: a space and a word."""
    return f" {self.piece(number)}"

  def _encode(self, texts: list[str]) -> list[list[int]]:
    get, other = self._ids.get, self._other
    return [
      [other(word) if (found := get(word)) is None else found for word in text.split()]
      for text in texts
    ]

  def _other(self, word: str) -> int:
    """Id of a word that is not in the vocabulary."""
    if self._number is not None and NUMBER.fullmatch(word):
      return self._number
    return self.unk

  def _decode(self, ids: list[int]) -> str:
    return " ".join(self._all[number] for number in ids)

  def _pieces(self, text: str) -> list[str]:
    return text.split()

  def _model(self) -> list[str]:
    return self._words

  def _more(self) -> dict[str, Any]:
    # Without such tokens the bytes are those of versions that did not know of them.
    return {"own": list(self.own)} if LOOKALIKES.intersection(self._words) else {}
