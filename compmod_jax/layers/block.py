"""One layer of the Transformer, and the configuration of models that are made of such layers."""

import dataclasses
import functools
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import EditMaker
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.attention_forms import AttentionForm
from compmod_jax.layers.basic import (
  ACTIVATIONS,
  Activation,
  Dropout,
  FeedForward,
  NormKind,
  layer_norm,
)
from compmod_jax.layers.context import Context
from compmod_jax.layers.convolution import ShortConvolution
from compmod_jax.layers.copy_gate import CopyGate
from compmod_jax.layers.experts import Experts, ExpertsConfig
from compmod_jax.layers.fast_weights import FastWeights, Plasticity
from compmod_jax.layers.mechanisms import (
  Exchange,
  GroupNorm,
  MechanismCompetition,
  MechanismFeedForward,
  MechanismsConfig,
)
from compmod_jax.layers.mixture_of_depths import (
  DepthRouter,
  DepthRouterConfig,
  DepthRouters,
  among,
)
from compmod_jax.layers.positions import Positions, check_positions
from compmod_jax.layers.switch_head import SwitchHeadConfig
from compmod_jax.mechanisms.competition import drophead
from compmod_jax.mechanisms.competition.drophead import DropHeadConfig
from compmod_jax.mechanisms.competition.losses import RouterLosses, Routers
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.mechanisms.competition.statistics import unit_kind
from compmod_jax.mechanisms.modulation import UNGATED, Gates, attention_bias, modulate

C = TypeVar("C", bound="StackConfig")
Norm = Literal["pre", "post"]
State = dict[str, Any]
"""What decoding keeps of a block, by sub-layer: leaves [batch, 1, ...], which beams share, or
[batch, beams, ...]."""


class Inside(NamedTuple):
  """What single layers of a stack are made of.

  Attributes:
    experts: competing feed-forward networks, in place of a single one.
    mechanisms: independent mechanisms that attention and feed-forward network are cut into.
    depth: tokens may pass the layer by.
  """

  experts: ExpertsConfig | None = None
  mechanisms: MechanismsConfig | None = None
  depth: DepthRouterConfig | None = None

  @property
  def routed(self) -> tuple[str, ...]:
    """Names of the modules whose units compete."""
    own = self.mechanisms is not None and self.mechanisms.competition
    return (*(("ffn",) if self.experts else ()), *(("mechanisms",) if own else ()))


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """Sizes and options of stacks of layers, `<stack>/layer_<i>`; a model's own says which it has."""

  dim: int = 512
  """Model width, a multiple of `heads`."""
  heads: int = 4
  """Attention heads of every module."""
  ffn_dim: int = 1024
  """Width of the feed-forward networks' hidden layer."""
  norm_epsilon: float = 1e-5
  """Added to the variance where layers are normalised."""
  activation: Activation = "relu"
  """Nonlinearity of the feed-forward networks."""
  signal_dim: int = 0
  """Numbers of a neuromodulatory signal that scales and shifts what that nonlinearity reads (NMN;
  Vecoven et al. 2020); 0 for none."""
  positions: Positions = "sinusoidal"
  """Vectors added to embeddings (sinusoidal, learned), rotations of queries and keys (rotary),
  relative positions as in Transformer-XL (relative), a penalty on distances (alibi), or none."""
  max_length: int = 1024
  """Most positions of a sequence."""
  dropout: float = 0.3
  """Dropout on embedding sums and sub-layer outputs."""
  attention_dropout: float = 0.0
  """Dropout on attention probabilities."""
  ffn_dropout: float = 0.0
  """Dropout inside the feed-forward networks."""
  drophead: DropHeadConfig = DropHeadConfig()
  """Dropping of whole heads in training."""
  compete: tuple[str, ...] = ()
  """Kinds of attention whose heads compete, such as encoder_self; decoders have cross, too."""
  competition: CompetitionConfig = CompetitionConfig()
  """How heads compete where they do."""
  gated_heads: tuple[str, ...] = ()
  """Kinds of attention, as in `compete`, whose heads have sigmoid gates (Qiu et al. 2025)."""
  expert_layers: tuple[str, ...] = ()
  """Layers with competing feed-forward networks: of a whole stack, such as encoder, or one by one
  (encoder_2)."""
  experts: ExpertsConfig = ExpertsConfig()
  """The experts where there are any."""
  mechanism_layers: tuple[str, ...] = ()
  """Layers made of independent mechanisms (TIM), as in `expert_layers`; in the original all but the
  first two and the last."""
  mechanisms: MechanismsConfig = MechanismsConfig()
  """The mechanisms where there are any."""
  dtype: Literal["float32", "bfloat16"] = "float32"
  """Compute type; parameters, softmax, norms, losses and router scores stay float32."""
  remat: bool = False
  """Recompute each layer's activations in the backward pass instead of storing them."""

  # Fields of the models that have the choice; see `SystematicConfig` and `TransformerConfig`.
  random_positions: ClassVar[int] = 0
  shared_layers: ClassVar[int] = 0
  fewest_repeats: ClassVar[int] = 0
  attention_form: ClassVar[AttentionForm] = "softmax"
  copy_gate: ClassVar[bool] = False
  copy_gate_closed: ClassVar[float] = 0.0
  switch_heads: ClassVar[tuple[str, ...]] = ()
  switch_head: ClassVar[SwitchHeadConfig] = SwitchHeadConfig()
  depth_layers: ClassVar[tuple[str, ...]] = ()
  depth_router: ClassVar[DepthRouterConfig] = DepthRouterConfig()
  sliding_window: ClassVar[int] = 0
  position_kinds: ClassVar[tuple[str, ...]] = get_args(Positions)
  head_dim: ClassVar[int | None] = None
  norm_kind: ClassVar[NormKind] = "layer"
  biases: ClassVar[bool] = True
  scale_logits: ClassVar[bool] = True
  gated_ffn: ClassVar[bool] = False

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", dim=1, heads=1, ffn_dim=1, max_length=1)
    errors.check(
      self.head_dim is not None or self.dim % self.heads == 0,
      f"model.heads is {self.heads}, which does not divide model.dim = {self.dim}; each head is"
      " dim / heads wide. Choose a number of heads that divides the width.",
    )
    errors.check(
      self.norm_epsilon > 0,
      f"model.norm_epsilon is {self.norm_epsilon}; it must be positive, for example 1e-5.",
    )
    errors.check_choice("model.activation", self.activation, ACTIVATIONS)
    errors.check_choice("model.dtype", self.dtype, ("float32", "bfloat16"))
    for field in ("dropout", "attention_dropout", "ffn_dropout"):
      rate = getattr(self, field)
      errors.check(0 <= rate < 1, f"model.{field} is {rate}; it must be at least 0 and below 1.")
    self._check_heads()
    check_positions(self.positions, self.dim, self.heads, self.position_kinds)
    errors.check(
      self.signal_dim >= 0
      and not (self.signal_dim and (self.expert_layers or self.mechanism_layers)),
      f"model.signal_dim is {self.signal_dim}, expert_layers {self.expert_layers} and"
      f" mechanism_layers {self.mechanism_layers}; it must be at least 0, and 0 where layers have"
      " experts or mechanisms, whose nonlinearities no signal modulates.",
    )
    self._check_competition()

  def _check_heads(self) -> None:
    width = self.head_dim
    errors.check(
      width is None or width >= 1, f"model.head_dim is {width}; it must be at least 1, or none."
    )
    errors.check(
      width is None
      or self.positions not in ("relative", "rotary")
      or width * self.heads == self.dim,
      f"model.head_dim is {width} and model.positions is {self.positions!r}; these positions need"
      " heads of width dim / heads. Leave head_dim out.",
    )

  def _check_competition(self) -> None:
    for field in ("compete", "gated_heads", "switch_heads"):
      for kind in getattr(self, field):
        errors.check_choice(f"model.{field}", kind, self.attention_kinds())
    if self.compete:
      self.competition.kept(self.heads)
      errors.check(
        self.competition.inactive == "null" or "cross" not in self.compete,
        "model.competition.inactive is 'value' but model.compete includes 'cross'; a query position"
        " of encoder-decoder attention has no value vector of its own. Use inactive = null there.",
      )
    layers = [f"{side}_{i}" for side in self.sides() for i in range(self.layers(side))]
    for field in ("expert_layers", "mechanism_layers", "depth_layers"):
      for name in getattr(self, field):
        errors.check_choice(f"model.{field}", name, [*self.sides(), *layers])
    if self.expert_layers:
      self.experts.width(self.ffn_dim)
    if self.mechanism_layers:
      self.mechanisms.check_sizes(self.dim, self.heads, self.ffn_dim)
      errors.check(
        self.norm_kind == "layer" and self.biases and not self.gated_ffn,
        f"model.mechanism_layers is {self.mechanism_layers}; mechanisms have layer norms, biases"
        " and plain feed-forward networks, which this kind of model has not. Leave it empty here.",
      )
      both = [
        f"{side}_{i}"
        for side in self.sides()
        for i in range(self.layers(side))
        if self._in(side, i, self.expert_layers) and self._in(side, i, self.mechanism_layers)
      ]
      errors.check(
        not both,
        f"model.mechanism_layers and model.expert_layers both have {', '.join(both)}; a mechanism"
        " has one feed-forward network. Leave them out of one.",
      )

  def sides(self) -> tuple[str, ...]:
    """Names of the stacks that the model has."""
    raise NotImplementedError

  def layers(self, side: str) -> int:
    """Layers of a stack."""
    raise NotImplementedError

  def own_layers(self, side: str) -> int:
    """Layers of a stack that have parameters of their own."""
    return self.shared_layers or self.layers(side)

  def last_side(self, task: str) -> str:
    """The stack whose output gives a task's logits."""
    return "decoder"

  def decoding_stack(self, task: str) -> tuple[str, int]:
    """The stack whose output gives a task's logits in decoding, and its layers."""
    side = self.last_side(task)
    return side, self.layers(side)

  def attention(self, side: str) -> tuple[tuple[str, str], ...]:
    """Kind, as `compete` has it, and name of every attention module of a stack's layers."""
    return ((f"{side}_self", "self"),)

  def attention_kinds(self) -> tuple[str, ...]:
    """What `compete` may hold."""
    return tuple(dict.fromkeys(kind for side in self.sides() for kind, _ in self.attention(side)))

  def _in(self, side: str, layer: int, names: tuple[str, ...]) -> bool:
    return bool({side, f"{side}_{layer}"} & set(names))

  def inside(self, side: str, layer: int) -> "Inside":
    """What a layer is made of besides plain attention and a plain feed-forward network."""
    return Inside(
      self.experts if self._in(side, layer, self.expert_layers) else None,
      self.mechanisms if self._in(side, layer, self.mechanism_layers) else None,
      self.depth_router if self._in(side, layer, self.depth_layers) else None,
    )

  def attention_modules(self) -> tuple[str, ...]:
    """Names of all attention modules, to which `/heads`, `/heads_scaled` and the like are added."""
    return tuple(
      f"{side}/layer_{i}/{name}"
      for side in self.sides()
      for i in range(self.layers(side))
      for _, name in self.attention(side)
    )

  def dropped_sites(self) -> tuple[str, ...]:
    """Names of the heads' outputs [batch, time, heads, head_dim] that DropHead multiplies.

    Those before the competition, unless heads that lost have an output of their own after it.
    """
    fills = self.compete and self.competition.inactive == "value"
    site = "heads_scaled" if fills else "heads"
    return tuple(f"{module}/{site}" for module in self.attention_modules())

  def training_edits(self) -> tuple[EditMaker, ...]:
    """What mechanisms change in training; empty if nothing is."""
    makers: list[EditMaker] = []
    if self.drophead.active:
      makers.append(functools.partial(drophead.edits, self.drophead, self.dropped_sites()))
    return tuple(makers)

  def routing_sites(self, *sides: str) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, of heads and of experts.

    Args:
      *sides: in which stacks; all of the model's if none is given.
    """
    return tuple(
      f"{side}/layer_{i}/{name}/router/weights"
      for side in sides or self.sides()
      for i in range(self.layers(side))
      for name in (
        *(name for kind, name in self.attention(side) if kind in self.compete),
        *self.inside(side, i).routed,
      )
    )

  def units(self, site: str) -> int:
    """How many heads or experts compete at one of `routing_sites`."""
    counts = {"expert": self.experts.count, "mechanism": self.mechanisms.count}
    return counts.get(unit_kind(site), self.heads)

  def routers(self) -> tuple[RouterLosses, ...]:
    """The routers of heads, of experts and of depth, for the losses that keep them healthy."""
    sites = self.routing_sites()
    heads, experts = (
      tuple(site for site in sites if unit_kind(site) == kind) for kind in ("head", "expert")
    )
    layers = [(side, i) for side in self.sides() for i in range(self.layers(side))]
    depth = tuple(
      f"{side}/layer_{i}/depth/scores" for side, i in layers if self.inside(side, i).depth
    )
    return (
      Routers("head", heads, self.competition),
      Routers("expert", experts, self.experts.competition),
      DepthRouters(depth, self.depth_router),
    )

  def warnings(self) -> list[str]:
    """What is allowed here but hardly meant, a sentence each; empty if nothing is."""
    experts = self.experts.count, "experts.count", "experts.", self.experts.competition
    kinds = (
      (self.compete, "heads", self.heads, "model.heads", "", self.competition),
      (self.expert_layers, "experts", *experts),
    )
    return [
      f"one of {count} {kind} stays at each position"
      f"{' besides the shared ones' * bool(competition.shared_heads)} ({prefix}competition.rule ="
      f" {competition.rule}), so its weight is always 1 and the routers learn nothing;"
      f" let at least 2 stay ({prefix}competition.keep, {field}) if they should."
      for used, kind, count, field, prefix, competition in kinds
      if used and competition.kept(count) == 1 and competition.weighting != "sigmoid"
    ]

  def block_class(self) -> "type[Block]":
    """What layers are; a configuration of one's own may say another one."""
    return Block

  def attention_class(self) -> type[Attention]:
    """What self-attention and cross attention of layers are, likewise."""
    return Attention

  def plain(self: C) -> C:
    """The same model without any mechanism."""
    return dataclasses.replace(self, **self.mechanisms_off())

  def mechanisms_off(self) -> dict[str, Any]:
    """Fields of mechanisms, and the values with which none acts; all at once, as they are checked
    against each other."""
    return {
      "compete": (), "expert_layers": (), "gated_heads": (), "mechanism_layers": (),
      "signal_dim": 0,
    }  # fmt: skip

  def marks(self) -> dict[str, str]:
    """Site or module -> what a mechanism does there besides what its parameters tell."""
    c = self.drophead
    if not c.active:
      return {}
    rates = {"v": f"{c.start:g} to 0 to {c.end:g}", "curriculum": f"0 to {c.end:g}"}
    rates |= {"constant": f"{c.start:g}", "anti_curriculum": f"{c.start:g} to 0"}
    does = f"DropHead in training, p = {rates[c.schedule]}"
    return dict.fromkeys(self.dropped_sites(), does)

  def describe_competition(self) -> str:
    """What competes where, in a few words."""
    kinds = " and ".join(kind.replace("_", " ") for kind in self.compete)
    heads = f"heads compete in {kinds} attention" if kinds else "plain attention"
    where = " and ".join(name.replace("_", " layer ") for name in self.expert_layers)
    heads = f"{heads}, {self.experts.count} experts in the {where}" if where else heads
    where = " and ".join(name.replace("_", " layer ") for name in self.mechanism_layers)
    heads = f"{heads}, {self.mechanisms.count} mechanisms in the {where}" if where else heads
    signal = f", nonlinearities modulated by {self.signal_dim} numbers" if self.signal_dim else ""
    return heads + signal


class Residual(nn.Module):
  """The frame of every sub-layer: norm, dropout and residual sum, in pre- or post-norm order.

  Attributes:
    norm: `pre` or `post`.
    rate: dropout on the sub-layer's output.
    dtype: compute type.
    epsilon: added to the variance by the norm.
    mechanisms: into how many slices the width is cut, each of which is normalised by itself.
    kind: of the norm.
    biases: whether the norm has some.
  """

  norm: str
  rate: float
  dtype: DTypeLike = jnp.float32
  epsilon: float = 1e-5
  mechanisms: int = 1
  kind: NormKind = "layer"
  biases: bool = True

  def setup(self):
    """Makes the norm."""
    self.scale = (
      layer_norm(self.dtype, self.epsilon, kind=self.kind, biases=self.biases)
      if self.mechanisms == 1
      else GroupNorm(self.mechanisms, self.epsilon, self.dtype)
    )
    self.drop = Dropout(self.rate)

  def before(self, x: jax.Array) -> jax.Array:
    """What the sub-layer reads."""
    return self.scale(x) if self.norm == "pre" else x

  def after(self, x: jax.Array, update: jax.Array, deterministic: bool) -> jax.Array:
    """The stream after the sub-layer's update."""
    x = x + self.drop(update, deterministic=deterministic)
    return x if self.norm == "pre" else self.scale(x)


class Block(nn.Module):
  """One layer: self-attention, attention to an encoder's output if it has that, feed-forward.

  Intermediates: those of `self`, `fast`, `cross`, `ffn` and `depth`, `copy_gate` and `output`
  [batch, time, embed].

  Attributes:
    config: sizes and options.
    norm: whether sub-layers are normalised before or after.
    kind: what `config.compete` calls its self-attention.
    cross: whether it attends to an encoder's output.
    tied_key_value: whether self-attention's keys are its values, too.
    inside: experts, or mechanisms, and whether tokens may pass it by.
    convolution: width of the convolution before self-attention; 1 for none.
    fast_weights: how the fast weights beside self-attention change; off for none.
  """

  config: StackConfig
  norm: Norm
  kind: str
  cross: bool = False
  tied_key_value: bool = False
  inside: Inside = Inside()
  convolution: int = 1
  fast_weights: Plasticity = "off"

  def setup(self):
    """Makes the sub-layers and their frames."""
    c = self.config
    dtype = jnp.dtype(c.dtype)
    experts, mechanisms, depth = self.inside
    slices = 1 if mechanisms is None else mechanisms.count
    sizes = {"dropout": c.attention_dropout, "dtype": dtype, "head_dim": c.head_dim}
    sizes |= {"biases": c.biases, "scale_logits": c.scale_logits, "mechanisms": slices}
    competition = dict.fromkeys(c.compete, c.competition)
    switch = dict.fromkeys(c.switch_heads, c.switch_head)
    attention = c.attention_class()
    self.self_attention = attention(
      c.dim,
      c.heads,
      competition=competition.get(self.kind),
      tied_key_value=self.tied_key_value,
      positions=c.positions,
      gated=self.kind in c.gated_heads,
      form=c.attention_form,
      switch=switch.get(self.kind),
      **sizes,
    )
    if depth is not None:
      self.depth = DepthRouter()
    if self.convolution > 1:
      self.mix = ShortConvolution(self.convolution, c.dim, dtype)
    if self.fast_weights != "off":
      self.fast = FastWeights(c.dim, c.heads, self.fast_weights, dtype)
    frame = self.norm, c.dropout, dtype, c.norm_epsilon, slices, c.norm_kind, c.biases
    self.self_residual = Residual(*frame)
    if self.cross:
      self.cross_attention = attention(
        c.dim,
        c.heads,
        competition=competition.get("cross"),
        cross=True,
        gated="cross" in c.gated_heads,
        switch=switch.get("cross"),
        **sizes,
      )
      self.cross_residual = Residual(*frame)
    if mechanisms is not None:
      if mechanisms.competition:
        self.compete = MechanismCompetition(slices)
      self.exchange = Exchange(mechanisms, dtype)
      self.exchange_residual = Residual(*frame)
      self.ffn = MechanismFeedForward(slices, c.ffn_dim, c.activation, c.ffn_dropout, dtype)
    elif experts is None:
      sizes = c.dim, c.ffn_dim, c.activation, c.ffn_dropout, dtype
      self.ffn = FeedForward(*sizes, gated=c.gated_ffn, biases=c.biases, signal_dim=c.signal_dim)
    else:
      width = experts.width(c.ffn_dim)
      self.ffn = Experts(c.dim, width, experts, c.activation, c.ffn_dropout, dtype)
    self.ffn_residual = Residual(*frame)
    if c.copy_gate:
      norm = {"epsilon": c.norm_epsilon, "kind": c.norm_kind, "biases": c.biases}
      self.copy_gate = CopyGate(
        c.dim, dropout=c.ffn_dropout, closed=c.copy_gate_closed, dtype=dtype, **norm
      )

  def initial_state(
    self,
    batch: int,
    keys: int,
    memory: Float[Array, "batch memory embed"] | None = None,
    *,
    beams: int = 1,
  ) -> State:
    """The state before the first position.

    Args:
      batch: examples.
      keys: room for positions; see `Attention.initial_state`.
      memory: an encoder's output, for a block with cross attention.
      beams: hypotheses of an example, which have fast weights of their own.
    """
    state: State = {"self": self.self_attention.initial_state(batch, keys)}
    if self.inside.depth is not None:
      state["through"] = jnp.zeros((batch, 1, keys), bool)
    if self.convolution > 1:
      state["mix"] = self.mix.initial_state(batch, keys)
    if self.fast_weights != "off":
      state["fast"] = self.fast.initial_state(batch, beams)
    if memory is not None:
      state["cross"] = self.cross_attention.memory_state(memory)
    return state

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    state: State | None = None,
    memory: Float[Array, "batch memory embed"] | None = None,
    gates: Gates = UNGATED,
    *,
    ctx: Context = Context(),
  ) -> tuple[Float[Array, "batch time embed"], State | None]:
    """The block at every position, or at the newest one of every beam.

    Args:
      x: the stream.
      state: of earlier positions, to which these are added; None: these are all.
      memory: an encoder's output, where the state does not hold it.
      gates: how much of what is computed passes.
      ctx: masks, where decoding stands, dropout, intermediates.

    Returns:
      The stream after the block, and the next state; None if none was given.
    """
    held, entering, weights, reading = dict(state or {}), x, None, ctx
    if self.inside.depth is not None:
      weights = self.depth(x, ctx)
      reading, held["through"] = among(weights > 0, held.get("through"), ctx)
    read = self.self_residual.before(x)
    if self.convolution > 1:
      read, held["mix"] = self.mix(read, held.get("mix"), ctx)
    bias = None
    if gates.logits is not None:
      bias, held["gates"] = self._gate_bias(gates.logits, state, ctx)
    update, held["self"] = self.self_attention(
      read, held.get("self"), bias=bias, ctx=reading.scope("self")
    )
    if self.fast_weights != "off":
      more, held["fast"] = self.fast(
        read, held.get("fast"), gates.plasticity, ctx=ctx.scope("fast")
      )
      update = update + more
    if gates.attention is not None:
      update = modulate(update, gates.attention)
    mechanisms, inner = self.inside.mechanisms, ctx.intermediates.scope("mechanisms")
    if mechanisms is not None and mechanisms.competition:
      update = self.compete(read, update, inner)
    x = self.self_residual.after(x, update, ctx.deterministic)
    if mechanisms is not None:
      update = self.exchange(self.exchange_residual.before(x), inner)
      x = self.exchange_residual.after(x, update, ctx.deterministic)
    if self.cross:
      update, held["cross"] = self.cross_attention(
        self.cross_residual.before(x), held.get("cross"), memory, ctx=ctx.scope("cross")
      )
      x = self.cross_residual.after(x, update, ctx.deterministic)
    read = self.ffn_residual.before(x)
    update = self.ffn(
      read,
      deterministic=ctx.deterministic,
      intermediates=ctx.intermediates.scope("ffn"),
    )
    if gates.ffn is not None:
      update = modulate(update, gates.ffn)
    if self.config.copy_gate:
      options = {"deterministic": ctx.deterministic, "intermediates": ctx.intermediates}
      x = self.copy_gate(entering, read, update, **options)
    else:
      x = self.ffn_residual.after(x, update, ctx.deterministic)
    if weights is not None:
      x = entering + weights[..., None].astype(x.dtype) * (x - entering)
    x = ctx.intermediates("output", x)
    if state is None:
      return x, None
    return x, {name: value for name, value in held.items() if value is not None}

  def _gate_bias(
    self, logits: Float[Array, "batch time heads"], state: State | None, ctx: Context
  ) -> tuple[jax.Array, jax.Array | None]:
    """What gates add to attention logits, and those of all keys so far for the state."""
    if state is None:
      return attention_bias(logits), None
    keys = state["self"]["key"].shape[-1]
    held = state.get("gates", jnp.zeros((len(logits), 1, keys, logits.shape[-1]), logits.dtype))
    zero = jnp.int32(0)
    held = jax.lax.dynamic_update_slice(
      held, logits[:, None], (zero, zero, jnp.asarray(ctx.start, jnp.int32), zero)
    )
    return attention_bias(logits if ctx.newest is None else held[:, 0]), held


def run_block(
  block: Block,
  x: Float[Array, "batch time embed"],
  state: State | None = None,
  memory: Float[Array, "batch memory embed"] | None = None,
  gates: Gates = UNGATED,
  *,
  ctx: Context,
) -> tuple[Float[Array, "batch time embed"], State | None]:
  """Runs a block; with `config.remat` the backward pass computes its activations again.

  Sequences that have gone through as many layers as `ctx.depth` says stay as they are.
  """
  if not block.config.remat or state is not None:
    after, state = block(x, state, memory, gates, ctx=ctx)
  else:
    after = _again(block, x, memory, gates, ctx)
  if ctx.depth is not None:
    after = jnp.where((ctx.layer < ctx.depth)[:, None, None], after, x)
  return after, state


def _again(
  block: Block, x: jax.Array, memory: jax.Array | None, gates: Gates, ctx: Context
) -> jax.Array:
  """What a block makes of whole sequences; the backward pass makes it again."""

  def apart(
    module: Block, x: jax.Array, memory: jax.Array | None, gates: Gates
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    inner = ctx.intermediates.apart()
    out, _ = module(x, None, memory, gates, ctx=dataclasses.replace(ctx, intermediates=inner))
    seen.update(inner.seen)
    return out, inner.captured

  seen: set[str] = set()
  out, captured = nn.remat(apart)(block, x, memory, gates)
  ctx.intermediates.merge(captured, seen)
  return out
