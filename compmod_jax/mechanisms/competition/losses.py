r"""Losses that keep routers healthy: an even load, and scores that stay small.

.. math::
   L_{balance} = N \sum_i f_i P_i, \qquad
   L_z = \frac{1}{T} \sum_j \Big(\ln \sum_i e^{s_{ij}}\Big)^2

for one router of N units over T real tokens: :math:`f_i` is the share of tokens whose largest
weight is unit i's (under `top_k`, of all chosen slots), without a gradient, :math:`P_i` the mean
softmax weight before selection. The balance is 1 where the load is even. Modules of one kind are
summed. Heads that are shared have no load; N are the others.

Source: Fedus et al. 2021, equations 4 to 6; Zoph et al. 2022, equation 5.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core.losses import Term, ratio
from compmod_jax.mechanisms.competition.router import CompetitionConfig, rank


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
    pairs = (("balance", self.config.balance), ("z", self.config.z))
    return {f"{self.kind}_{name}": weight for name, weight in pairs if weight > 0 and self.sites}


def objective(routers: Iterable[Routers]) -> dict[str, float]:
  """The active terms of all routers and their weights."""
  return {name: weight for group in routers for name, weight in group.weights().items()}


def captured_sites(routers: Iterable[Routers]) -> frozenset[str]:
  """The sites that `terms` reads; none where no term is active."""
  return frozenset(_scores(s) for group in routers if group.weights() for s in group.sites)


def terms(
  routers: Iterable[Routers],
  captured: Mapping[str, jax.Array],
  rows: Callable[[str], Bool[Array, "batch time"]],
) -> dict[str, Term]:
  """The active terms over a batch.

  Args:
    routers: of the model.
    captured: activations of `captured_sites(routers)`.
    rows: from a site to the positions at which it holds real tokens.
  """
  found: dict[str, Term] = {}
  for group in routers:
    weights = group.weights()
    if not weights:
      continue
    seen = [(captured[_scores(site)], rows(site)) for site in group.sites]
    count = jnp.stack([jnp.sum(real) for _, real in seen]).astype(jnp.float32)
    made = {
      "balance": (lambda s, real: load(s, real, group.config), balance),
      "z": (squared_normaliser, summed_means),
    }
    for name, weight in weights.items():
      statistics, finish = made[name.removeprefix(f"{group.kind}_")]
      total = jnp.stack([statistics(*pair) for pair in seen])
      found[name] = Term(total, count, weight, finish)
  return found


def load(
  scores: Float[Array, "batch time units"],
  rows: Bool[Array, "batch time"],
  config: CompetitionConfig,
) -> Float[Array, "2 competing"]:
  """Slots that every unit gets, and its softmax weight, each summed over real tokens.

  Units are those that compete: shared heads are left out.

  Args:
    scores: before selection.
    rows: true for real tokens.
    config: under `top_k` a token has `keep` slots, else one, its best unit's.
  """
  keep = config.kept(scores.shape[-1]) if config.rule == "top_k" else 1
  scores = scores[..., config.shared_heads :].astype(jnp.float32) / config.temperature
  slots = (rank(jax.lax.stop_gradient(scores)) < keep).astype(jnp.float32)
  both = jnp.stack([slots, jax.nn.softmax(scores, axis=-1)])
  return jnp.sum(jnp.where(rows[None, ..., None], both, 0), axis=(1, 2))


def balance(
  total: Float[Array, "modules 2 units"], count: Float[Array, " modules"]
) -> Float[Array, ""]:
  """The balance loss of all modules from their loads."""
  slots, weights = total[:, 0], total[:, 1]
  share = ratio(slots, jnp.sum(slots, axis=-1, keepdims=True))
  return total.shape[-1] * jnp.sum(share * ratio(weights, count[:, None]))


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


def _scores(site: str) -> str:
  return f"{site.removesuffix('/weights')}/scores"
