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
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from compmod_jax.core import errors, sharding
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import exactly, narrow_product, over_rows
from compmod_jax.core.sharding import logical
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
  "rank",
  "routing_parameter",
  "scale_heads",
  "score",
  "select",
  "shared_and_routed",
]


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
  balance: float = 0.0
  """Coefficient of the load-balance loss; 0 for none, 0.01 is usual."""
  z: float = 0.0
  """Coefficient of the z-loss, which keeps scores small; 0 for none, 0.001 is usual."""
  shared_heads: int = 0
  """The first heads, so many, that always stay; the rule chooses among the others, of which `keep`
  are counted, and every token weighs the two groups (MoH; Jin et al. 2024). 0: no such heads."""

  def __post_init__(self):
    for field in ("key_dim", "hidden_dim"):
      value = getattr(self, field)
      errors.check(value >= 1, f"competition.{field} is {value}; it must be at least 1.")
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
    for field in ("balance", "z"):
      value = getattr(self, field)
      errors.check(value >= 0, f"competition.{field} is {value}; it must be at least 0 (no loss).")
    errors.check(
      self.shared_heads >= 0,
      f"competition.shared_heads is {self.shared_heads}; it must be at least 0 (no shared heads).",
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
    plain = self.inactive == "null" and not self.shared_heads
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


def shared_and_routed(
  scores: Float[Array, "*rows units"],
  groups: Float[Array, "*rows groups"],
  config: CompetitionConfig,
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

  Source: Jin et al. 2024 (MoH), equations 5 and 6.
  """
  shared = select(scores[..., : config.shared_heads], temperature=config.temperature)
  routed = _by_rule(scores[..., config.shared_heads :], config, config.kept(scores.shape[-1]))
  share = jax.nn.softmax(groups.astype(jnp.float32), axis=-1)
  both = shared.weights * share[..., :1], routed.weights * share[..., 1:]
  active = jnp.concatenate([shared.active, routed.active], axis=-1)
  return Selection(jnp.concatenate(both, axis=-1), active)


def _by_rule(
  scores: Float[Array, "*rows units"], config: CompetitionConfig, keep: int
) -> Selection:
  """What the rule of a configuration makes of scores."""
  return select(
    scores,
    rule=config.rule,
    keep=keep,
    threshold=config.threshold,
    temperature=config.temperature,
  )


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
    if config.shared_heads:
      groups = intermediates("groups", score(keys, self.groups, scale=config.scale))
      selection = shared_and_routed(scores, groups, config)
    else:
      selection = _by_rule(scores, config, config.kept(self.units))
    return selection._replace(weights=intermediates("weights", selection.weights))

  def hidden_of(
    self, inputs: Float[Array, "batch time embed"]
  ) -> Float[Array, "batch time hidden"]:
    """What the first layer makes of the inputs, before its relu."""
    kernel, bias = self.hidden(inputs.shape[-1])

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
