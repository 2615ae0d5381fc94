"""The Neuromodulated Transformer: a Transformer whose activations context gates."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import Activation, Dropout, layer_norm
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.layers.output import OutputHead
from compmod_jax.layers.positions import Positions
from compmod_jax.layers.reading_strategies import Highlighting, OptionInteraction
from compmod_jax.layers.stack import Stack, TextStackConfig
from compmod_jax.mechanisms.modulation import KINDS, Gates, modulate
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.text import Blocks, OutputLayers, Text, TextOutput, check_text, embed
from compmod_jax.models.text_pass import TextPass, advanced, initial_state

GATE = "gate"
LM = "lm"  # the task of running text
VANILLA, MODULATORY, OUTPUT = "vanilla", "modulatory", "output"
MODES = ("enc", "dec")
# From kinds of gates to the site that follows what they gate.
_GATED_AT = {
  "attention": "self/heads_scaled",
  "logits": "self/heads_scaled",
  "ffn": "output",
  "plasticity": "fast/written",
}
_STDDEV = 0.02  # of embeddings that are not scaled (Radford et al. 2019)


@dataclasses.dataclass(frozen=True)
class NemotConfig(TextStackConfig, ModelConfig):
  """Sizes and options of NeMoT; the defaults are the thesis's model with positions of its own.

  Source: Knowles 2022, chapter 3.
  """

  vanilla_layers: int = 12
  """Layers of the vanilla set, normalised before."""
  modulatory_layers: int = 12
  """Layers of the neuromodulatory set, normalised before."""
  output_layers: int = 3
  """Layers of every task's output set, normalised after."""
  tasks: tuple[str, ...] = ("lm",)
  """Tasks, each with an auxiliary token and an output set of its own."""
  extra_tokens: tuple[str, ...] = ()
  """Further auxiliary tokens, in front of every text."""
  compete: tuple[Literal["vanilla_self", "modulatory_self", "output_self"], ...] = ()
  """Sets whose self-attention heads compete; all output sets are of one kind."""
  gate: Literal["on", "off"] = "on"
  """Whether the neuromodulatory set gates the vanilla set's output; off leaves it out."""
  gate_start: Literal["stream", "half"] = "stream"
  """The gate is the sigmoid of the neuromodulatory stream, as in the thesis; or of a projection of
  it that starts from zeros, so that every gate starts at one half."""
  read_after: int = -1
  """The neuromodulatory set reads the output of N vanilla layers; 0: embeddings, -1: all."""
  gate_places: tuple[str, ...] = ()
  """What else is gated: vanilla_<i>/KIND or output_<i>/KIND, where KIND is attention, ffn, logits,
  or plasticity (of fast weights), and the layer is computed after what the neuromodulatory set
  reads."""
  tied_key_value: bool = False
  """Keys are values, too, in the neuromodulatory and output sets, as in the thesis's program."""
  positions: Positions = "sinusoidal"
  """How positions are known; see `layers.positions`. Learned ones are as in GPT-2."""
  scale_embeddings: bool = True
  """Token vectors have standard deviation 1/sqrt(dim) at first and are multiplied by sqrt(dim);
  else they have 0.02 and are not, as in GPT-2."""
  vanilla_norm: bool = False
  """Normalise the vanilla set's output, as GPT-2 does."""
  option_interaction: bool = False
  """Positions of answer options attend to each other in the vanilla set's output."""
  highlighting: Literal["off", "embedding", "vanilla"] = "off"
  """Where vectors for parts of speech are added."""
  dim: int = 768
  """Model width, a multiple of `heads`."""
  heads: int = 12
  """Attention heads of every layer."""
  ffn_dim: int = 3072
  """Width of the feed-forward networks' hidden layer."""
  activation: Activation = "gelu"
  """Nonlinearity of the feed-forward networks."""
  max_length: int = 768
  """Most tokens of a text."""
  dropout: float = 0.1
  """Dropout on embedding sums and sub-layer outputs."""

  def __post_init__(self):
    check_numbers(self, "model.")
    errors.check(bool(self.tasks), "model.tasks is empty; give at least one, for example lm.")
    names = ("cls", *self.extra_tokens, *MODES, *self.tasks)
    errors.check(
      len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9]*", n) for n in names),
      f"The auxiliary tokens would be {', '.join(names)}; extra_tokens and tasks must be different"
      " lower-case names, none of them cls, enc or dec.",
    )
    check_least(self, "model.", vanilla_layers=1, modulatory_layers=1, output_layers=1)
    errors.check_choice("model.gate", self.gate, ("on", "off"))
    errors.check_choice("model.gate_start", self.gate_start, ("stream", "half"))
    errors.check_choice("model.highlighting", self.highlighting, ("off", "embedding", "vanilla"))
    errors.check(
      -1 <= self.read_after <= self.vanilla_layers,
      f"model.read_after is {self.read_after}; give a number of vanilla layers, 0 to"
      f" {self.vanilla_layers}, or -1 for all.",
    )
    super().__post_init__()
    self._check_places()

  def _check_places(self) -> None:
    errors.check(
      self.gate == "on" or not self.gate_places,
      f"model.gate_places is {self.gate_places} but model.gate is off; nothing would make these"
      " gates. Switch the gate on, or leave gate_places empty.",
    )
    later = [f"{VANILLA}_{i}" for i in range(self.reads, self.vanilla_layers)]
    later += [f"{OUTPUT}_{i}" for i in range(self.output_layers)]
    for place in self.gate_places:
      errors.check_choice(
        "model.gate_places", place, [f"{layer}/{kind}" for layer in later for kind in KINDS]
      )
      errors.check(
        self.fast_weights != "off" or not place.endswith("/plasticity"),
        f"model.gate_places has {place} but model.fast_weights is off; nothing would change at the"
        " rate of this gate. Set fast_weights to hebbian or modulated, or leave the place out.",
      )

  @property
  def reads(self) -> int:
    """How many vanilla layers are below what the neuromodulatory set reads."""
    return self.vanilla_layers if self.read_after == -1 else self.read_after

  @property
  def auxiliary(self) -> tuple[str, ...]:
    """All auxiliary tokens, in the order of their ids."""
    return ("cls", *self.extra_tokens, *MODES, *self.tasks)

  def auxiliary_ids(self, mode: str, task: str) -> list[int]:
    """The ids that stand before a text: `<cls>`, further ones, mode and task.

    Raises:
      UserError: an unknown mode or task.
    """
    errors.check_choice("mode", mode, MODES)
    errors.check_choice("task", task, self.tasks)
    return [self.auxiliary.index(name) for name in ("cls", *self.extra_tokens, mode, task)]

  @property
  def before(self) -> int:
    """How many auxiliary tokens stand before a text."""
    return 3 + len(self.extra_tokens)

  def sides(self) -> tuple[str, ...]:
    """The vanilla, the neuromodulatory and the output sets."""
    gate = (MODULATORY,) if self.gate == "on" else ()
    return (VANILLA, *gate, *(f"{OUTPUT}_{task}" for task in self.tasks))

  def last_side(self, task: str) -> str:
    """The set whose output gives a task's logits."""
    return f"{OUTPUT}_{task}"

  def layers(self, side: str) -> int:
    """Layers of a set."""
    counts = {VANILLA: self.vanilla_layers, MODULATORY: self.modulatory_layers}
    return counts.get(side, self.output_layers)

  def attention(self, side: str) -> tuple[tuple[str, str], ...]:
    """Self-attention; all output sets are of one kind."""
    return ((f"{side.split('_')[0]}_self", "self"),)

  def mechanisms_off(self) -> dict[str, Any]:
    """See `StackConfig`; gates and reading strategies are mechanisms."""
    off = {"gate": "off", "gate_places": (), "option_interaction": False, "highlighting": "off"}
    return super().mechanisms_off() | off

  def marks(self) -> dict[str, str]:
    """Site or module -> what a mechanism does there besides what its parameters tell."""
    found = super().marks()
    if self.gate == "on":
      made = "a projection of the stream" if self.gate_start == "half" else "the stream"
      found["auxiliary_embedding"] = "in front of what follows"
      found["gate"] = f"sigmoid of {made} of the neuromodulatory set"
      found["gated"] = "the vanilla set's output times the gate"
    for place in self.gate_places:
      layer, kind = place.split("/")
      found[f"gates/{place}"] = f"gate on the {kind} of {layer}: sigmoid of a projection"
      own, number = layer.rsplit("_", 1)
      for side in self.sides():
        if side.split("_")[0] == own:
          site = f"{side}/layer_{number}/{_GATED_AT[kind]}"
          also = f"{found[site]}; " if site in found else ""
          found[site] = f"{also}gated: {kind}"
    return found

  def describe(self) -> str:
    """Sizes, gates and competition, in a few words."""
    sets = f"{self.vanilla_layers} vanilla"
    if self.gate == "on":
      sets += f", {self.modulatory_layers} neuromodulatory"
    outputs = " and ".join(self.tasks)
    sets += f" and {self.output_layers} output layers ({outputs})"
    gated = "" if self.gate == "on" else ", gate off"
    places = f", also gated: {' '.join(self.gate_places)}" if self.gate_places else ""
    return (
      f"{sets} of width {self.dim} and {self.heads} heads{gated}{places}"
      f" ({self.describe_competition()})"
    )

  def decoder(self, vocab: int, pad: int) -> "Nemot":
    """The module."""
    return Nemot(self, vocab, pad)

  def encoder(self, vocab: int, pad: int) -> "EncoderMode":
    """The module in encoder mode, on running text.

    Raises:
      UserError: as `check_running_text`.
    """
    self.check_running_text()
    return EncoderMode(self, vocab, pad)

  def check_running_text(self) -> None:
    """Raises a `UserError` unless the model can read text without questions."""
    errors.check_choice(f"task {LM!r}, which language modelling needs,", LM, self.tasks)
    errors.check(
      self.tasks == (LM,),
      f"model.tasks is {', '.join(self.tasks)}, but running text trains the output set of {LM}"
      f" alone. Set tasks to {LM}; a model of more tasks can start from the trained one (start).",
    )
    errors.check(
      not self.reads_options and not self.reads_tags,
      "model.option_interaction or model.highlighting is on, but running text has neither answer"
      " options nor parts of speech. Switch them off.",
    )

  def output_tasks(self) -> tuple[str, ...]:
    """Every task has an output set."""
    return self.tasks

  def for_tasks(self, tasks: Sequence[str]) -> "NemotConfig":
    """The configuration as if it had the output sets of these tasks alone: those that run."""
    away = {f"{OUTPUT}_{task}" for task in self.tasks} - {f"{OUTPUT}_{task}" for task in tasks}

    def kept(names: tuple[str, ...]) -> tuple[str, ...]:
      return tuple(name for name in names if not {name, name.rpartition("_")[0]} & away)

    return dataclasses.replace(
      self,
      tasks=tuple(dict.fromkeys(tasks)),
      expert_layers=kept(self.expert_layers),
      mechanism_layers=kept(self.mechanism_layers),
    )

  def unused_parameters(self, tasks: Sequence[str]) -> tuple[str, ...]:
    """Those of the other tasks' output sets."""
    away = [task for task in self.tasks if task not in tasks]
    return tuple(name for t in away for name in (f"{OUTPUT}_{t}", f"{OUTPUT}_norm_{t}"))

  def auxiliary_at(self, site: str) -> int:
    """Auxiliary tokens stand before a text in the neuromodulatory set alone."""
    return self.before if site.startswith(f"{MODULATORY}/") else 0

  def gate_site(self) -> str | None:
    """The gate of the vanilla set's output."""
    return GATE if self.gate == "on" else None

  @property
  def reads_options(self) -> bool:
    """Whether positions of answer options see each other."""
    return self.option_interaction

  @property
  def reads_tags(self) -> bool:
    """Whether vectors for parts of speech are added."""
    return self.highlighting != "off"

  @property
  def has_vanilla_head(self) -> bool:
    """The vanilla set has a head of its own."""
    return True


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
    self.head, self.vanilla_head = (OutputHead(self.vocab, c.dim, dtype) for _ in range(2))

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
    intermediates: Intermediates = OFF,
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
      intermediates: sites to read or change.

    Raises:
      UserError: blocks that do not make up the batch, unknown tasks, texts that are too long, or
        that lack what the model reads.
    """
    layers = self.output_layers(
      text,
      blocks,
      causal=causal,
      positions=positions,
      vanilla_logits=vanilla_logits,
      vanilla_positions=vanilla_positions,
      deterministic=deterministic,
      intermediates=intermediates,
    )
    return layers.formed(intermediates)

  def output_layers(
    self,
    text: Text,
    blocks: Blocks,
    *,
    causal: bool = True,
    positions: Int[Array, "batch places"] | None = None,
    vanilla_logits: bool = False,
    vanilla_positions: Int[Array, "batch places"] | None = None,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> OutputLayers:
    """What `__call__` makes the logits of, given the same."""
    self._check(text, blocks)
    run = TextPass(
      text.tokens != self.pad,
      text.segments,
      causal=causal,
      deterministic=deterministic,
      intermediates=intermediates,
    )
    x, plain, gates = self._modulated(run, self._embed(text), text, text.tags)
    parts, start = [], 0
    for task, count in blocks:
      rows = slice(start, start + count)
      part = self._task_output(run, task, x[rows], gates, rows)
      parts.append(_at(part, None if positions is None else positions[rows]))
      start += count
    output = self.head(jnp.concatenate(parts))
    if not vanilla_logits:
      return OutputLayers(output)
    return OutputLayers(output, self.vanilla_head(_at(plain, vanilla_positions)))

  def prefill(
    self,
    text: Text,
    task: str,
    *,
    beams: int,
    length: int,
    first_tag: Int[Array, " batch"] | None = None,
    intermediates: Intermediates = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts; see `text_pass.State`.

    Args:
      text: prompts of one task, each without its last token, which is the first of `step`.
      task: the task.
      beams: hypotheses an example.
      length: most steps.
      first_tag: number of the part of speech of that last token, as in `Text.tags`; those that
        follow, answers, have none. Needed where the model highlights.
      intermediates: sites to read or change.

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
    run = TextPass(text.tokens != self.pad, text.segments, state=state, intermediates=intermediates)
    x, _, gates = self._modulated(run, self._embed(text), text, text.tags)
    run(self.output[task], x, gates=gates.get(OUTPUT))
    return state

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    task: str,
    *,
    intermediates: Intermediates = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    state = advanced(cache, tokens)
    place = state["first"] + state["position"]
    x, tags = self.positions.add(self.embedding(tokens), place), None
    if self.config.highlighting != "off":
      tags = jnp.where(state["position"] == 0, state["first_tag"], -1)
      tags = jnp.broadcast_to(tags, tokens.shape)
    if self.config.highlighting == "embedding":
      x = self.highlight(x, cast(jax.Array, tags))
    real = state["prompt"][:, 0, 0]
    run = TextPass(real, state=state, newest=True, intermediates=intermediates)
    x, _, gates = self._modulated(run, x, None, tags)
    output = self._task_output(run, task, x, gates, slice(None))
    logits = intermediates("logits", self.head(output).logits())
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
    c, before, intermediates = self.config, self.config.before, run.intermediates
    if text is not None:
      x = jnp.concatenate([self.auxiliary_embedding(cast(jax.Array, text.auxiliary)), x], axis=1)
    stream = run(self.modulatory, x, before=before)
    stream = stream[:, before:] if text is not None else stream
    whole = self.gate_projection(stream) if c.gate_start == "half" else stream
    gate = intermediates("gate", nn.sigmoid(whole.astype(jnp.float32)))
    gates: dict[str, dict[int, Gates]] = {}
    for place, project in self.place_projections.items():
      layer, kind = place.split("/")
      side, number = layer.rsplit("_", 1)
      squash = nn.log_sigmoid if kind == "logits" else nn.sigmoid
      value = intermediates(f"gates/{place}", squash(project(stream).astype(jnp.float32)))
      held = gates.setdefault(side, {})
      held[int(number)] = held.get(int(number), Gates())._replace(**{kind: value})
    return gate, gates

  def _task_output(
    self,
    run: TextPass,
    task: str,
    x: jax.Array,
    gates: Mapping[str, Mapping[int, Gates]],
    rows: slice,
  ) -> jax.Array:
    """What a task's output set gives to the head."""
    mine = jax.tree.map(lambda gate: gate[rows], dict(gates.get(OUTPUT, {})))
    x = run(self.output[task], x, rows=rows, gates=mine)
    return run.intermediates(f"{OUTPUT}_{task}/output", self.output_norm[task](x))

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


def _zero_dense(width: int, dtype: DTypeLike | None) -> nn.Dense:
  """A projection whose output is zero at first."""
  init = logical(nn.initializers.zeros, "embed", "norm")
  return nn.Dense(width, dtype=dtype, kernel_init=init)


def _at(x: jax.Array, positions: jax.Array | None) -> jax.Array:
  """Rows of a stream at positions; all of them if there are none."""
  return x if positions is None else jnp.take_along_axis(x, positions[..., None], axis=1)


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
    intermediates: Intermediates = OFF,
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
      intermediates=intermediates,
    )
    return out.logits
