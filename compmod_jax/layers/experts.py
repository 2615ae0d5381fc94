"""Feed-forward networks that compete for every position."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.config import completed
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import ACTIVATIONS, Activation, Dropout, FeedForward
from compmod_jax.mechanisms import dispatch, expert_exchange
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router
from compmod_jax.mechanisms.dispatch import ExpertWeights, Implementation

Dispatch = Literal["gather", "exchange"]


def _with_keep(competition: object, experts: Mapping[str, Any]) -> object:
  """What was saved when `keep` could be left out, which left one expert out."""
  if not isinstance(competition, Mapping) or competition.get("rule") != "top_k":
    return competition
  if competition.get("keep") is not None:
    return competition
  return {**competition, "keep": max(1, experts.get("count", ExpertsConfig.count) - 1)}


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
  """Expert feed-forward networks in place of one (Kolios 2023, section 5.3.1)."""

  count: int = 8
  """Experts N_f of a layer."""
  matched: bool = False
  """Split the single network's hidden units among the experts, shared ones too, ffn_dim /
  (count + shared) each; otherwise every expert has ffn_dim of them."""
  competition: CompetitionConfig = dataclasses.field(
    default=CompetitionConfig(), metadata=completed(_with_keep)
  )
  """How experts compete: under `top_k`, which needs `keep` here, the others do not run; `balance`
  and `z` even out their use."""
  implementation: Implementation = "auto"
  """How they run: dense (all); blocked, batched, ragged (the chosen ones, under `top_k`, in ways
  for CPU, GPU, TPU); auto: what is least work on the platform."""
  dispatch: Dispatch = "gather"
  """How tokens reach experts on other devices, under `top_k`: gather (each device sees all tokens
  of its group and runs its own experts' rows) or exchange (each sends its own tokens to the experts
  that they chose)."""
  capacity: float = 1.25
  """Under dispatch = exchange: rows that a device takes at once, in multiples of the even share.
  What does not fit waits for another round; no token is dropped."""
  shared: int = 0
  """Experts besides, through which all tokens run, with a weight of 1 (Dai et al. 2024,
  DeepSeekMoE)."""

  def __post_init__(self):
    check_least(self, "experts.", count=1, shared=0)
    errors.check(
      self.competition.rule != "top_k" or self.competition.keep is not None,
      "experts.competition.keep is not given, but experts.competition.rule is 'top_k', which needs"
      " the number of experts that a token runs through. Set it to 1 or 2, the usual values.",
    )
    self.competition.kept(self.count, "experts")
    errors.check(
      self.competition.inactive == "null",
      f"experts.competition.inactive is {self.competition.inactive!r}; an expert has no value"
      " vector to give where it lost. Use inactive = null.",
    )
    errors.check(
      not self.competition.shared_heads,
      f"experts.competition.shared_heads is {self.competition.shared_heads}; it is of heads alone."
      " Set experts.shared in its place.",
    )
    errors.check(
      not self.competition.skip,
      "experts.competition.skip is set; it is of heads alone. Experts run through their own tokens"
      " by experts.implementation.",
    )
    choices = get_args(Implementation)
    errors.check_choice("experts.implementation", self.implementation, choices)
    errors.check(
      self.implementation in ("auto", "dense") or self.competition.rule == "top_k",
      f"experts.implementation is {self.implementation!r} but experts.competition.rule is"
      f" {self.competition.rule!r}; only under 'top_k' is it known how many experts a token has."
      " Use rule = top_k or implementation = auto.",
    )
    errors.check_choice("experts.dispatch", self.dispatch, get_args(Dispatch))
    errors.check(
      self.dispatch == "gather" or self.competition.rule == "top_k",
      f"experts.dispatch is {self.dispatch!r} but experts.competition.rule is"
      f" {self.competition.rule!r}; only under 'top_k' are tokens sent to the experts that they"
      " chose. Use rule = top_k or dispatch = gather.",
    )
    errors.check(
      self.dispatch == "gather" or self.implementation != "dense",
      f"experts.dispatch is {self.dispatch!r} but experts.implementation is 'dense', in which all"
      " experts run on all tokens. Use another implementation or dispatch = gather.",
    )
    errors.check(
      self.capacity >= 1,
      f"experts.capacity is {self.capacity}; it must be at least 1, the even share. Usual values"
      " are 1.25 to 2.",
    )

  def width(self, ffn_dim: int) -> int:
    """Hidden units of each expert where the single network has `ffn_dim`.

    Raises:
      UserError: they cannot be split evenly.
    """
    if not self.matched:
      return ffn_dim
    parts = self.count + self.shared
    shared = f" + experts.shared = {self.shared}" if self.shared else ""
    errors.check(
      ffn_dim % parts == 0,
      f"experts.matched is set, but experts.count = {self.count}{shared} does not divide ffn_dim ="
      f" {ffn_dim}; each expert gets as many hidden units. Choose a number that divides it.",
    )
    return ffn_dim // parts


class Experts(nn.Module):
  r"""Expert networks whose outputs are weighed by a router.

  .. math:: o_j = \sum_i C_{ij} F_i(h_j) + F'(h_j), \qquad F_i(h) = \phi(h W_i + b_i) V_i + c_i

  F' are the shared experts, one network of their width together.

  Sites: `router/scores`, `router/weights` [batch, time, experts]; `hidden`
  [batch, time, experts, mlp], after the nonlinearity; `experts` and `experts_scaled`
  [batch, time, experts, embed], every expert's output before and after weighing. The last three
  make all experts run, also those that were not chosen. With shared experts `shared/hidden`
  [batch, time, mlp]. With one expert this is `FeedForward` bit for bit.

  Attributes:
    dim: model width.
    hidden_dim: hidden units of an expert.
    config: how many experts, and how they compete.
    activation: the nonlinearity.
    dropout: rate on hidden units.
    dtype: compute type.

  Source: Kolios 2023, equations 5.1 and 5.2; Dai et al. 2024, equation 9, for shared experts.
  """

  dim: int
  hidden_dim: int
  config: ExpertsConfig
  activation: Activation = "relu"
  dropout: float = 0.0
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The sum of the experts' weighted outputs, and of the shared ones', at every position."""
    made = self._routed(inputs, deterministic, intermediates)
    if not self.config.shared:
      return made
    width = self.config.shared * self.hidden_dim
    shared = FeedForward(self.dim, width, self.activation, self.dropout, self.dtype, name="shared")
    inside = intermediates.scope("shared")
    return made + shared(inputs, deterministic=deterministic, intermediates=inside)

  def _routed(
    self,
    inputs: Float[Array, "batch time embed"],
    deterministic: bool,
    intermediates: Intermediates,
  ) -> Float[Array, "batch time embed"]:
    """The weighted sum of the outputs of the experts that compete."""
    config, count = self.config.competition, self.config.count
    router = Router(count, config, self.dtype, name="router")
    selection = router(
      inputs, deterministic=deterministic, intermediates=intermediates.scope("router")
    )
    shares = selection.weights * count if config.rescale else selection.weights
    shape, names = (inputs.shape[-1], count, self.hidden_dim), ("embed", "experts", "expert_mlp")
    up = _Matrices(shape, names, name="up")()
    shape, names = (count, self.hidden_dim, self.dim), ("experts", "expert_mlp", "embed")
    down = _Matrices(shape, names, name="down")()
    weights = ExpertWeights(*(leaf.astype(self.dtype) for leaf in (*up, *down)))
    inputs = inputs.astype(self.dtype)
    drop = functools.partial(Dropout(self.dropout), deterministic=deterministic)
    if self._runs_all(inputs.shape[0] * inputs.shape[1], intermediates):
      return self._all(inputs, shares, weights, drop, intermediates)
    factors = None
    if self.dropout > 0 and not deterministic:
      places = (*inputs.shape[:2], config.kept(count), self.hidden_dim)
      factors = drop(jnp.ones(places, self.dtype))
    given = (inputs, shares, selection.active, weights, ACTIVATIONS[self.activation])
    options: dict[str, Any] = {
      "keep": config.kept(count),
      "factors": factors,
      "implementation": self.config.implementation,
    }
    if self.config.dispatch == "gather":
      return dispatch.sparse(*given, **options)
    made, waiting = expert_exchange.sparse(*given, capacity=self.config.capacity, **options)
    intermediates.scope("router")("waiting", waiting)
    return made

  def _runs_all(self, tokens: int, intermediates: Intermediates) -> bool:
    """Whether all experts run, because they must or because that is less work."""
    config, count = self.config, self.config.count
    keep = config.competition.kept(count)
    if intermediates.wants("hidden", "experts", "experts_scaled") or intermediates.changes(
      "router/weights"
    ):
      return True
    if config.implementation == "auto":
      return not dispatch.worthwhile(tokens, count, keep)
    return config.implementation == "dense"

  def _all(
    self,
    inputs: jax.Array,
    shares: jax.Array,
    weights: ExpertWeights,
    drop: Callable[[jax.Array], jax.Array],
    intermediates: Intermediates,
  ) -> jax.Array:
    """The weighted sum over all experts, in one product unless each one's part is asked for."""
    hidden = dispatch.side_by_side(inputs, weights, ACTIVATIONS[self.activation])
    if intermediates.wants("hidden"):
      split = (*hidden.shape[:2], self.config.count, self.hidden_dim)
      hidden = intermediates("hidden", hidden.reshape(split)).reshape(hidden.shape)
    hidden = drop(hidden)
    if not intermediates.wants("experts", "experts_scaled"):
      return dispatch.dense(hidden, shares, weights)
    outputs = intermediates("experts", dispatch.outputs(hidden, weights))
    scaled = outputs * shares[..., None].astype(outputs.dtype)
    return jnp.sum(intermediates("experts_scaled", scaled), axis=2)


class _Matrices(nn.Module):
  """A matrix and a bias for each expert.

  Attributes:
    shape: of the matrices, the axis of experts included.
    names: logical names of its axes.
  """

  shape: tuple[int, int, int]
  names: tuple[str, str, str]

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array]:
    """The matrices, and biases [experts, outer]."""
    experts = self.names.index("experts")
    inner, outer = (axis for axis in range(3) if axis != experts)
    init = nn.initializers.variance_scaling(
      1.0, "fan_avg", "uniform", in_axis=inner, out_axis=outer, batch_axis=experts
    )
    kernel = self.param("kernel", logical(init, *self.names), self.shape)
    zeros = logical(nn.initializers.zeros, "experts", self.names[outer])
    return kernel, self.param("bias", zeros, (self.shape[experts], self.shape[outer]))
