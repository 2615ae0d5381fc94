"""From sentences to translations: batching, jitted search, detokenisation."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.core.sharding import fetch
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.examples import Examples
from compmod_jax.data.pipeline import eval_batches
from compmod_jax.data.tokenizers import BOS, EOS, PAD, Tokenizer
from compmod_jax.decoding import DecodeConfig, decode
from compmod_jax.models.transformer import Transformer
from compmod_jax.tasks import recoded_step
from compmod_jax.tasks.base import Batch, Sharing, Status, silent


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


class Translator:
  """Translates sentences with a model; keeps one compiled search for each padded length.

  Attributes:
    model: the Transformer.
    source: from text to source tokens.
    target: from target tokens to text.
    batch: padded lengths, and padded source positions of a batch.
    taps: the edits under which the model runs; decoder sites hold one step of all beams.
  """

  def __init__(
    self,
    model: Transformer,
    source: Tokenizer,
    target: Tokenizer,
    batch: BatchConfig,
    edits: Mapping[str, Edit] | None = None,
  ):
    self.model, self.source, self.target, self.batch = model, source, target, batch
    self.taps = OFF.editing(edits or {})
    self._searches: dict[Any, Callable[..., Any]] = {}

  def __call__(
    self,
    params: Any,
    sentences: Sequence[str],
    config: DecodeConfig,
    *,
    sharing: Sharing = Sharing(),
    routing: bool = False,
    edits: Mapping[str, Edit] | None = None,
    rng: jax.Array | None = None,
    status: Status = silent,
    name: str = "sentences",
  ) -> list[list[Hypothesis]]:
    """The n best translations of every sentence, in the sentences' order.

    Sources over the length ceiling are cut there. A blank sentence has one empty hypothesis.

    Args:
      params: the model's parameters.
      sentences: raw source text.
      config: how to search.
      sharing: how batches are laid over devices.
      routing: also return the router weights of every step.
      edits: further ones, each a `jax.tree_util.Partial`: arguments of the compiled search, so that
        the same functions with other arrays are not compiled again.
      rng: key for sampling.
      status: shows progress.
      name: what the progress display calls the sentences.
    """
    rng = jax.random.key(0) if rng is None else rng
    nothing = Hypothesis("", 0.0, np.zeros(0, np.int32), {})
    results: list[list[Hypothesis]] = [[nothing] for _ in sentences]
    done = 0
    for number, batch in enumerate(self._batches(sentences, sharing.multiple)):
      search = self._search_for(config, batch["source"].shape[1], routing)
      key = jax.random.fold_in(rng, number)
      found = fetch(search(params, sharing.place(batch), key, dict(edits or {})))
      for row in np.flatnonzero(batch["index"] >= 0).tolist():
        results[batch["index"][row]] = self._hypotheses(found, row)
        done += 1
      status(f"translating {name}", done, len(sentences))
    return results

  def _batches(self, sentences: Sequence[str], multiple: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of source sentences; blank ones are left out."""
    encoded = self.source.encode_batch(list(sentences))
    kept = [i for i, ids in enumerate(encoded) if ids and not sentences[i].isspace()]
    limit = self.batch.longest - 1
    columns = {"source": [np.asarray([*encoded[i][:limit], EOS], np.int32) for i in kept]}
    examples = Examples(columns=columns, index=np.asarray(kept, np.int32))
    return eval_batches(examples, self.batch, multiple=multiple)

  def _search_for(self, config: DecodeConfig, bucket: int, routing: bool) -> Callable[..., Any]:
    """The compiled search for one padded source length."""
    key = (config, bucket, routing)
    if key not in self._searches:
      longest = min(int(config.max_ratio * bucket) + config.max_extra, self.model.config.max_length)
      search = functools.partial(self._search, config=config, longest=longest, routing=routing)
      self._searches[key] = jax.jit(search)
    return self._searches[key]

  def _search(
    self,
    params: Any,
    batch: Batch,
    rng: jax.Array,
    edits: dict[str, Edit],
    *,
    config: DecodeConfig,
    longest: int,
    routing: bool,
  ) -> Any:
    source, apply = batch["source"], functools.partial(self.model.apply, {"params": params})
    taps, real = self.taps.editing(edits), source != PAD
    cache: Any = apply(
      source,
      beams=config.width,
      length=longest,
      routing=routing,
      taps=taps.knowing(lambda site: real).apart(),
      method="prefill",
    )

    def step(cache: Any, tokens: jax.Array, taps: Taps) -> tuple[jax.Array, Any]:
      return apply(cache, tokens, taps=taps, method="step")

    batch_size, layers = source.shape[0], self.model.config.decoder_layers
    taps = recoded_step.knowing_rows(taps, real.any(axis=1), config)
    one = recoded_step.prepared(
      step, cache, taps, config, batch=batch_size, side="decoder", layers=layers
    )
    kept = (*one.kept, "routing") if routing else one.kept
    return decode(
      one.step,
      one.cache,
      config,
      batch=batch_size,
      max_length=longest,
      limit=config.limits(jnp.sum(real, axis=1), longest),
      bos=BOS,
      eos=EOS,
      pad=PAD,
      forbidden=self.target.never_produced,
      rng=rng,
      record=(lambda cache: {name: cache[name] for name in kept}) if kept else None,
    )

  def _hypotheses(self, found: Any, row: int) -> list[Hypothesis]:
    """The hypotheses of one row of a decoded batch."""
    result = []
    for n, length in enumerate(found.lengths[row]):
      tokens = found.tokens[row, n, :length]
      records = found.records or {}
      weights = records.get("routing", {})
      routing = {site: kept[row, n, :length] for site, kept in weights.items()}
      entropy = records[recoded_step.ENTROPY][row, n] if recoded_step.ENTROPY in records else None
      text = self.target.decode(tokens.tolist())
      result.append(Hypothesis(text, float(found.scores[row, n]), tokens, routing, entropy))
    return result


def mean_entropy(hypotheses: Sequence[Sequence[Any]]) -> dict[str, float]:
  """Mean entropy of a step of the best outputs, `entropy_before` recoding and `entropy` after.

  Outputs have `entropy` and `tokens`, as `Hypothesis` does. In nats; nothing where no step was
  recoded.
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
