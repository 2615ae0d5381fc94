"""A decoder of equal layers, shaped as GPT-2: what modulated models are compared with.

Its layers read tokens, as a language model, or vectors, as a regressor.
"""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Activation, Dropout, layer_norm
from compmod_jax.layers.context import AttentionMask, Context, PositionIds
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.layers.output import OutputHead, OutputLayer
from compmod_jax.layers.positions import (
  ModelPositions,
  PositionLabels,
  RelativeBiasConfig,
  check_sliding_window,
  label,
)
from compmod_jax.layers.stack import Stack, TextStackConfig
from compmod_jax.layers.systematic import SystematicConfig
from compmod_jax.models.base import ModelConfig, Side
from compmod_jax.models.routing_record import record_step, routing_cache
from compmod_jax.models.text import (
  Blocks,
  OutputLayers,
  Text,
  TextOutput,
  check_text,
  embed,
  joined,
  positions_of,
)
from compmod_jax.models.text_pass import TextPass, advanced, initial_state

DECODER = "decoder"
_STDDEV = 0.02  # of fresh embeddings


@dataclasses.dataclass(frozen=True)
class DecoderConfig(RelativeBiasConfig, SystematicConfig, TextStackConfig, ModelConfig):
  """Sizes and options of a decoder; the defaults are those of GPT-2 Small.

  Source: Radford et al. 2019, table 2.
  """

  decoder_layers: int = 12
  """Layers, normalised before."""
  compete: tuple[Literal["decoder_self"], ...] = ()
  """Kinds of attention whose heads compete."""
  tied: bool = True
  """The output layer is the embeddings', without a bias; else it has weights of its own."""
  positions: ModelPositions = "learned"
  """How positions are known; see `layers.positions`."""
  sliding_window: int = 0
  """Positions that self-attention reads at most where later ones are hidden, the newest ones, its
  own included (Beltagy et al. 2020); 0: all before."""
  scale_embeddings: bool = False
  """Token vectors have standard deviation 1/sqrt(dim) at first and are multiplied by sqrt(dim);
  else they have 0.02 and are not."""
  dim: int = 768
  """Model width, a multiple of `heads`."""
  heads: int = 12
  """Attention heads of every layer."""
  head_dim: int | None = None
  """Width of every head; none: dim / heads."""
  ffn_dim: int = 3072
  """Width of the feed-forward networks' hidden layer."""
  activation: Activation = "gelu_tanh"
  """Nonlinearity of the feed-forward networks."""
  max_length: int = 1024
  """Most tokens of a text."""
  dropout: float = 0.1
  """Dropout on embedding sums and sub-layer outputs."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", decoder_layers=1)
    super().__post_init__()
    self.check_relative_bias()
    check_sliding_window(self.sliding_window)

  def sides(self) -> tuple[str, ...]:
    """The decoder."""
    return (DECODER,)

  def last_side(self, task: str) -> str:
    """The decoder, whatever the task."""
    return DECODER

  def layers(self, side: str) -> int:
    """Layers of the decoder."""
    return self.decoder_layers

  def decoder(self, vocab: int, pad: int) -> "DecoderLM":
    """The module."""
    return DecoderLM(self, vocab, pad)

  def regressor(self, outputs: int) -> "DecoderRegressor":
    """The module for sequences of vectors, where `tied` and `scale_embeddings` mean nothing."""
    return DecoderRegressor(self, outputs)

  def seq2seq(self, source_vocab: int, target_vocab: int, pad: int) -> "PairDecoder":
    """The module that reads a source and then its target.

    Raises:
      UserError: there are two vocabularies, or the output layer has weights of its own.
    """
    errors.check(
      self.tied,
      "model.tied is False, but a decoder that writes targets has the vectors of its tokens as its"
      " output layer, too. Leave model.tied out.",
    )
    errors.check(
      source_vocab == target_vocab,
      f"A decoder reads source and target with the same vectors, but the vocabularies have"
      f" {source_vocab} and {target_vocab} tokens. Use a joint tokenizer (leave"
      " task.target_tokenizer out).",
    )
    return PairDecoder(self, target_vocab, pad)

  def side_at(self, site: str) -> Side:
    """Of pairs: positions of both, but for the logits."""
    return "target" if site == "logits" else "both"

  def room_for_target(self, source_time: int) -> int:
    """What sources leave of the model's positions."""
    return self.max_length - source_time

  def describe(self) -> str:
    """Sizes and competition, in a few words."""
    return (
      f"{self.decoder_layers} layers of width {self.dim} and {self.heads} heads"
      f" ({self.describe_competition()})"
    )


class DecoderLM(nn.Module):
  """GPT-2's decoder, with competition in any layer.

  Takes texts as `Nemot` does; auxiliary tokens and tasks mean nothing to it.

  Sites: `decoder/layer_<i>/...` (see `Layer` and `Attention`), `decoder/output` and `logits`.

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
    pad: the token that marks padding.
  """

  config: DecoderConfig
  vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings, layers and head."""
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    plain = None if c.scale_embeddings else _STDDEV
    self.embedding = Embedding(self.vocab, c.dim, dtype, stddev=plain, scaled=c.scale_embeddings)
    self.positions = PositionTable(c.positions, c.random_positions or c.max_length, c.dim, dtype)
    self.labels = PositionLabels(c.random_positions, c.max_length)
    self.drop = Dropout(c.dropout)
    self.decoder = Stack(c, DECODER, "pre")
    self.output_norm = layer_norm(dtype, c.norm_epsilon)
    if not c.tied:
      self.head = OutputHead(self.vocab, c.dim, dtype)

  def __call__(
    self,
    text: Text,
    blocks: Blocks = (),
    *,
    causal: bool = True,
    vanilla_logits: bool = False,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> TextOutput:
    """Logits at every position; see `Nemot`.

    Args:
      text: the batch.
      blocks: of no importance, and may be left out.
      causal: decoder mode; else every token sees the whole text.
      vanilla_logits: of no importance: there is one head.
      deterministic: no dropout.
      intermediates: sites to read or change.

    Raises:
      UserError: texts that are too long.
    """
    layers = self.output_layers(
      text, blocks, causal=causal, deterministic=deterministic, intermediates=intermediates
    )
    return layers.formed(intermediates)

  def output_layers(
    self,
    text: Text,
    blocks: Blocks = (),
    *,
    causal: bool = True,
    vanilla_logits: bool = False,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> OutputLayers:
    """What `__call__` makes the logits of, given the same."""
    hidden = self.hidden(
      text, blocks, causal=causal, deterministic=deterministic, intermediates=intermediates
    )
    return OutputLayers(self._output_layer(hidden))

  def hidden(
    self,
    text: Text,
    blocks: Blocks = (),
    *,
    causal: bool = True,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """What the output layer reads, given the same."""
    check_text(text, blocks or [("", len(text.tokens))], longest=self.config.max_length)
    labels = self._labels(text, deterministic)
    run = TextPass(
      text.tokens != self.pad,
      text.segments,
      labels,
      causal=causal,
      deterministic=deterministic,
      intermediates=intermediates,
    )
    return self._hidden(run, embed(text, self.embedding, self.positions, labels))

  def prefill(
    self, text: Text, task: str = "", *, beams: int, length: int, intermediates: Intermediates = OFF
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts; see `Nemot.prefill`."""
    longest = self.config.max_length
    check_text(text, [(task, len(text.tokens))], longest=longest, steps=length)
    state = initial_state(text, self.pad, [(self.decoder, 0)], beams=beams, length=length)
    real, labels = text.tokens != self.pad, self._labels(text)
    run = TextPass(real, text.segments, labels, state=state, intermediates=intermediates)
    run(self.decoder, embed(text, self.embedding, self.positions, labels))
    return state

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    task: str = "",
    *,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    state = advanced(cache, tokens)
    c, place = self.config, state["first"] + state["position"]
    place = label(place, c.random_positions, c.max_length)
    x = self.positions.add(self.embedding(tokens), place)
    real = state["prompt"][:, 0, 0]
    run = TextPass(real, state=state, newest=True, intermediates=intermediates)
    logits = intermediates("logits", self._output_layer(self._hidden(run, x)).logits())
    return logits, {**state, "position": state["position"] + 1}

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts."""
    return self.config.routing_sites()

  def _labels(self, text: Text, deterministic: bool = True) -> Int[Array, "#batch time"] | None:
    """Labels of positions in place of their numbers; or none."""
    if not self.config.random_positions:
      return None
    numbers = positions_of(text.segments, text.tokens.shape[1])
    return self.labels(text.tokens != self.pad, numbers, deterministic=deterministic)

  def _hidden(self, run: TextPass, x: Array) -> Float[Array, "batch positions embed"]:
    x = self.drop(x, deterministic=run.deterministic)
    x = self.output_norm(run(self.decoder, x))
    return run.intermediates(f"{DECODER}/output", x)

  def _output_layer(self, hidden: Float[Array, "batch positions embed"]) -> OutputLayer:
    return self.embedding.output(hidden) if self.config.tied else self.head(hidden)


class PairDecoder(nn.Module):
  """A `DecoderLM` that reads a source and then writes its target; it has the same parameters.

  Source and target are one text, the target right behind the last token of the source, so that a
  target looks up the source as it looks up itself. Nothing reads a later position, of the source
  either.

  Sites: those of `DecoderLM`, `decoder/...` at positions of the source and then of the target, as
  `joined` has them; `logits` at those of the target.

  Attributes:
    config: sizes and options.
    vocab: number of tokens, of source and target alike.
    pad: the token that marks padding, number 0.

  Source: Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", section 4.2.3.
  """

  config: DecoderConfig
  vocab: int
  pad: int = 0

  def setup(self):
    """Makes the decoder."""
    self.lm = DecoderLM(self.config, self.vocab, self.pad)
    nn.share_scope(self, self.lm)

  def __call__(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits of the token that follows each target position.

    Args:
      source: source tokens, padded at the end.
      target: target tokens shifted right (the first is the start token), padded at the end; both
        have at most as many tokens together as the model has positions.
      deterministic: no dropout.
      intermediates: sites to read or change.
    """
    options = {"deterministic": deterministic, "intermediates": intermediates}
    return intermediates("logits", self.output_layer(source, target, **options).logits())

  def output_layer(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> OutputLayer:
    """What `__call__` makes the logits of, given the same."""
    lengths = jnp.sum(source != self.pad, axis=1)
    text = Text(joined(source, target, lengths, self.config.max_length))
    hidden = self.lm.hidden(text, deterministic=deterministic, intermediates=intermediates)
    places = lengths[:, None] + jnp.arange(target.shape[1])[None]
    of_target = jnp.take_along_axis(hidden, places[..., None], axis=1, mode="clip")
    return self.lm.embedding.output(of_target)

  def prefill(
    self,
    source: Int[Array, "batch source_time"],
    *,
    beams: int,
    length: int,
    routing: bool = False,
    intermediates: Intermediates = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding starts; see `Seq2Seq.prefill`."""
    state = self.lm.prefill(Text(source), beams=beams, length=length, intermediates=intermediates)
    shape = (len(source), beams, length)
    return state | {"routing": routing_cache(self.config, shape) if routing else {}}

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""

    def run(record: Intermediates) -> tuple[jax.Array, dict[str, Any]]:
      return self.lm.step(cache, tokens, intermediates=record)

    return record_step(run, cache, intermediates)


class DecoderRegressor(nn.Module):
  r"""The same layers on vectors, with a linear layer at both ends.

  .. math:: y = W\, \mathrm{LN}(\mathrm{layers}(V x + c))_T + b

  for the last position T. Positions, of whatever kind, count from 0.

  Sites: `decoder/layer_<i>/...`, `decoder/output` [batch, time, embed], `logits` [batch, outputs].

  Attributes:
    config: sizes and options.
    outputs: numbers of each sequence.
  """

  config: DecoderConfig
  outputs: int

  def setup(self):
    """Makes both linear layers, positions and decoder."""
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    lecun = nn.initializers.lecun_normal()
    self.vectors = nn.Dense(c.dim, dtype=dtype, kernel_init=logical(lecun, None, "embed"))
    self.positions = PositionTable(c.positions, c.random_positions or c.max_length, c.dim, dtype)
    self.labels = PositionLabels(c.random_positions, c.max_length)
    self.drop = Dropout(c.dropout)
    self.decoder = Stack(c, DECODER, "pre", bidirectional=True)
    self.output_norm = layer_norm(dtype, c.norm_epsilon)
    self.head = nn.Dense(self.outputs, kernel_init=logical(lecun, "embed", "units"))

  def __call__(
    self,
    inputs: Float[Array, "batch time width"],
    *,
    causal: bool = True,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch outputs"]:
    """The numbers, float32.

    Args:
      inputs: sequences of one length.
      causal: hide later positions.
      deterministic: no dropout.
      intermediates: sites to read or change.

    Raises:
      UserError: sequences that are too long.
    """
    c, (batch, time, _) = self.config, inputs.shape
    errors.check(
      time <= c.max_length,
      f"A sequence has {time} vectors, but the model has positions for {c.max_length}; shorten it"
      " or raise model.max_length.",
    )
    labels, position_ids = None, None
    if c.random_positions:
      labels = self.labels(jnp.ones((batch, time), bool), deterministic=deterministic)
      position_ids = PositionIds(labels, labels, c.random_positions)
    ctx = Context(
      mask=AttentionMask(causal, window=c.sliding_window),
      position_ids=position_ids,
      deterministic=deterministic,
      intermediates=intermediates.scope(DECODER),
    )
    x = self.positions.add(over_rows(self.vectors, inputs), labels)
    x, _ = self.decoder(self.drop(x, deterministic=deterministic), ctx=ctx)
    x = ctx.intermediates("output", self.output_norm(x))
    return intermediates("logits", self.head(x[:, -1].astype(jnp.float32)))
