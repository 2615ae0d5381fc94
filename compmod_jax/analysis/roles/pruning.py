r"""Which attention heads are left when every head has a price: gates that are exactly 0 or 1.

Every head's output is multiplied with a gate that is drawn from the hard concrete distribution,

.. math::
   g = \min(1, \max(0, s(\zeta - \gamma) + \gamma)), \qquad
   s = \sigma\Big(\frac{\ln u - \ln(1 - u) + a}{\beta}\Big), \qquad u \sim U(0, 1)

and training lowers the loss in nats per token plus a price for every head that is open,

.. math::
   \min_a \; E_g[L(g)] + \lambda \sum_i P(g_i \neq 0), \qquad
   P(g_i \neq 0) = \sigma\big(a_i - \beta \ln(-\gamma / \zeta)\big)

A head stays where the model loses more than :math:`\lambda` nats per token without it, given the
heads that stay with it. The model's own parameters stand still, where Voita et al. train them
along: what is found is which heads the model as it is can do without.

Sources: Louizos, Welling and Kingma 2018, equations 9 to 13; Voita et al. 2019, section 6; Kolios
2023, section 4.4.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from compmod_jax.analysis.ablation.measure import keeping
from compmod_jax.analysis.reading import Reader
from compmod_jax.analysis.roles.importance import Gates, multiplied
from compmod_jax.analysis.scoring import Losses, sentence_losses
from compmod_jax.analysis.subject import Module, Subject
from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.losses import cross_entropy
from compmod_jax.tasks.base import Batch

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
"""Temperature of the hard concrete distribution, and the interval that it is stretched to."""
OPEN = 3.0
"""Where every gate's parameter begins: it is open in all but 1 of 100 draws."""
DRAWS = 5
"""Random choices of as many heads, of which the mean is shown."""

_LARGEST = 1 - 1e-6  # of the uniform draws, whose logits have to be finite


@dataclasses.dataclass(frozen=True)
class Pruning:
  """How heads are pruned."""

  prices: tuple[float, ...] = ()
  """Prices of a head in nats per token, each of which prunes by itself; none: nothing is pruned."""
  sentences: int = 1000
  """Training sentences on which gates learn, drawn by --seed."""
  updates: int = 300
  """Updates of the gates for each price."""
  rate: float = 0.05
  """Learning rate of Adam."""

  def __post_init__(self):
    check(
      all(math.isfinite(price) and price >= 0 for price in self.prices),
      f"--prune.prices is {self.prices}; a price is a number of nats per token, not negative.",
    )
    check_least(self, "--prune.", sentences=1, updates=1)
    check(self.rate > 0, f"--prune.rate is {self.rate}; it must be positive.")


class Pruned(NamedTuple):
  """What one price leaves.

  Attributes:
    price: lambda, in nats per token.
    gates: name of a module -> the gates without noise, between 0 and 1, [heads].
    loss: of the model with the heads that are left, nats per token.
    by_ablation: with as many heads, those whose ablation alone costs most.
    at_random: with as many heads drawn at random, mean of `DRAWS` draws.
  """

  price: float
  gates: dict[str, np.ndarray]
  loss: float
  by_ablation: float
  at_random: float

  @property
  def kept(self) -> dict[str, Bool[np.ndarray, " heads"]]:
    """Module -> whether a head's gate is open at all."""
    return {name: gates > 0 for name, gates in self.gates.items()}

  @property
  def count(self) -> int:
    """Heads that are left."""
    return int(sum(kept.sum() for kept in self.kept.values()))

  @property
  def undecided(self) -> int:
    """Heads whose gate is neither closed nor open."""
    return int(sum(((one > 0) & (one < 1)).sum() for one in self.gates.values()))


# The distribution.


def sample(
  log_alpha: Float[Array, "*shape"], uniform: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Gates g for uniform draws u; see the head of this file.

  Args:
    log_alpha: a.
    uniform: u, between 0 and 1.
  """
  u = jnp.clip(uniform, 1 - _LARGEST, _LARGEST)
  return _stretched(jax.nn.sigmoid((jnp.log(u) - jnp.log1p(-u) + log_alpha) / BETA))


def without_noise(log_alpha: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """The gates that are used after training (Louizos et al. 2018, equation 13)."""
  return _stretched(jax.nn.sigmoid(log_alpha))


def open_probability(log_alpha: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """The probability that a gate is not 0 (Louizos et al. 2018, equation 12)."""
  return jax.nn.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def _stretched(s: jax.Array) -> jax.Array:
  return jnp.clip(s * (ZETA - GAMMA) + GAMMA, 0, 1)


# Training of gates, and what the pruned model loses.


def sweep(
  subject: Subject,
  read: Reader,
  modules: Sequence[Module],
  ablation: Mapping[str, np.ndarray],
  settings: Pruning,
) -> list[Pruned]:
  """Prunes once for every price.

  Args:
    subject: the model, and the sentences on which it is scored.
    read: says what is to be predicted.
    modules: whose heads, with outputs.
    ablation: module -> rise of the loss without a head alone, [heads].
    settings: prices and training.
  """
  train = dataclasses.replace(subject, split="train", sentences=settings.sentences, chosen=None)
  losses, random = sentence_losses(subject, read), np.random.default_rng(subject.seed)
  update, optimizer = _update(train, read, modules, settings.rate)
  placed = [train.place(batch) for batch in train.batches]
  order = np.concatenate(
    [random.permutation(len(placed)) for _ in range(-(-settings.updates // len(placed)))]
  )
  found = []
  for number, price in enumerate(settings.prices):
    subject.status("prices of a head", number + 1, len(settings.prices))
    log_alpha = {module.name: jnp.full(module.units, OPEN) for module in modules}
    state = optimizer.init(log_alpha)
    for step, one in enumerate(order[: settings.updates]):
      key = jax.random.fold_in(jax.random.key(subject.seed), step)
      log_alpha, state = update(log_alpha, state, subject.params, placed[one], key, price)
    gates = {
      name: np.asarray(without_noise(value)) for name, value in jax.device_get(log_alpha).items()
    }
    score = functools.partial(_score, losses, subject.params, modules)
    kept = np.concatenate([gates[module.name] > 0 for module in modules])
    costs = np.concatenate([ablation[module.name] for module in modules])
    ranked = np.argsort(np.argsort(-costs, kind="stable"), kind="stable") < kept.sum()
    drawn = [score(random.permutation(kept)) for _ in range(DRAWS)]
    found.append(Pruned(price, gates, score(kept), score(ranked), float(np.mean(drawn))))
  return found


def _update(subject: Subject, read: Reader, modules: Sequence[Module], rate: float) -> Any:
  """An update of all gates' parameters by a batch, compiled, and its optimizer."""
  optimizer, model = optax.adam(rate), subject.task.model

  def loss(
    log_alpha: Gates, params: PyTree, batch: Batch, key: jax.Array, price: float
  ) -> jax.Array:
    edits: dict[str, Edit] = {}
    for number, module in enumerate(modules):
      shape = (len(batch["index"]), module.units)
      uniform = jax.random.uniform(jax.random.fold_in(key, number), shape)
      gates = sample(jnp.broadcast_to(log_alpha[module.name][None], shape), uniform)
      edits[module.scaled] = jax.tree_util.Partial(multiplied, gates)
    logits = model.forward(params, batch, intermediates=Intermediates(edits=edits))
    found = cross_entropy(logits, *read.targets(batch))
    open_heads = sum(jnp.sum(open_probability(one)) for one in log_alpha.values())
    return found.nll / jnp.maximum(found.count, 1) + price * open_heads

  @jax.jit
  def update(log_alpha: Gates, state: Any, *args: Any) -> tuple[Gates, Any]:
    slopes = jax.grad(loss)(log_alpha, *args)
    steps, state = optimizer.update(slopes, state, log_alpha)
    moved: Any = optax.apply_updates(log_alpha, steps)
    return moved, state

  return update, optimizer


def _score(
  losses: Losses, params: PyTree, modules: Sequence[Module], kept: Bool[np.ndarray, " heads"]
) -> float:
  """Nats per token of the model with these heads, all modules' side by side."""
  every = [(module.name, unit) for module in modules for unit in range(module.units)]
  zeros = {module.scaled: np.zeros((module.units, module.dim)) for module in modules}
  without = [unit for unit, keep in zip(every, kept, strict=True) if not keep]
  nats, counts = losses(params, keeping(modules, zeros, without))
  return float(nats.sum() / max(counts.sum(), 1.0))
