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

from compmod_jax.errors import UserError, check, check_choice

PAD, UNK, BOS, EOS = 0, 1, 2, 3
CONTROLS = ("<pad>", "<unk>", "<s>", "</s>")
# Stands in text for a word that a masked language model is to fill in.
MASK = "<mask>"

Kind = Literal["bpe", "unigram", "words", "gpt2"]
FORMAT = "compmod_jax tokenizer 1"
_SURROGATE = re.compile("[\ud800-\udfff]")


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

  Attributes:
    kind: how text is cut.
    special_tokens: tokens of their own that are never split.
    lowercase: whether text is lower-cased.
    pad: id that fills up.
    unk: id of what has none.
    bos: id that starts a text.
    eos: id that ends a text.
    mask_text: what MASK is called in text that is encoded.
  """

  kind: str
  special_tokens: tuple[str, ...]
  lowercase: bool
  pad: int = PAD
  unk: int = UNK
  bos: int = BOS
  eos: int = EOS
  mask_text: str = MASK

  @property
  def mask(self) -> int | None:
    """Id of MASK; none where there is no such token."""
    if MASK not in self.special_tokens:
      return None
    return len(CONTROLS) + self.special_tokens.index(MASK)

  @property
  def controls(self) -> frozenset[int]:
    """Ids that stand for no text: the four, and MASK's."""
    four = {self.pad, self.unk, self.bos, self.eos}
    return frozenset(four | ({self.mask} if self.mask is not None else set()))

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

  @abc.abstractmethod
  def piece(self, number: int) -> str:
    """The token with this id; sub-words that follow a space begin with '▁'."""

  def text_of(self, number: int) -> str:
    """Text of one token; that of a sub-word that begins a word starts with a space."""
    return self.piece(number).replace("▁", " ")

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
    """The parts of a text that encode to UNK, in order."""
    text = self.normalise(text)
    pairs = zip(self._encode([text])[0], self._pieces(text), strict=True)
    return [piece for number, piece in pairs if number == self.unk]

  def normalise(self, text: str) -> str:
    """What `encode` sees: form C and, if so set, lower case with special tokens left alone.

    Half of a surrogate pair, which JSON can hold and UTF-8 cannot, is U+FFFD.
    """
    text = unicodedata.normalize("NFC", whole_characters(text))
    if not self.lowercase:
      return text
    if not self.special_tokens:
      return text.lower()
    tokens = sorted(self.special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text)
    return "".join(part if i % 2 else part.lower() for i, part in enumerate(parts))

  def to_bytes(self) -> bytes:
    """Everything that `from_bytes` needs, as JSON; the same tokenizer gives the same bytes."""
    state = {
      "format": FORMAT,
      "kind": self.kind,
      "lowercase": self.lowercase,
      "special_tokens": list(self.special_tokens),
      "model": self._model(),
    }
    return json.dumps(state, ensure_ascii=False).encode()

  @property
  def fingerprint(self) -> str:
    """SHA-256 of `to_bytes()`, in hexadecimal."""
    return hashlib.sha256(self.to_bytes()).hexdigest()

  @staticmethod
  def from_bytes(data: bytes) -> "Tokenizer":
    """The tokenizer that gave these bytes.

    Raises:
      UserError: the bytes are damaged or of another format.
    """
    try:
      state = json.loads(data)
      check(state["format"] == FORMAT, f"its format is {state['format']!r}, not {FORMAT!r}")
      kind, tokens, lowercase = state["kind"], tuple(state["special_tokens"]), state["lowercase"]
      if kind == "huggingface":
        from compmod_jax.interop.hf_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(**state["model"])
      if kind == "gpt2":
        from compmod_jax.interop.gpt2_tokenizer import Gpt2Tokenizer

        return Gpt2Tokenizer(**state["model"], special_tokens=tokens)
      if kind == "words":
        return Words(state["model"], special_tokens=tokens, lowercase=lowercase)
      model = base64.b64decode(state["model"], validate=True)
      return SentencePiece(model, kind=kind, special_tokens=tokens, lowercase=lowercase)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
      raise UserError(
        f"These {len(data)} bytes are not a tokenizer ({error}); the file is damaged, or made by"
        " another version: take it from a good copy or train it again."
      ) from error


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
    import sentencepiece

    check_choice("kind", kind, ("bpe", "unigram"))
    self.kind, self.special_tokens, self.lowercase = kind, special_tokens, lowercase
    self._proto = model
    self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
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
    self, words: Sequence[str], *, special_tokens: tuple[str, ...] = (), lowercase: bool = False
  ):
    self.special_tokens, self.lowercase = special_tokens, lowercase
    self._words = list(words)
    listed = (*special_tokens, *self._words)
    check(all(isinstance(word, str) for word in listed), "a word is not a string")
    check(len(set(listed)) == len(listed), "a word is listed twice")
    self._all = (*CONTROLS, *listed)
    # A word spelt like a control is a word: text cannot end a sentence or unpad it.
    self._ids = {word: number for number, word in enumerate(listed, start=len(CONTROLS))}

  @property
  def vocab_size(self) -> int:
    """Number of ids."""
    return len(self._all)

  def piece(self, number: int) -> str:
    """The token with this id."""
    return self._all[number]

  def _encode(self, texts: list[str]) -> list[list[int]]:
    return [[self._ids.get(word, UNK) for word in text.split()] for text in texts]

  def _decode(self, ids: list[int]) -> str:
    return " ".join(self._all[number] for number in ids)

  def _pieces(self, text: str) -> list[str]:
    return text.split()

  def _model(self) -> list[str]:
    return self._words
