"""GPT-2's tokenizer, from files of Hugging Face's, through the package `tokenizers`."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compmod_jax.core.errors import UserError, check
from compmod_jax.core.untrusted import parse_json, read_bounded
from compmod_jax.data.sources.text import expand_folder, find_file, read_lines
from compmod_jax.data.tokenizers.huggingface import MOST, tokenizers_package
from compmod_jax.data.tokenizers.vocabulary import CONTROLS, Tokenizer, whole_characters

VOCAB, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"
END = "<|endoftext|>"
"""What GPT-2 puts between documents: the end token."""
# GPT-2 has no such tokens; models and analyses tell them apart by their numbers.
_ADDED_CONTROLS = CONTROLS[:3]
_REMEDY = "Copy vocab.json and merges.txt of the same model again."


class Gpt2Tokenizer(Tokenizer):
  """Sub-words of bytes with GPT-2's ids; any text decodes to itself.

  After GPT-2's ids come those of the special tokens, and then those of `<pad>`, `<unk>` and `<s>`,
  which GPT-2 lacks. The end is `<|endoftext|>`. Neither these four nor anything unknown comes out
  of `encode`: text that is spelt like them is plain text. Text is not normalised.

  Args:
    pieces: GPT-2's vocabulary in the order of the ids, spelt as in `vocab.json`.
    merges: pairs of pieces as in `merges.txt`, with a space between the two; the first to be merged
      first.
    special_tokens: further tokens that are never split.

  Raises:
    UserError: pieces and merges are not GPT-2's or do not belong together, a special token is one
      of the pieces, or the package is missing.

  Source: Radford et al. 2019, section 2.2.
  """

  kind = "gpt2"
  lowercase = False

  def __init__(
    self, pieces: Sequence[str], merges: Sequence[str], special_tokens: Iterable[str] = ()
  ):
    package = tokenizers_package()
    self.special_tokens = tuple(special_tokens)
    self._pieces_of_gpt2, self._merges = list(pieces), list(merges)
    _check(self._pieces_of_gpt2, self._merges, package.pre_tokenizers.ByteLevel.alphabet())
    self._all = (*self._pieces_of_gpt2, *self.special_tokens, *_ADDED_CONTROLS)
    check(
      len(set(self._all)) == len(self._all),
      f"special_tokens is {self.special_tokens}, and {', '.join(_ADDED_CONTROLS)} are added; give"
      f" different tokens, none of which is in {VOCAB}.",
    )
    vocab = {piece: number for number, piece in enumerate(self._pieces_of_gpt2)}
    pairs = [tuple(merge.split(" ")) for merge in self._merges]
    self._tokenizer = package.ByteLevelBPETokenizer(vocab, pairs)
    self._tokenizer.add_special_tokens(list(self.special_tokens))
    self._first_added = len(vocab)
    self.eos = vocab[END]
    self.pad, self.unk, self.bos = range(self.vocab_size - len(_ADDED_CONTROLS), self.vocab_size)

  @property
  def vocab_size(self) -> int:
    """Number of ids: GPT-2's, and those that were added."""
    return len(self._all)

  @property
  def pieces(self) -> int:
    """Number of GPT-2's own ids, which are the first."""
    return self._first_added

  @property
  def mask(self) -> int | None:
    """Id of MASK; none where there is no such token."""
    if self.mask_text not in self.special_tokens:
      return None
    return self._first_added + self.special_tokens.index(self.mask_text)

  def piece(self, number: int) -> str:
    """The token with this id, as the vocabulary spells it."""
    return self._all[int(number)]

  def text_of(self, number: int) -> str:
    """Text of one token; that of a sub-word that begins a word starts with a space."""
    return self._decode([int(number)])

  def normalise(self, text: str) -> str:
    """The text itself, with U+FFFD for halves of surrogate pairs."""
    return whole_characters(text)

  def _encode(self, texts: list[str]) -> list[list[int]]:
    return [found.ids for found in self._tokenizer.encode_batch(texts)]

  def _decode(self, ids: list[int]) -> str:
    parts = []
    # The bytes of one character may be several tokens, but the package would take added tokens,
    # too, for bytes.
    for added, group in itertools.groupby(ids, lambda number: number >= self._first_added):
      run = list(group)
      parts.append("".join(map(self.piece, run)) if added else self._tokenizer.decode(run))
    return "".join(parts)

  def _pieces(self, text: str) -> list[str]:
    return self._tokenizer.encode(text).tokens

  def _model(self) -> dict[str, Any]:
    return {"pieces": self._pieces_of_gpt2, "merges": self._merges}


def read_gpt2_tokenizer(folder: str | Path, special_tokens: Iterable[str] = ()) -> Gpt2Tokenizer:
  """GPT-2's tokenizer with further tokens.

  Args:
    folder: holds `vocab.json` and `merges.txt`, either of them also gzipped (`vocab.json.gz`), or
      else `tokenizer.json`, which has both; may start with an environment variable.
    special_tokens: tokens that are never split; they get the ids after GPT-2's, in this order.

  Raises:
    UserError: a file is missing or damaged, the two do not belong together, a special token is in
      the vocabulary, or the package `tokenizers` is missing.
  """
  path = expand_folder(str(folder))
  whole = (path / WHOLE).is_file() and not any(path.glob(f"{VOCAB}*"))
  pieces, merges = _read_whole(path / WHOLE) if whole else _read_parts(path)
  try:
    return Gpt2Tokenizer(pieces, merges, special_tokens)
  except UserError as error:
    raise UserError(f"The tokenizer in {path} cannot be used: {error}") from error


def _read_parts(folder: Path) -> tuple[list[str], list[str]]:
  """Pieces in the order of their ids, and merges."""
  path = find_file(folder, VOCAB)
  text = "\n".join(read_lines(path))
  try:
    vocab = parse_json(text)
  except ValueError as error:
    raise UserError(f"{path} is no JSON ({error}). {_REMEDY}") from error
  merges = read_lines(find_file(folder, MERGES))
  return _in_order(vocab, path), merges[merges[0].startswith("#version") :]


def _read_whole(path: Path) -> tuple[list[str], list[str]]:
  """The same from the file that holds a whole tokenizer, whose merges may be pairs."""
  try:
    model = parse_json(read_bounded(path, MOST).decode("utf-8"), size=MOST)["model"]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    check(model["type"] == "BPE", f"its type is {model['type']!r}, not 'BPE'")
    vocab = model["vocab"]
  except (OSError, ValueError, KeyError, TypeError, UserError) as error:
    raise UserError(
      f"{path} holds no tokenizer of byte pairs ({error}). Copy the one of the model again."
    ) from error
  return _in_order(vocab, path), merges


def _in_order(vocab: Any, path: Path) -> list[str]:
  """The vocabulary in the order of its ids."""
  whole = isinstance(vocab, dict) and all(type(number) is int for number in vocab.values())
  check(
    whole and sorted(vocab.values()) == list(range(len(vocab))),
    f"{path} does not map tokens to the ids from 0 on, each of them once. {_REMEDY}",
  )
  return sorted(vocab, key=vocab.__getitem__)


def _check(pieces: list[str], merges: list[str], alphabet: Iterable[str]) -> None:
  """Raises a `UserError` where a merge or the token that it makes is missing, or a byte."""
  known = set(pieces)
  check(
    len(known) == len(pieces) and END in known,
    f"{VOCAB} has no {END}, or a token twice, so it is not GPT-2's. {_REMEDY}",
  )
  lacking = set(alphabet) - known
  check(not lacking, f"{VOCAB} lacks {len(lacking)} of the 256 bytes. {_REMEDY}")
  made = set(alphabet)
  for number, merge in enumerate(merges, start=1):
    parts = merge.split(" ")
    made.add("".join(parts))
    check(
      len(parts) == 2 and known.issuperset((*parts, "".join(parts))),
      f"Merge {number} in {MERGES} is {merge!r}; it must be two tokens of {VOCAB} with a space"
      f" between them, which make a third. {_REMEDY}",
    )
  odd = sorted(piece for piece in known - made if not re.fullmatch("<.*>", piece))
  check(
    not odd,
    f"No merge in {MERGES} makes {len(odd)} of the tokens in {VOCAB}, such as {odd[:3]}; the file"
    f" was cut, or belongs to another vocabulary. {_REMEDY}",
  )
