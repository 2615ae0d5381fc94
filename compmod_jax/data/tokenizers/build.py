"""Making tokenizers of every kind: trained, from a cache, from files, from saved bytes."""

import base64
import collections
import dataclasses
import hashlib
import io
import itertools
import json
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compmod_jax.core import durable, extras
from compmod_jax.core.errors import UserError, check, check_choice
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data.tokenizers.gpt2 import Gpt2Tokenizer, read_gpt2_tokenizer
from compmod_jax.data.tokenizers.huggingface import HuggingFaceTokenizer
from compmod_jax.data.tokenizers.vocabulary import (
  BOS,
  CONTROLS,
  EOS,
  FORMAT,
  LOOKALIKES,
  OWN,
  PAD,
  UNK,
  Own,
  SentencePiece,
  Tokenizer,
  TokenizerConfig,
  Words,
)


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
  """Trains a tokenizer; the same texts and settings always give the same one.

  Args:
    texts: training sentences only, never those of validation or test. GPT-2's tokenizer needs none.
    config: kind and size. A text that supports fewer than `vocab_size` tokens gives fewer.

  Raises:
    UserError: no text, a vocabulary too small for the text's characters, or GPT-2's files are
      missing or damaged.
  """
  if config.kind == "gpt2":
    return read_gpt2_tokenizer(config.folder, config.special_tokens)
  if config.kind == "words":
    return _train_words(texts, config)
  # Only the text transformation is borrowed from this empty vocabulary.
  clean = Words((), special_tokens=config.special_tokens, lowercase=config.lowercase).normalise
  used = [text for text in map(clean, texts) if text and not text.isspace()]
  check(used, "There is no text to train a tokenizer on: the training split is empty.")
  try:
    model = _train_pieces(used, config)
  except RuntimeError as error:
    characters = len(set("".join(used)))
    raise UserError(
      f"No {config.kind} tokenizer with vocab_size={config.vocab_size} can be trained on this text"
      f" of {len(used)} sentences and {characters} different characters ({error}). vocab_size must"
      " be larger than the number of characters, or character_coverage lower."
    ) from error
  return SentencePiece(
    model,
    kind=config.kind,
    special_tokens=config.special_tokens,
    lowercase=config.lowercase,
  )


_LONG = 1 << 20  # bytes; what has more would be left out without a word
_WORDS, _LETTERS = 1000, _LONG // 5  # of a stretch of it, at most


def _short(text: str) -> Iterable[str]:
  """A text that is not too long for its trainer, or stretches of words of one that is.

  No piece goes over a blank, so that the stretches have the pieces of the text. What has no blanks
  is cut.
  """
  if len(text.encode()) < _LONG:
    yield text
    return
  words = text.split(" ")
  for first in range(0, len(words), _WORDS):
    stretch = " ".join(words[first : first + _WORDS])
    yield from (stretch[at : at + _LETTERS] for at in range(0, len(stretch), _LETTERS))


def _train_pieces(texts: Iterable[str], config: TokenizerConfig) -> bytes:
  with extras.needed():
    import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=itertools.chain.from_iterable(map(_short, texts)),
    model_writer=model,
    model_type=config.kind,
    vocab_size=config.vocab_size,
    character_coverage=config.character_coverage,
    user_defined_symbols=list(config.special_tokens),
    pad_id=PAD,
    unk_id=UNK,
    bos_id=BOS,
    eos_id=EOS,
    # With these two, what is encoded decodes to itself.
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    hard_vocab_limit=False,
    max_sentence_length=_LONG,
    # Sums over threads come out in another order from run to run.
    num_threads=1,
    minloglevel=2,
  )
  return model.getvalue()


def _train_words(texts: Iterable[str], config: TokenizerConfig) -> Words:
  settings = {"special_tokens": config.special_tokens, "lowercase": config.lowercase}
  clean = Words((), **settings).normalise
  counts = collections.Counter(word for text in texts for word in clean(text).split())
  check(counts, "There is no text to train a tokenizer on: the training split is empty.")
  for token in config.special_tokens:
    counts.pop(token, None)
  ranked = sorted(counts, key=lambda word: (-counts[word], word))
  room = config.vocab_size - len(CONTROLS) - len(config.special_tokens)
  return Words(ranked[:room], **settings)


def cached_tokenizer(
  texts: Iterable[str], config: TokenizerConfig, cache_dir: Path | None
) -> Tokenizer:
  """`train_tokenizer`, kept in a file named by a hash of texts, settings and library version.

  A cached file that is damaged is trained again and replaced. Several processes may do this at
  once: files are written whole or not at all. What is not trained is not kept.

  Raises:
    UserError: as `train_tokenizer`; or `cache_dir` cannot be written.
  """
  if cache_dir is None or config.kind == "gpt2":
    return train_tokenizer(texts, config)
  texts = texts if isinstance(texts, Collection) else list(texts)
  path = Path(cache_dir) / f"{_cache_key(texts, config)}.tokenizer"
  tokenizer = _read_cached(path)
  if tokenizer is None:
    tokenizer = train_tokenizer(texts, config)
    try:
      payload = tokenizer.to_bytes()
      digest = hashlib.sha256(payload).hexdigest().encode()
      durable.write(path, [digest + b"\n", payload], shared=True)
    except OSError as error:
      raise UserError(
        f"The tokenizer cannot be cached in {cache_dir} ({error.strerror}); free space there, or"
        " name another folder."
      ) from error
  return tokenizer


def pair_tokenizers(
  sources: Sequence[str],
  targets: Sequence[str],
  config: TokenizerConfig,
  target_config: TokenizerConfig | None = None,
  cache_dir: Path | None = None,
) -> tuple[Tokenizer, Tokenizer]:
  """Tokenizers for the two sides: one and the same, trained on both, without `target_config`.

  Raises:
    UserError: as `cached_tokenizer`; or one is of a kind that is not trained.
  """
  for name, given in (("tokenizer", config), ("target_tokenizer", target_config)):
    check(
      given is None or given.kind != "gpt2",
      f"{name}.kind is 'gpt2', but pairs need the ids 0 to 3 for padding, start and end, which are"
      " other tokens of GPT-2: choose bpe, unigram or words.",
    )
  if target_config is None:
    both = cached_tokenizer([*sources, *targets], config, cache_dir)
    return both, both
  return (
    cached_tokenizer(sources, config, cache_dir),
    cached_tokenizer(targets, target_config, cache_dir),
  )


def tokenizer_from_bytes(data: bytes, trained: TokenizerConfig | None = None) -> Tokenizer:
  """The tokenizer that gave these bytes.

  Bytes of earlier versions do not say which tokens of the corpus are taken for what they mean
  (`own`), and the models that were saved with them have been trained without. Their unknown words
  and numbers become the corpus's all the same, since UNK has never been seen in training; but not
  where the vocabulary was cut to its size: UNK stands for the rarer words there. Boundaries that
  are in such a vocabulary have been trained on as words, and stay.

  Args:
    data: of `Tokenizer.to_bytes`.
    trained: how it was trained, where that is known.

  Raises:
    UserError: the bytes are damaged or of another format.
  """
  try:
    state = parse_json(data)
    check(state["format"] == FORMAT, f"its format is {state['format']!r}, not {FORMAT!r}")
    kind, tokens, lowercase = state["kind"], tuple(state["special_tokens"]), state["lowercase"]
    if kind == "huggingface":
      return HuggingFaceTokenizer(**state["model"])
    if kind == "gpt2":
      return Gpt2Tokenizer(**state["model"], special_tokens=tokens)
    settings = {"special_tokens": tokens, "lowercase": lowercase}
    if kind == "words":
      return Words(state["model"], **settings, own=_own_words(state, trained))
    model = base64.b64decode(state["model"], validate=True)
    return SentencePiece(model, kind=kind, **settings)
  except (ValueError, KeyError, TypeError, RuntimeError) as error:
    raise UserError(
      f"These {len(data)} bytes are not a tokenizer ({error}); the file is damaged, or made by"
      " another version: take it from a good copy or train it again."
    ) from error


def _own_words(state: Mapping[str, Any], trained: TokenizerConfig | None) -> tuple[Own, ...]:
  """What `own` is of a saved vocabulary of words; see `tokenizer_from_bytes`."""
  if "own" in state:
    for kind in state["own"]:
      check_choice("own", kind, OWN)
    return tuple(state["own"])
  if not LOOKALIKES.intersection(state["model"]):
    return OWN
  size = len(CONTROLS) + len(state["special_tokens"]) + len(state["model"])
  return () if trained is not None and size >= trained.vocab_size else ("unknown", "number")


def _cache_key(texts: Iterable[str], config: TokenizerConfig) -> str:
  versions = [FORMAT, version("sentencepiece"), unicodedata.unidata_version]
  head = [versions, dataclasses.asdict(config)]
  digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
  for text in texts:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "big"))  # else "ab", "c" would equal "a", "bc"
    if len(data) >= _LONG:
      digest.update(b"read")  # they were left out of tokenizers that may still lie there
    digest.update(data)
  return digest.hexdigest()


def _read_cached(path: Path) -> Tokenizer | None:
  try:
    digest, _, payload = path.read_bytes().partition(b"\n")
    if digest.decode("ascii", "replace") != hashlib.sha256(payload).hexdigest():
      return None
    return tokenizer_from_bytes(payload)
  except (OSError, UserError):
    return None
