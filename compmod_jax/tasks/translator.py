"""From sentences to translations: batching, jitted search, detokenisation."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.intermediates import OFF, Edit, Intermediates
from compmod_jax.core.sharding import fetch
from compmod_jax.core.types import Params
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizers import BOS, EOS, PAD, Tokenizer
from compmod_jax.decoding import DecodeConfig, decode, recoding, with_products
from compmod_jax.decoding.loops import Growth, lengths_of_growth, room_for
from compmod_jax.decoding.types import Cache, Decoded
from compmod_jax.models.base import Seq2Seq
from compmod_jax.tasks.base import Batch, Sharing, Status, TaskModel, silent
from compmod_jax.tasks.scorer import PairScorer

Edits = Mapping[str, Edit] | Callable[[Batch], Mapping[str, Edit]]
"""Changes of activations by the names of their sites, each a `jax.tree_util.Partial`; or what makes
them of a batch: `source` tokens, and `index`, the numbers of its rows' sentences, -1 for none."""


class Hypothesis(NamedTuple):
  """One output of decoding.

  Attributes:
    text: detokenised.
    score: log-probability in nats over length ** length_penalty.
    tokens: token numbers without padding, end of sentence included.
    routing: site -> weights [tokens, heads] of every routed decoder module, if asked for.
    entropy: of the distributions of all its steps together in nats, before and after recoding, if
      steps are recoded.
  """

  text: str
  score: float
  tokens: np.ndarray
  routing: dict[str, np.ndarray]
  entropy: np.ndarray | None = None


@runtime_checkable
class Pairs(Protocol):
  """What translating needs of a data set."""

  source_tokenizer: Tokenizer
  target_tokenizer: Tokenizer

  @property
  def batch(self) -> BatchConfig:
    """Padded lengths, and padded source positions of a batch."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
  """Translates sentences; one compiled search for each padded length and way to search.

  While it decodes, edited sites of the decoder hold one step of all beams.

  Attributes:
    data: tokenizers and padded lengths.
    decode: how to search unless a call says otherwise.
  """

  data: Pairs
  decode: DecodeConfig

  def decoding(self, decode: DecodeConfig) -> "Translator":
    """The same translator, which searches in another way."""
    return dataclasses.replace(self, decode=decode)

  @functools.cached_property
  def scorer(self) -> PairScorer:
    """Scores given translations; see `PairScorer`."""
    return PairScorer(self.data.source_tokenizer, self.data.target_tokenizer, self.data.batch)

  def __call__(
    self,
    model: TaskModel[Seq2Seq],
    params: Params,
    sentences: Sequence[str],
    config: DecodeConfig | None = None,
    *,
    references: Sequence[str] | None = None,
    sharing: Sharing = Sharing(),
    routing: bool = False,
    edits: Edits | None = None,
    rng: jax.Array | None = None,
    status: Status = silent,
    name: str = "sentences",
  ) -> list[list[Hypothesis]]:
    """The n best translations of every sentence, in the sentences' order.

    Sources over the length ceiling are cut there. A blank sentence has one empty hypothesis.

    Args:
      model: the model.
      params: its parameters.
      sentences: raw source text.
      config: how to search; `decode` if not given.
      references: outputs that are expected, where they are known. Sentences whose references are
        alike in length are searched together, so that few rows of a batch wait for its longest.
        What is found is the same up to rounding, but for samples, which are drawn by the batch.
      sharing: how batches are laid over devices.
      routing: also return the router weights of every step.
      edits: further ones; arguments of the compiled search, so that the same functions with other
        arrays are not compiled again.
      rng: key for sampling.
      status: shows progress.
      name: what the progress display calls the sentences.
    """
    config = self.decode if config is None else config
    rng = jax.random.key(0) if rng is None else rng
    nothing = Hypothesis("", 0.0, np.zeros(0, np.int32), {})
    results: list[list[Hypothesis]] = [[nothing] for _ in sentences]
    done = 0
    # What is read or changed in a step is of all rows, and on devices rows stay where they are.
    plain = not (routing or edits or model.edits) and config.recode_layer is None
    for number, batch in enumerate(self._batches(sentences, sharing.multiple, references)):
      longest = int(config.max_ratio * batch["source"].shape[1]) + config.max_extra
      search = model.jit(
        _search,
        target=self.data.target_tokenizer,
        config=config,
        longest=min(longest, model.config.room_for_target(batch["source"].shape[1])),
        routing=routing,
        narrow=plain and sharing.multiple == 1,
        grow=plain,
      )
      key = jax.random.fold_in(rng, number)
      changes = edits if edits is None or isinstance(edits, Mapping) else edits(batch)
      found = fetch(search(params, sharing.place(batch), key, dict(changes or {})))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        results[batch["index"][row]] = self._hypotheses(found, row)
        done += 1
      status(f"translating {name}", done, len(sentences))
    return results

  def _batches(
    self, sentences: Sequence[str], multiple: int, references: Sequence[str] | None = None
  ) -> Iterator[dict[str, np.ndarray]]:
    """Batches of source sentences; blank ones are left out."""
    encoded = self.data.source_tokenizer.encode_batch(list(sentences))
    kept = [i for i, ids in enumerate(encoded) if ids and not sentences[i].isspace()]
    limit = self.data.batch.longest - 1
    columns = {"source": [np.asarray([*encoded[i][:limit], EOS], np.int32) for i in kept]}
    examples = Examples(columns=columns, index=np.asarray(kept, np.int32))
    # Many sentences fill batches whose shapes other calls have, too, and were compiled for.
    few = len(kept) * self.data.batch.longest <= self.data.batch.tokens
    work = None
    if references is not None:
      expected = self.data.target_tokenizer.encode_batch([references[i] for i in kept])
      work = np.asarray([len(ids) for ids in expected])
    return eval_batches(examples, self.data.batch, multiple=multiple, fit=few, work=work)

  def _hypotheses(self, found: Decoded, row: int) -> list[Hypothesis]:
    """The hypotheses of one row of a decoded batch."""
    result = []
    for n, length in enumerate(found.lengths[row]):
      tokens = np.asarray(found.tokens[row, n, :length])
      records = found.records or {}
      weights = records.get("routing", {})
      routing = {site: kept[row, n, :length] for site, kept in weights.items()}
      entropy = records[recoding.ENTROPY][row, n] if recoding.ENTROPY in records else None
      text = self.data.target_tokenizer.decode(tokens.tolist())
      result.append(Hypothesis(text, float(found.scores[row, n]), tokens, routing, entropy))
    return result


@with_products
def _search(
  model: TaskModel[Seq2Seq],
  params: Params,
  batch: Batch,
  rng: jax.Array,
  edits: dict[str, Edit],
  *,
  target: Tokenizer,
  config: DecodeConfig,
  longest: int,
  routing: bool,
  narrow: bool,
  grow: bool,
) -> Decoded:
  """The best translations of a batch, of at most `longest` tokens; see `decode`."""
  source, apply = batch["source"], functools.partial(model.module.apply, {"params": params})
  intermediates, real = OFF.editing(model.edits).editing(edits), source != PAD

  def prefill(length: int) -> Cache:
    return apply(
      source,
      beams=config.width,
      length=length,
      routing=routing,
      intermediates=intermediates.knowing(lambda site: real).apart(),
      method="prefill",
    )

  def grown(cache: Cache, length: int) -> Cache:
    return room_for(cache, jax.eval_shape(lambda: prefill(length)))

  lengths = lengths_of_growth(longest) if grow else (longest,)
  cache = prefill(lengths[0])

  def step(
    cache: Cache, tokens: jax.Array, intermediates: Intermediates
  ) -> tuple[jax.Array, Cache]:
    return apply(cache, tokens, intermediates=intermediates, method="step")

  intermediates = recoding.knowing_rows(intermediates, real.any(axis=1), config)
  stack = functools.partial(model.config.decoding_stack, "")
  one = recoding.prepared(step, cache, intermediates, config, batch=len(source), stack=stack)
  return decode(
    one.step,
    one.cache,
    config,
    batch=len(source),
    max_length=longest,
    limit=config.limits(jnp.sum(real, axis=1), longest),
    bos=BOS,
    eos=EOS,
    pad=PAD,
    forbidden=target.never_produced,
    rng=rng,
    record=one.recorded("routing") if routing else one.recorded(),
    narrow=narrow,
    growth=Growth(lengths, grown),
  )


class Output(Protocol):
  """An output of decoding: a `Hypothesis`, an `Answer`, a `Generated`."""

  @property
  def tokens(self) -> np.ndarray:
    """Token numbers."""
    ...

  @property
  def entropy(self) -> np.ndarray | None:
    """Of all its steps together, before and after recoding, if steps are recoded."""
    ...


def mean_entropy(hypotheses: Sequence[Sequence[Output]]) -> dict[str, float]:
  """Mean entropy of a step of the best outputs, `entropy_before` recoding and `entropy` after.

  In nats; nothing where no step was recoded.
  """
  sums, tokens = np.zeros(2), 0
  for best in (one[0] for one in hypotheses):
    if best.entropy is not None:
      sums += best.entropy
      tokens += len(best.tokens)
  if not tokens:
    return {}
  before, after = sums / tokens
  return {"entropy_before": float(before), "entropy": float(after)}
