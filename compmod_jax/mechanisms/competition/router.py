r"""Competition: the heads of an attention module compete for every position.

.. math::
   k_j = \mathrm{InfA}(h_j), \quad s_{ij} = a_i \cdot k_j / \sqrt{D_a}, \quad
   C_{ij} = \mathrm{softmax}_i(s_{ij} / \tau), \quad o_{ij} = C_{ij}\, \tilde o_{ij}

where :math:`a_i` is the learned signature of head :math:`i` and :math:`\tilde o_{ij}` what the head
would have computed at query position :math:`j`.

Source: Kolios 2023, section 5.3.2, equation 5.3.
"""

import dataclasses
import functools
from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors, sharding
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import exactly, narrow_product, over_rows
from compmod_jax.core.sharding import logical
from compmod_jax.kernels.float32_affine import float32_affine
from compmod_jax.kernels.routing import (
  Choice,
  Readout,
  Rule,
  Selection,
  fold_signatures,
  rank,
  routing_softmax,
  routing_weights,
  select,
)

__all__ = [
  "CompetitionConfig",
  "Router",
  "Rule",
  "Selection",
  "compared",
  "log_weights",
  "rank",
  "routing_parameter",
  "scale_heads",
  "score",
  "select",
  "shared_and_routed",
]


Weighting = Literal["softmax", "sigmoid", "normalised_sigmoid"]


@dataclasses.dataclass(frozen=True)
class CompetitionConfig:
  """How heads compete (Kolios 2023, sections 5.3.2 and 5.4)."""

  key_dim: int = 24
  """Width D_a of keys and signatures."""
  hidden_dim: int = 128
  """Width D_InfA of the inference network's hidden layer."""
  rule: Rule = "soft"
  """Which heads stay: all, the `keep` best, or those whose weight reaches `threshold`."""
  keep: int | None = None
  """Heads that stay under `top_k`; one less than the number of heads if not given. Of experts it
  has to be given."""
  threshold: float = 0.0
  """Smallest softmax weight that stays under `threshold`; the best head always does."""
  inactive: Literal["null", "value"] = "null"
  """The output of a head that lost: zeros, or its own value vector of the same position."""
  temperature: float = 1.0
  """The softmax sees scores divided by this."""
  scale: bool = True
  """Divide scores by sqrt(key_dim)."""
  rescale: bool = False
  """Multiply weights by the number of heads, so that uniform weights change nothing."""
  dropout: float = 0.0
  """Dropout inside the inference network."""
  dtype: Literal["float32", "model"] = "float32"
  """Type of the router's products: float32, or the model's compute type, in which near ties end
  otherwise (in bfloat16 at 2 to 4 of 1,000 tokens)."""
  routing: Literal["fused", "plain"] = "fused"
  """How the weights of heads and what they scale are computed: fused with their neighbours, except
  where something in between is asked for, or one step after the other."""
  skip: bool = False
  """Whether heads leave out the attention of tokens that did not choose them, on CPUs and GPUs, in
  texts that are not packed (`kernels/attention/chosen.py`). Results are the same; with few heads
  that stay and long texts it is faster. Needs `top_k` or `threshold`."""
  balance: float = 0.0
  """Coefficient of the load-balance loss; 0 for none, 0.01 is usual."""
  z: float = 0.0
  """Coefficient of the z-loss, which keeps scores small; 0 for none, 0.001 is usual."""
  shared_heads: int = 0
  """How many of the first heads always stay; the rule chooses among the others, of which `keep`
  are counted, and every token weighs the two groups (MoH; Jin et al. 2024). 0: no such heads."""
  weighting: Weighting = "softmax"
  """How scores of units that stay become weights: by a softmax over them; each by a sigmoid of its
  own (Csordas et al. 2023, sigma-MoE); or by sigmoids divided by their sum (DeepSeek-AI 2024)."""
  bias_balance: float = 0.0
  """Coefficient of a loss that moves a bias of every unit, which counts where the `keep` best are
  found and nowhere else, until all are chosen as often (Wang et al. 2024); 0 for none, 0.001 is
  usual."""

  def __post_init__(self):
    check_least(self, "competition.", key_dim=1, hidden_dim=1)
    errors.check_choice("competition.rule", self.rule, ("soft", "top_k", "threshold"))
    errors.check_choice("competition.dtype", self.dtype, ("float32", "model"))
    errors.check_choice("competition.routing", self.routing, ("fused", "plain"))
    errors.check_choice("competition.inactive", self.inactive, ("null", "value"))
    errors.check(
      0 <= self.threshold < 1,
      f"competition.threshold is {self.threshold}; it must be at least 0 and below 1.",
    )
    errors.check(
      self.temperature > 0,
      f"competition.temperature is {self.temperature}; it must be positive.",
    )
    errors.check(
      0 <= self.dropout < 1,
      f"competition.dropout is {self.dropout}; it must be at least 0 and below 1.",
    )
    for field in ("balance", "z", "bias_balance"):
      value = getattr(self, field)
      errors.check(value >= 0, f"competition.{field} is {value}; it must be at least 0 (no loss).")
    errors.check(
      self.shared_heads >= 0,
      f"competition.shared_heads is {self.shared_heads}; it must be at least 0 (no shared heads).",
    )
    errors.check_choice("competition.weighting", self.weighting, get_args(Weighting))
    errors.check(
      self.weighting == "softmax" or (self.rule != "threshold" and not self.shared_heads),
      f"competition.weighting is {self.weighting!r}, competition.rule {self.rule!r} and"
      f" competition.shared_heads {self.shared_heads}; the rule 'threshold' and shared heads are of"
      " softmax weights. Use weighting = softmax, or neither of them.",
    )
    errors.check(
      not self.skip or (self.rule != "soft" and self.fused),
      f"competition.skip is set, but competition.rule is {self.rule!r}, competition.routing"
      f" {self.routing!r}, competition.inactive {self.inactive!r}, competition.weighting"
      f" {self.weighting!r}, competition.shared_heads {self.shared_heads} and"
      f" competition.bias_balance {self.bias_balance}; it is for heads that lose and then give"
      " nothing. Use rule = top_k or threshold and leave the others at their defaults, or leave it"
      " out.",
    )
    errors.check(
      self.bias_balance == 0 or self.rule == "top_k",
      f"competition.bias_balance is {self.bias_balance} but competition.rule is {self.rule!r}; its"
      " biases count where the best units are found. Use rule = top_k, or leave it out.",
    )
    errors.check(
      self.keep is None or self.rule == "top_k",
      f"competition.keep is {self.keep} but competition.rule is {self.rule!r}; `keep` belongs to"
      " the rule 'top_k'. Set the rule or leave `keep` out.",
    )
    errors.check(
      self.threshold == 0 or self.rule == "threshold",
      f"competition.threshold is {self.threshold} but competition.rule is {self.rule!r};"
      " `threshold` belongs to the rule 'threshold'. Set the rule or leave `threshold` out.",
    )

  @property
  def fused(self) -> bool:
    """Whether kernels compute the weights, and scale heads on the way through what comes behind."""
    plain = self.inactive == "null" and self.weighting == "softmax"
    plain = plain and not self.shared_heads and not self.bias_balance
    return self.routing == "fused" and plain

  def choice(self) -> Choice:
    """Which units stay, as kernels take it."""
    return Choice(self.rule, self.keep, self.threshold, self.temperature)

  def kept(self, units: int, kind: str = "heads") -> int:
    """Units that stay at each position under `top_k`, all of them under the other rules.

    Heads that are shared are not among them.

    Args:
      units: how many there are.
      kind: what an error calls them.

    Raises:
      UserError: `keep` or `shared_heads` is out of range for this many units.
    """
    shared = self.shared_heads
    errors.check(
      shared < units,
      f"competition.shared_heads is {shared}; with {units} {kind} it must be below {units}, so that"
      " some are chosen.",
    )
    units -= shared
    kind = f"{kind} besides the shared ones" if shared else kind
    if self.rule != "top_k":
      return units
    keep = max(1, units - 1) if self.keep is None else self.keep
    errors.check(
      1 <= keep <= units,
      f"competition.keep is {keep}; with {units} {kind} it must lie between 1 and {units}.",
    )
    return keep


def score(
  keys: Float[Array, "*rows key_dim"],
  signatures: Float[Array, "units key_dim"],
  *,
  scale: bool = True,
) -> Float[Array, "*rows units"]:
  r"""Compatibility of every unit with every position, in float32.

  .. math:: s_{ij} = a_i \cdot k_j / \sqrt{D_a}

  Args:
    keys: what the inference network says of each position.
    signatures: one learned vector a unit.
    scale: divide by the square root of the key width.
  """
  keys, signatures = keys.astype(jnp.float32), signatures.astype(jnp.float32)
  scores = jnp.einsum("...a,ha->...h", keys, signatures, precision=exactly(jnp.float32))
  return scores / jnp.sqrt(jnp.float32(keys.shape[-1])) if scale else scores


def log_weights(
  scores: Float[Array, "*rows units"], config: CompetitionConfig
) -> Float[Array, "*rows units"]:
  """Logarithms of weights before they are divided by their sum, in float32."""
  scores = scores.astype(jnp.float32) / config.temperature
  return scores if config.weighting == "softmax" else nn.log_sigmoid(scores)


def compared(
  logits: Float[Array, "*rows units"],
  config: CompetitionConfig,
  bias: Float[Array, " units"] | None = None,
) -> Float[Array, "*rows units"]:
  r"""What units are compared by where the best ones are found.

  .. math:: G(s)_{ij} + b_i

  G is the softmax over all units, or the sigmoid, as weights are; without a bias units are compared
  by its logarithm, but for what all of a position share.

  Args:
    logits: of `log_weights`, of all units that compete.
    config: how they do.
    bias: b.

  Source: Wang et al. 2024 (Auxiliary-Loss-Free Load Balancing), equation 3.
  """
  if bias is None:
    return logits
  weights = nn.softmax(logits, axis=-1) if config.weighting == "softmax" else jnp.exp(logits)
  return weights + jnp.expand_dims(bias, range(weights.ndim - 1))


def shared_and_routed(
  scores: Float[Array, "*rows units"],
  groups: Float[Array, "*rows groups"],
  config: CompetitionConfig,
  bias: Float[Array, " competing"] | None = None,
) -> Selection:
  r"""Weights of heads of which the first always stay, and the others compete.

  .. math::
     C_{ij} = \begin{cases}
       \alpha_{1j}\, \mathrm{softmax}_{i \le h}(s_{ij} / \tau) & i \le h \\
       \alpha_{2j}\, \mathrm{softmax}_{i \in S_j}(s_{ij} / \tau) & i \in S_j
     \end{cases}, \qquad \alpha_j = \mathrm{softmax}(g_j)

  with h shared heads, and :math:`S_j` what the rule keeps of the others. Weights of all heads of a
  position sum to 1. In the paper's equation the second softmax is over all heads that are not
  shared; in the original program, as here, over those that stay.

  Args:
    scores: of all heads.
    groups: g, scores of the two groups.
    config: how heads compete.
    bias: of those that are not shared; see `compared`.

  Source: Jin et al. 2024 (MoH), equations 5 and 6.
  """
  shared = select(scores[..., : config.shared_heads], temperature=config.temperature)
  keep = config.kept(scores.shape[-1])
  routed = _by_rule(scores[..., config.shared_heads :], config, keep, bias)
  share = jax.nn.softmax(groups.astype(jnp.float32), axis=-1)
  both = shared.weights * share[..., :1], routed.weights * share[..., 1:]
  active = jnp.concatenate([shared.active, routed.active], axis=-1)
  return Selection(jnp.concatenate(both, axis=-1), active)


def _by_rule(
  scores: Float[Array, "*rows units"],
  config: CompetitionConfig,
  keep: int,
  bias: Float[Array, " units"] | None = None,
) -> Selection:
  """What rule and weighting of a configuration make of scores."""
  if config.weighting == "softmax" and bias is None:
    return select(
      scores,
      rule=config.rule,
      keep=keep,
      threshold=config.threshold,
      temperature=config.temperature,
    )
  logits = log_weights(scores, config)
  active = select(compared(logits, config, bias), rule=config.rule, keep=keep).active
  if config.weighting == "sigmoid":
    return Selection(jnp.where(active, jnp.exp(logits), 0), active)
  return select(logits, mask=active)


def scale_heads(
  heads: Float[Array, "batch time heads head_dim"],
  selection: Selection,
  *,
  rescale: bool = False,
  values: Float[Array, "batch time heads head_dim"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
  r"""Head outputs times their weights, :math:`o_{ij} = C_{ij} \tilde o_{ij}`.

  Args:
    heads: the output of every head at every position.
    selection: outcome of the competition.
    rescale: multiply the weights by the number of heads.
    values: outputs of inactive heads in place of zeros, unweighted.
  """
  factor = selection.weights * heads.shape[-2] if rescale else selection.weights
  scaled = factor[..., None].astype(heads.dtype) * heads
  if values is None:
    return scaled
  return jnp.where(selection.active[..., None], scaled, values.astype(heads.dtype))


class Affine(nn.Module):
  """A layer whose product others make.

  Attributes:
    outer: width of what it makes.
    names: logical names of the kernel's dimensions.
    dtype: of the product.
  """

  outer: int
  names: tuple[str, str]
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, inner: int) -> tuple[Float[Array, "inner outer"], Float[Array, " outer"]]:
    """Kernel and bias for inputs of a width."""
    gain_two = nn.initializers.variance_scaling(2.0, "fan_avg", "uniform")
    kernel = self.param("kernel", logical(gain_two, *self.names), (inner, self.outer))
    bias = self.param("bias", nn.initializers.zeros, (self.outer,))
    return kernel.astype(self.dtype), bias.astype(self.dtype)


class Router(nn.Module):
  """Scores units from a position's activation: holds InfA (or InfF) and the signatures.

  Attributes:
    units: heads or experts that compete.
    config: how they compete.
    dtype: the model's compute type. Products are made in float32 whatever it is, unless the
      configuration says otherwise; scores always are float32.

  Its first layer, `hidden`, may be made beside another product of the same inputs.
  """

  units: int
  config: CompetitionConfig
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Makes inference network and signatures."""
    config = self.config
    self.products = jnp.float32 if config.dtype == "float32" else self.dtype
    self.hidden = Affine(config.hidden_dim, ("embed", "router"), self.products)
    self.key = Affine(config.key_dim, ("router", "key"))
    self.drop = nn.Dropout(config.dropout)
    init = logical(nn.initializers.xavier_normal(), "units", "key")
    self.signatures = self.param("signatures", init, (self.units, config.key_dim))
    if config.shared_heads:
      self.groups = self.param("groups", init, (2, config.key_dim))
    if config.bias_balance:
      zeros = logical(nn.initializers.zeros, "units")
      self.bias = self.param("bias", zeros, (self.units - config.shared_heads,))

  def __call__(
    self,
    inputs: Float[Array, "batch time embed"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Selection:
    """The weights of every unit at every position, [batch, time, units]."""
    config = self.config
    last, shift = (leaf.astype(self.products) for leaf in self.key(config.hidden_dim))
    hidden = self.drop(nn.relu(self.hidden_of(inputs)), deterministic=deterministic)

    def infer(rows: jax.Array) -> jax.Array:
      return jnp.matmul(rows, last, precision=exactly(last.dtype)) + shift[None]

    keys = over_rows(infer, hidden)
    signatures = intermediates("signatures", self.signatures)
    scores = intermediates("scores", score(keys, signatures, scale=config.scale))
    bias = intermediates("bias", self.bias) if config.bias_balance else None
    if config.shared_heads:
      groups = intermediates("groups", score(keys, self.groups, scale=config.scale))
      selection = shared_and_routed(scores, groups, config, bias)
    else:
      selection = _by_rule(scores, config, config.kept(self.units), bias)
    return selection._replace(weights=intermediates("weights", selection.weights))

  def hidden_of(
    self, inputs: Float[Array, "batch time embed"]
  ) -> Float[Array, "batch time hidden"]:
    """What the first layer makes of the inputs, before its relu."""
    kernel, bias = self.hidden(inputs.shape[-1])
    if self.products == jnp.float32:
      return float32_affine(inputs, kernel, bias)

    def project(rows: jax.Array) -> jax.Array:
      return narrow_product(rows.astype(self.products), kernel) + bias[None]

    return over_rows(project, inputs)

  def readout(
    self, *, deterministic: bool = True, intermediates: Intermediates = OFF
  ) -> tuple[Readout, Choice] | None:
    """From the first layer to weights, for a kernel that does it beside its other work.

    None where the first layer's units are dropped, or something between is read or changed, but for
    reading weights.
    """
    config = self.config
    dropped = config.dropout > 0 and not deterministic
    between = intermediates.wants("signatures", "scores") or intermediates.changes("weights")
    if dropped or between:
      return None
    made = fold_signatures(*self.key(config.hidden_dim), self.signatures, scale=config.scale)
    return made, config.choice()

  def weights_of(
    self,
    hidden: Float[Array, "batch time hidden"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time units"]:
    """The same weights, by a kernel where there is one.

    Args:
      hidden: as `hidden_of` returns them.
      deterministic: no dropout.
      intermediates: sites to read or change; scores are formed only if they are among them.
    """
    config = self.config
    # Its factors are never negative: before the relu they do what they do behind it.
    hidden = self.drop(hidden, deterministic=deterministic)
    signatures = intermediates("signatures", self.signatures)
    readout = fold_signatures(*self.key(config.hidden_dim), signatures, scale=config.scale)
    choice = config.choice()
    rows = ("batch", "time", None)
    if intermediates.wants("scores"):
      softmax = functools.partial(routing_softmax, choice=choice)
      weights = sharding.on_parts(
        softmax, [intermediates("scores", readout.scores(hidden))], [rows]
      )
    else:
      weights = sharding.on_parts(
        lambda kernel, bias, hidden: routing_weights(hidden, Readout(kernel, bias), choice=choice),
        [*readout, hidden],
        [(None, None), (None,), rows],
      )
    return intermediates("weights", weights)


def routing_parameter(path: str) -> bool:
  """Whether a parameter (path joined by "/") belongs to a router: inference network, signatures."""
  return "/router/" in f"/{path}/"
