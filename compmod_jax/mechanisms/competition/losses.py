r"""Losses that keep routers healthy: an even load, and scores that stay small.

.. math::
   L_{balance} = N \sum_i f_i P_i, \qquad
   L_z = \frac{1}{T} \sum_j \Big(\ln \sum_i e^{s_{ij}}\Big)^2, \qquad
   L_{bias} = \sum_i b_i\, \mathrm{sgn}(f_i - 1 / N)

for one router of N units over T real tokens: :math:`f_i` is the share of tokens whose largest
weight is unit i's (under `top_k`, of all chosen slots), without a gradient, :math:`P_i` the mean
softmax weight before selection, or the mean share in the sum of sigmoids. The balance is 1 where
the load is even. :math:`b_i` are the biases with which the best units are found, on which the third
loss alone acts: descent lowers those of units that have more than their share. Modules of one kind
are summed. Heads that are shared have no load; N are the others.

Source: Fedus et al. 2021, equations 4 to 6; DeepSeek-AI 2024 (DeepSeek-V3), equations 17 to 20, for
sigmoids; Zoph et al. 2022, equation 5; Wang et al. 2024, algorithm 1, of which this is a step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core.losses import Term, ratio
from compmod_jax.mechanisms.competition.router import (
  CompetitionConfig,
  compared,
  log_weights,
  rank,
)

Rows = Callable[[str], Bool[Array, "batch time"]]
"""From a site to the positions at which it holds real tokens."""


@runtime_checkable
class RouterLosses(Protocol):
  """Routers of a model that have losses."""

  def weights(self) -> dict[str, float]:
    """The active terms and their weights in the objective."""
    ...

  def captured_sites(self) -> frozenset[str]:
    """The sites that `terms` reads; none where no term is active."""
    ...

  def terms(self, captured: Mapping[str, jax.Array], rows: Rows) -> dict[str, Term]:
    """The active terms over a batch; see the function of this name."""
    ...


@dataclasses.dataclass(frozen=True)
class Routers:
  """Routers of a model that share a configuration, such as those of all expert layers.

  Attributes:
    kind: `head` or `expert`; the terms are named for it.
    sites: of the routers' weights, `<name>/router/weights`.
    config: how their units compete.
  """

  kind: str
  sites: tuple[str, ...]
  config: CompetitionConfig

  def weights(self) -> dict[str, float]:
    """The active terms and their weights in the objective."""
    config = self.config
    pairs = (("balance", config.balance), ("z", config.z), ("bias", config.bias_balance))
    return {f"{self.kind}_{name}": weight for name, weight in pairs if weight > 0 and self.sites}

  def captured_sites(self) -> frozenset[str]:
    """See `RouterLosses`."""
    if not self.weights():
      return frozenset()
    names = ("scores", "bias") if self.config.bias_balance else ("scores",)
    return frozenset(_beside(site, name) for site in self.sites for name in names)

  def terms(self, captured: Mapping[str, jax.Array], rows: Rows) -> dict[str, Term]:
    """See `RouterLosses`."""
    config, weights, found = self.config, self.weights(), dict[str, Term]()
    if not weights:
      return found
    seen = [
      (captured[_beside(site, "scores")], rows(site), captured.get(_beside(site, "bias")))
      for site in self.sites
    ]
    count = jnp.stack([jnp.sum(real) for _, real, _ in seen]).astype(jnp.float32)
    made = {
      "balance": (lambda s, real, bias: load(s, real, config, bias), balance),
      "z": (lambda s, real, bias: squared_normaliser(s, real), summed_means),
      "bias": (lambda s, real, bias: biased_load(s, real, config, bias), bias_loss),
    }
    for name, weight in weights.items():
      statistics, finish = made[name.removeprefix(f"{self.kind}_")]
      total = jnp.stack([statistics(*each) for each in seen])
      found[name] = Term(total, count, weight, finish)
    return found


def objective(routers: Iterable[RouterLosses]) -> dict[str, float]:
  """The active terms of all routers and their weights."""
  return {name: weight for group in routers for name, weight in group.weights().items()}


def captured_sites(routers: Iterable[RouterLosses]) -> frozenset[str]:
  """The sites that `terms` reads; none where no term is active."""
  return frozenset(site for group in routers for site in group.captured_sites())


def terms(
  routers: Iterable[RouterLosses], captured: Mapping[str, jax.Array], rows: Rows
) -> dict[str, Term]:
  """The active terms over a batch.

  Args:
    routers: of the model.
    captured: activations of `captured_sites(routers)`.
    rows: from a site to the positions at which it holds real tokens.
  """
  return {name: term for group in routers for name, term in group.terms(captured, rows).items()}


def load(
  scores: Float[Array, "batch time units"],
  rows: Bool[Array, "batch time"],
  config: CompetitionConfig,
  bias: Float[Array, " competing"] | None = None,
) -> Float[Array, "2 competing"]:
  """Slots that every unit gets, and its softmax weight, each summed over real tokens.

  Units are those that compete: shared heads are left out.

  Args:
    scores: before selection.
    rows: true for real tokens.
    config: under `top_k` a token has `keep` slots, else one, its best unit's.
    bias: with which the best are found.
  """
  keep = config.kept(scores.shape[-1]) if config.rule == "top_k" else 1
  competing = scores[..., config.shared_heads :] if config.shared_heads else scores
  logits = log_weights(competing, config)
  found = jax.lax.stop_gradient(compared(logits, config, bias))
  slots = (rank(found) < keep).astype(jnp.float32)
  both = jnp.stack([slots, jax.nn.softmax(logits, axis=-1)])
  return jnp.sum(jnp.where(rows[None, ..., None], both, 0), axis=(1, 2))


def balance(
  total: Float[Array, "modules 2 units"], count: Float[Array, " modules"]
) -> Float[Array, ""]:
  """The balance loss of all modules from their loads."""
  slots, weights = total[:, 0], total[:, 1]
  share = ratio(slots, jnp.sum(slots, axis=-1, keepdims=True))
  return total.shape[-1] * jnp.sum(share * ratio(weights, count[:, None]))


def biased_load(
  scores: Float[Array, "batch time units"],
  rows: Bool[Array, "batch time"],
  config: CompetitionConfig,
  bias: Float[Array, " competing"],
) -> Float[Array, "2 competing"]:
  """Slots that every unit gets, and its bias, each summed over real tokens; see `load`."""
  slots = load(scores, rows, config, bias)[0]
  return jnp.stack([slots, bias * jnp.sum(rows)])


def bias_loss(
  total: Float[Array, "modules 2 units"], count: Float[Array, " modules"]
) -> Float[Array, ""]:
  """The loss of the biases of all modules, whose gradient is the sign of each unit's excess."""
  slots = jax.lax.stop_gradient(total[:, 0])
  excess = jnp.sign(slots - jnp.mean(slots, axis=-1, keepdims=True))
  return jnp.sum(excess * ratio(total[:, 1], count[:, None]))


def squared_normaliser(
  scores: Float[Array, "batch time units"], rows: Bool[Array, "batch time"]
) -> Float[Array, ""]:
  """Squared logarithm of the softmax's normaliser, summed over real tokens."""
  squares = jnp.square(jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1))
  return jnp.sum(jnp.where(rows, squares, 0))


def summed_means(
  total: Float[Array, " modules"], count: Float[Array, " modules"]
) -> Float[Array, ""]:
  """Each module's mean, summed."""
  return jnp.sum(ratio(total, count))


def _beside(site: str, name: str) -> str:
  """Another site of the router whose weights are at this one."""
  return f"{site.removesuffix('/weights')}/{name}"
