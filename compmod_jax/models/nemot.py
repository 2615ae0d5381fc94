"""The Neuromodulated Transformer: a Transformer whose activations context gates."""

from collections.abc import Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.core.linear import over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.layers.block import layer_norm
from compmod_jax.layers.dropout import Dropout
from compmod_jax.layers.embedding import Embedding
from compmod_jax.layers.positions import PositionTable
from compmod_jax.layers.reading_strategies import Highlighting, OptionInteraction
from compmod_jax.layers.stack import Stack
from compmod_jax.mechanisms.modulation import Gates, modulate
from compmod_jax.models.nemot_config import LM, MODULATORY, OUTPUT, VANILLA, NemotConfig
from compmod_jax.models.text import Blocks, Text, TextOutput, check_text, embed
from compmod_jax.models.text_pass import TextPass, advanced, initial_state

__all__ = ["Nemot", "NemotConfig"]

_STDDEV = 0.02  # of embeddings that are not scaled (Radford et al. 2019)


class Nemot(nn.Module):
  r"""The Neuromodulated Transformer.

  .. math::
    O_v = \mathrm{Vanilla}(X), \quad
    O_n = \sigma(\mathrm{Modulatory}([X_{aux}; O_v])), \quad
    \mathrm{logits} = W\,\mathrm{LN}(\mathrm{Output}_{task}(O_n \odot O_v)) + b

  The auxiliary tokens have no positions. In decoder mode no token sees a later one: not in the
  vanilla and output sets, and not through the gate, since auxiliary positions see only each other.

  Sites: `vanilla/layer_<i>/...`, `modulatory/layer_<i>/...`, `output_<task>/layer_<i>/...` (see
  `Layer` and `Attention`), `vanilla/output`, `gate`, `gated`, `output_<task>/output`, `logits`, and
  `gates/<place>` for every one of `gate_places`.

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
    pad: the token that marks padding.

  Source: Knowles 2022, equations 3.5 to 3.14.
  """

  config: NemotConfig
  vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings, sets and heads."""
    c, dtype = self.config, jnp.dtype(self.config.dtype)
    plain = None if c.scale_embeddings else _STDDEV
    self.embedding = Embedding(self.vocab, c.dim, dtype, stddev=plain, scaled=c.scale_embeddings)
    self.positions = PositionTable(c.positions, c.max_length, c.dim, dtype)
    self.drop = Dropout(c.dropout)
    self.vanilla = Stack(c, VANILLA, "pre")
    if c.vanilla_norm:
      self.vanilla_norm = layer_norm(dtype, c.norm_epsilon)
    if c.gate == "on":
      self.auxiliary_embedding = Embedding(
        len(c.auxiliary), c.dim, dtype, stddev=plain, scaled=c.scale_embeddings
      )
      self.modulatory = Stack(c, MODULATORY, "pre", c.tied_key_value)
      if c.gate_start == "half":
        self.gate_projection = _zero_dense(c.dim, dtype)
      self.place_projections = {
        place: _zero_dense(c.heads if place.endswith("logits") else c.dim, dtype)
        for place in c.gate_places
      }
    self.output = {task: Stack(c, f"{OUTPUT}_{task}", "post", c.tied_key_value) for task in c.tasks}
    self.output_norm = {task: layer_norm(dtype, c.norm_epsilon) for task in c.tasks}
    if c.option_interaction:
      self.interaction = OptionInteraction(c.dim, c.dropout, dtype)
    if c.highlighting != "off":
      self.highlight = Highlighting(c.dim, dtype)
    self.head, self.vanilla_head = (self._head() for _ in range(2))

  def _head(self) -> nn.Dense:
    init = logical(nn.initializers.xavier_uniform(), "embed", "vocab")
    return nn.Dense(self.vocab, dtype=jnp.dtype(self.config.dtype), kernel_init=init)

  def __call__(
    self,
    text: Text,
    blocks: Blocks,
    *,
    causal: bool = True,
    positions: Int[Array, "batch places"] | None = None,
    vanilla_logits: bool = False,
    vanilla_positions: Int[Array, "batch places"] | None = None,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> TextOutput:
    """Logits at positions: in decoder mode those of the token that follows.

    Args:
      text: the batch.
      blocks: (task, rows) of the batch in its order; a task's output set runs on its rows alone.
      causal: decoder mode; else every token sees the whole text.
      positions: numbers of the positions whose logits are wanted; all, in order, if not given.
      vanilla_logits: also those of the vanilla set's own head.
      vanilla_positions: the same as `positions`, for these.
      deterministic: no dropout.
      taps: sites to read or change.

    Raises:
      UserError: blocks that do not make up the batch, unknown tasks, texts that are too long, or
        that lack what the model reads.
    """
    self._check(text, blocks)
    run = TextPass(
      text.tokens != self.pad,
      text.segments,
      causal=causal,
      deterministic=deterministic,
      intermediates=taps,
    )
    x, plain, gates = self._modulated(run, self._embed(text), text, text.tags)
    parts, start = [], 0
    for task, count in blocks:
      rows = slice(start, start + count)
      parts.append(self._task_logits(run, task, x[rows], gates, rows, positions))
      start += count
    logits = taps("logits", jnp.concatenate(parts))
    if not vanilla_logits:
      return TextOutput(logits)
    return TextOutput(logits, _product(self.vanilla_head, _at(plain, vanilla_positions)))

  def prefill(
    self,
    text: Text,
    task: str,
    *,
    beams: int,
    length: int,
    first_tag: Int[Array, " batch"] | None = None,
    taps: Taps = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts; see `text_pass.State`.

    Args:
      text: prompts of one task, each without its last token, which is the first of `step`.
      task: the task.
      beams: hypotheses an example.
      length: most steps.
      first_tag: number of the part of speech of that last token, as in `Text.tags`; those that
        follow, answers, have none. Needed where the model highlights.
      taps: sites to read or change.

    Raises:
      UserError: as when the model is called; or prompt and steps together are too long.
    """
    self._check(text, [(task, len(text.tokens))], steps=length)
    errors.check(
      first_tag is not None or self.config.highlighting == "off",
      "first_tag is None, but the model reads tags; give that of each prompt's last token.",
    )
    stacks = [(self.vanilla, 0), (self.output[task], 0)]
    if self.config.gate == "on":
      stacks.append((self.modulatory, self.config.before))
    state = initial_state(text, self.pad, stacks, beams=beams, length=length)
    if first_tag is not None:
      state["first_tag"] = first_tag[:, None]
    run = TextPass(text.tokens != self.pad, text.segments, state=state, intermediates=taps)
    x, _, gates = self._modulated(run, self._embed(text), text, text.tags)
    run(self.output[task], x, gates=gates.get(OUTPUT))
    return state

  def step(
    self, cache: dict[str, Any], tokens: Int[Array, "batch beams"], task: str, *, taps: Taps = OFF
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    state = advanced(cache, tokens)
    place = state["lengths"] + state["position"]
    x, tags = self.positions.add_at(self.embedding(tokens), place), None
    if self.config.highlighting != "off":
      tags = jnp.where(state["position"] == 0, state["first_tag"], -1)
      tags = jnp.broadcast_to(tags, tokens.shape)
    if self.config.highlighting == "embedding":
      x = self.highlight(x, cast(jax.Array, tags))
    real = state["prompt"][:, 0, 0]
    run = TextPass(real, state=state, newest=True, intermediates=taps)
    x, _, gates = self._modulated(run, x, None, tags)
    logits = taps("logits", self._task_logits(run, task, x, gates, slice(None)))
    return logits, {**state, "position": state["position"] + 1}

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts."""
    return self.config.routing_sites()

  def _embed(self, text: Text) -> jax.Array:
    x = embed(text, self.embedding, self.positions)
    if self.config.highlighting == "embedding":
      x = self.highlight(x, cast(jax.Array, text.tags))
    return x

  def _modulated(
    self,
    run: TextPass,
    x: jax.Array,
    text: Text | None,
    tags: jax.Array | None,
  ) -> tuple[jax.Array, jax.Array, dict[str, dict[int, Gates]]]:
    """The gated vanilla stream, the plain one, and the gates of later modules.

    Args:
      run: the pass, which runs stacks.
      x: embeddings.
      text: the batch; none in decoding, where nothing is an auxiliary token or an option.
      tags: of the positions of `x`, as `Text.tags`.
    """
    c = self.config
    gate, gates = None, {}
    x = self.drop(x, deterministic=run.deterministic)
    x = run(self.vanilla, x, stop=c.reads)
    plain = x
    if c.reads == c.vanilla_layers:
      x, plain = self._read(run, x, text, tags)
    if c.gate == "on":
      gate, gates = self._gates(run, x, text)
    if c.reads < c.vanilla_layers:
      x = run(self.vanilla, x, start=c.reads, gates=gates.get(VANILLA))
      x, plain = self._read(run, x, text, tags)
    return run.intermediates("gated", modulate(x, gate)), plain, gates

  def _read(
    self, run: TextPass, x: jax.Array, text: Text | None, tags: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """The vanilla set's output after the reading strategies, and before them."""
    c = self.config
    x = self.vanilla_norm(x) if c.vanilla_norm else x
    plain = x = run.intermediates(f"{VANILLA}/output", x)
    if text is not None and c.option_interaction:
      options = cast(jax.Array, text.options)
      x = self.interaction(x, options, segments=text.segments, deterministic=run.deterministic)
    if c.highlighting == "vanilla":
      x = self.highlight(x, cast(jax.Array, tags))
    return x, plain

  def _gates(
    self, run: TextPass, x: jax.Array, text: Text | None
  ) -> tuple[jax.Array, dict[str, dict[int, Gates]]]:
    """The gate of the vanilla set's output, and set -> layer -> gates of later modules."""
    c, before, taps = self.config, self.config.before, run.intermediates
    if text is not None:
      x = jnp.concatenate([self.auxiliary_embedding(cast(jax.Array, text.auxiliary)), x], axis=1)
    stream = run(self.modulatory, x, before=before)
    stream = stream[:, before:] if text is not None else stream
    whole = self.gate_projection(stream) if c.gate_start == "half" else stream
    gate = taps("gate", nn.sigmoid(whole.astype(jnp.float32)))
    gates: dict[str, dict[int, Gates]] = {}
    for place, project in self.place_projections.items():
      layer, kind = place.split("/")
      side, number = layer.rsplit("_", 1)
      squash = nn.log_sigmoid if kind == "logits" else nn.sigmoid
      value = taps(f"gates/{place}", squash(project(stream).astype(jnp.float32)))
      held = gates.setdefault(side, {})
      held[int(number)] = held.get(int(number), Gates())._replace(**{kind: value})
    return gate, gates

  def _task_logits(
    self,
    run: TextPass,
    task: str,
    x: jax.Array,
    gates: Mapping[str, Mapping[int, Gates]],
    rows: slice,
    positions: jax.Array | None = None,
  ) -> jax.Array:
    """Logits of a task's output set, all or at positions."""
    mine = jax.tree.map(lambda gate: gate[rows], dict(gates.get(OUTPUT, {})))
    x = run(self.output[task], x, rows=rows, gates=mine)
    x = run.intermediates(f"{OUTPUT}_{task}/output", self.output_norm[task](x))
    return _product(self.head, _at(x, None if positions is None else positions[rows]))

  def _check(self, text: Text, blocks: Blocks, steps: int = 0) -> None:
    """Raises a `UserError` if the model cannot take these texts."""
    c = self.config
    check_text(text, blocks, longest=c.max_length, steps=steps)
    for task, _ in blocks:
      errors.check_choice("task", task, c.tasks)
    needed = {
      "auxiliary": c.gate == "on",
      "options": c.option_interaction,
      "tags": c.highlighting != "off",
    }
    for field, used in needed.items():
      errors.check(
        not used or getattr(text, field) is not None,
        f"The model reads {field} of a text, but the batch has none; give them.",
      )


def _zero_dense(width: int, dtype: Any) -> nn.Dense:
  """A projection that puts out zeros at first."""
  init = logical(nn.initializers.zeros, "embed", "norm")
  return nn.Dense(width, dtype=dtype, kernel_init=init)


def _at(x: jax.Array, positions: jax.Array | None) -> jax.Array:
  """Rows of a stream at positions; all of them if there are none."""
  return x if positions is None else jnp.take_along_axis(x, positions[..., None], axis=1)


def _product(head: nn.Dense, x: jax.Array) -> jax.Array:
  return over_rows(head, x).astype(jnp.float32)


class EncoderMode(Nemot):
  """NeMoT in encoder mode, as an encoder is called: texts of the task lm, seen whole.

  Its parameters are those of `Nemot`.
  """

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch predicted"] | None = None,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch predicted vocab"]:
    """Logits of the tokens that belong at positions; see `Encoder.__call__`."""
    ids = jnp.asarray(self.config.auxiliary_ids("enc", LM), jnp.int32)
    text = Text(tokens, jnp.broadcast_to(ids[None], (len(tokens), len(ids))))
    out = super().__call__(
      text,
      [(LM, len(tokens))],
      causal=False,
      positions=positions,
      deterministic=deterministic,
      taps=taps,
    )
    return out.logits
