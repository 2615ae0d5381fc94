"""Continues texts with a language model: batching, jitted search after a prompt, stop strings."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import Edit
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.tokenizers import Tokenizer
from compmod_jax.decoding import (
  DecodeConfig,
  decode,
  recoding,
  stop_table,
  stopping,
  with_products,
)
from compmod_jax.decoding.loops import Growth, lengths_of_growth, room_for
from compmod_jax.decoding.recoding import Searched
from compmod_jax.decoding.types import Cache, Decoded
from compmod_jax.models.base import ModelConfig
from compmod_jax.tasks.base import Batch, NoSearch, Sharing, Status, silent
from compmod_jax.tasks.scorer import Scorer

_SHORTEST = 8  # padded length of the shortest prompts
_ROWS = 32  # most prompts of a batch
_MOST = 4096  # tokens of a prompt, where the model has no positions: they are read one by one
_LENGTH = 50  # most tokens of a continuation, unless another number is given

R = TypeVar("R")


class Generated(NamedTuple):
  """How a text may go on.

  Attributes:
    prompt: the text that was given.
    text: what follows it, up to the end or a stop string; begins with a space where a word begins.
    score: log-probability in nats of all that was generated, what stopped it included, over
      length ** length_penalty.
    tokens: token numbers, int32: the end token included, and those of the stop string.
    reason: `end`: the end token came; `stop`: a stop string; `length`: neither did in time.
    entropy: of the distributions of all its steps together in nats, before and after recoding, if
      steps of a decoder are recoded.
  """

  prompt: str
  text: str
  score: float
  tokens: np.ndarray
  reason: Literal["end", "stop", "length"]
  entropy: np.ndarray | None = None

  @property
  def whole(self) -> str:
    """The prompt and what follows it."""
    double = self.prompt[-1:].isspace() and self.text.startswith(" ")
    return self.prompt + (self.text[1:] if double else self.text)


class Prompts(NamedTuple):
  """A batch of prompts: an end token, which starts every text, and the text.

  Attributes:
    tokens: all but the last token of each, padded at the end.
    lengths: how many these are.
    last: the last tokens.
  """

  tokens: Int[Array, "batch time"]
  lengths: Int[Array, " batch"]
  last: Int[Array, " batch"]


@runtime_checkable
class ContinuesTexts(Protocol):
  """What generating texts needs of a model besides its configuration."""

  @property
  def config(self) -> ModelConfig:
    """The configuration of the module."""
    ...

  @property
  def edits(self) -> Mapping[str, Edit]:
    """Site -> change of that activation, wherever the model runs."""
    ...

  def prepare(
    self, params: Params, prompts: Prompts, config: DecodeConfig, length: int
  ) -> Searched:
    """The step, the cache after the prompts, and what is recorded, for `length` steps."""
    ...

  def jit(self, function: Callable[..., R], **static: Hashable) -> Callable[..., R]:
    """See `TaskModel.jit`."""
    ...


class TextGenerator(NoSearch):
  """Continues texts; one compiled search for each shape of a batch.

  Control tokens other than the end, and rows that pad the vocabulary, are never generated.

  Attributes:
    tokenizer: from text to tokens and back.
    scorer: scores given texts.
  """

  def __init__(self, tokenizer: Tokenizer, scorer: Scorer):
    self.tokenizer, self.scorer = tokenizer, scorer
    self._tables = dict[str, np.ndarray]()
    self._pieces: list[str] = []

  def __call__(
    self,
    model: ContinuesTexts,
    params: Params,
    prompts: Sequence[str],
    config: DecodeConfig,
    *,
    length: int | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
    sharing: Sharing = Sharing(),
    status: Status = silent,
  ) -> list[list[Generated]]:
    """The n best continuations of every prompt, in the prompts' order.

    Of a prompt that leaves no room for `length` tokens, the newest tokens are kept; `too_long` says
    of which. What is drawn depends on the seed and the prompt alone: equal prompts get equal draws.

    Args:
      model: the model.
      params: its parameters.
      prompts: raw text, each read from the start; a blank one starts a text.
      config: how to search.
      length: most tokens of a continuation, at least 1; None: 50, or half the model's positions
        if these are fewer.
      stop: a continuation ends before the first of these strings.
      seed: of the method `sample`.
      sharing: how batches are laid over devices.
      status: shows progress.

    Raises:
      UserError: `length` is not positive or leaves no position for a prompt, a stop string is
        empty, or the model cannot recode as the configuration says.
    """
    length = self.usual_length(model) if length is None else length
    room = self._room(model, length)
    ids = [_cut(one, room) for one in self.encode(prompts)]
    tables = tuple(self._table(string) for string in dict.fromkeys(stop))
    found: dict[int, list[Generated]] = {}
    # A search counts the end that follows a stop string: without it, another may be the best.
    whole = dataclasses.replace(config, n_best=config.width) if stop else config
    search = model.jit(_search, tokenizer=self.tokenizer, config=whole, length=length)
    for batch in self._batches(ids, room, sharing.multiple):
      key = jax.random.key(seed)
      out = fetch(search(params, sharing.place(batch), key, tables))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        number = int(batch["index"][row])
        some = self._continuations(prompts[number], ids[number], out, row, config, stop)
        found[number] = some[: config.n_best]
      status("generated texts", len(found), len(prompts))
    return [found[number] for number in range(len(prompts))]

  def usual_length(self, model: ContinuesTexts) -> int:
    """Most tokens of a continuation where no number is given."""
    longest = _longest(model)
    return _LENGTH if longest is None else max(1, min(_LENGTH, longest // 2))

  def encode(self, prompts: Sequence[str]) -> list[list[int]]:
    """Token numbers of every prompt behind an end token."""
    return [[self.tokenizer.eos, *ids] for ids in self.tokenizer.encode_batch(list(prompts))]

  def too_long(
    self, model: ContinuesTexts, prompts: Sequence[str], length: int | None = None
  ) -> list[int]:
    """Numbers of the prompts of which the first tokens are left out, from 0."""
    most = self.most(model, length)
    return [number for number, one in enumerate(self.encode(prompts)) if len(one) > most + 1]

  def most(self, model: ContinuesTexts, length: int | None = None) -> int:
    """Most tokens of a prompt that are read, where `length` are to follow."""
    return self._room(model, self.usual_length(model) if length is None else length) - 1

  def _room(self, model: ContinuesTexts, length: int) -> int:
    """Most tokens of a prompt, the end token at its start included."""
    check(length >= 1, f"length is {length}; it must be at least 1.")
    longest = _longest(model)
    if longest is None:
      return _MOST + 1
    # What is generated last is never read.
    room = longest - length + 1
    check(
      room >= 2,
      f"length is {length}, but the model has positions for {longest} tokens of prompt and"
      f" continuation together; give at most {longest - 1}.",
    )
    return room

  def _table(self, stop: str) -> np.ndarray:
    """The automaton of a stop string over the tokens."""
    if stop not in self._tables:
      if not self._pieces:
        numbers = range(self.tokenizer.vocab_size)
        self._pieces = [self.tokenizer.added_text(number) for number in numbers]
      self._tables[stop] = stop_table(stop, self._pieces)
    return self._tables[stop]

  def _batches(self, ids: list[list[int]], room: int, multiple: int) -> Iterator[Batch]:
    """Prompts of about the same length together, longest first; rows of filler have index -1."""
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(ids):
      edge = _SHORTEST
      while edge < len(one) - 1:
        edge *= 2
      groups.setdefault(min(edge, room - 1), []).append(number)
    for edge in sorted(groups, reverse=True):
      numbers = groups[edge]
      for start in range(0, len(numbers), _ROWS):
        yield self._batch(ids, numbers[start : start + _ROWS], edge, multiple)

  def _batch(self, ids: list[list[int]], numbers: list[int], edge: int, multiple: int) -> Batch:
    rows = 1 << (len(numbers) - 1).bit_length()
    rows = -(-rows // multiple) * multiple
    batch = {
      "tokens": np.full((rows, edge), self.tokenizer.pad, np.int32),
      "lengths": np.zeros(rows, np.int32),
      "last": np.full(rows, self.tokenizer.eos, np.int32),
      "index": np.full(rows, -1, np.int32),
      "draw": np.zeros((rows, 2), np.int32),
    }
    for row, number in enumerate(numbers):
      *first, last = ids[number]
      batch["tokens"][row, : len(first)] = first
      batch["lengths"][row], batch["last"][row], batch["index"][row] = len(first), last, number
      digest = hashlib.sha256(np.asarray(ids[number], "<i4").tobytes()).digest()
      batch["draw"][row] = np.frombuffer(digest[:8], "<i4") & 0x7FFFFFFF
    return batch

  def _continuations(
    self,
    prompt: str,
    ids: list[int],
    found: Decoded,
    row: int,
    config: DecodeConfig,
    stop: Sequence[str],
  ) -> list[Generated]:
    """The continuations of one row of a decoded batch, best first."""
    entropy, result = (found.records or {}).get(recoding.ENTROPY), []
    before = self.tokenizer.decode(ids[1:])
    for n, length in enumerate(found.lengths[row].tolist()):
      tokens = np.asarray(found.tokens[row, n, :length])
      whole = self.tokenizer.decode([*ids[1:], *tokens])
      text = whole[len(before) :]
      if not whole.startswith(before):  # the end of one character and its beginning
        text = self.tokenizer.decode(tokens)
      score = float(found.scores[row, n])
      ended = bool(length) and tokens[-1] == self.tokenizer.eos
      reason = "end" if ended else "length"
      produced = tokens[:-1] if ended else tokens
      pieces = "".join(self._pieces[token] for token in produced) if stop else ""
      stopped = any(string in pieces for string in stop)
      if ended and stopped:  # the search's own end, which it counted
        tokens, score = produced, score * (length / (length - 1)) ** config.length_penalty
      places = [text.find(string) for string in stop if string in text]
      if stopped or places:
        text, reason = text[: min(places, default=None)], "stop"
      own = None if entropy is None else entropy[row, n]
      result.append(Generated(prompt, text, score, tokens, reason, own))
    return sorted(result, key=lambda one: -one.score) if stop else result


@with_products
def _search(
  model: ContinuesTexts,
  params: Params,
  batch: Batch,
  key: jax.Array,
  tables: tuple[jax.Array, ...],
  *,
  tokenizer: Tokenizer,
  config: DecodeConfig,
  length: int,
) -> Decoded:
  """The best continuations of a batch; see `decode`."""
  prompts = Prompts(batch["tokens"], batch["lengths"], batch["last"])
  prepare = functools.partial(model.prepare, params, prompts, config)
  lengths = (length,) if model.edits else lengths_of_growth(length)
  one, rows = prepare(lengths[0]), len(batch["index"])

  def grown(cache: Cache, length: int) -> Cache:
    return {
      **cache,
      "model": room_for(cache["model"], jax.eval_shape(lambda: prepare(length).cache)),
    }

  step, cache = stopping(
    one.step, one.cache, tables, batch=rows, beams=config.width, eos=tokenizer.eos
  )
  fold = jax.random.fold_in
  keys = jax.vmap(lambda draw: fold(fold(key, draw[0]), draw[1]))(batch["draw"])
  return decode(
    step,
    cache,
    config,
    batch=rows,
    max_length=length,
    limit=jnp.where(batch["index"] >= 0, length, 0),
    bos=prompts.last,
    eos=tokenizer.eos,
    pad=tokenizer.pad,
    forbidden=tokenizer.never_produced,
    cut=True,
    rng=keys,
    record=(lambda c: {name: c["model"][name] for name in one.kept}) if one.kept else None,
    growth=Growth(lengths, grown),
  )


def _longest(model: ContinuesTexts) -> int | None:
  """The model's positions; None where there are none."""
  return getattr(model.config, "max_length", None)


def _cut(ids: list[int], room: int) -> list[int]:
  """The start token and the newest of the others, `room` in all."""
  return ids if len(ids) <= room else [ids[0], *ids[len(ids) - room + 1 :]]
