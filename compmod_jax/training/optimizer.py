"""Optimizers and learning-rate schedules, from optax."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from compmod_jax.core import errors
from compmod_jax.mechanisms.competition.router import routing_parameter
from compmod_jax.mechanisms.recoding.config import STANDING
from compmod_jax.training.muon import orthogonal

Schedule = Literal["inverse_sqrt", "cosine", "linear", "constant", "plateau"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How parameters move; the defaults are the translation recipe's."""

  name: Literal["adam", "adamw", "muon", "sgd"] = "adamw"
  """adamw decouples weight decay from the gradient; adam and sgd take none. muon is adamw with
  orthogonal steps for hidden matrices."""
  learning_rate: float = 5e-4
  """Largest learning rate, reached at the end of the warm-up."""
  schedule: Schedule = "inverse_sqrt"
  """How the rate falls after the warm-up; cosine and linear end at the last step, plateau divides
  by `plateau_divisor` after every evaluation that is not the best so far, or hardly."""
  plateau_divisor: float = 4.0
  """What the rate is divided by (plateau)."""
  plateau_improvement: float = 0.0
  """An evaluation whose score is better than the best by this fraction of it or less counts as not
  better (plateau)."""
  warmup_steps: int = 4000
  """Steps over which the rate rises linearly from 0."""
  final_fraction: float = 0.0
  """Rate at the last step, as a fraction of the largest (cosine, linear)."""
  falling_share: float = 1.0
  """Share of the steps after the warm-up, the last ones, over which the rate falls; before them it
  stays at its largest (cosine, linear)."""
  b1: float = 0.9
  """Decay of Adam's first moment."""
  b2: float = 0.98
  """Decay of Adam's second moment."""
  eps: float = 1e-8
  """Adam's epsilon."""
  weight_decay: float = 0.0
  """Decoupled weight decay, per unit of learning rate, on matrices only."""
  momentum: float = 0.0
  """Momentum of sgd."""
  clip: float = 0.0
  """Largest global gradient norm; 0 means no clipping."""

  def __post_init__(self):
    errors.check_choice("optimizer.name", self.name, ("adam", "adamw", "muon", "sgd"))
    errors.check_choice("optimizer.schedule", self.schedule, SCHEDULES)
    for field in ("warmup_steps", "final_fraction", "weight_decay", "momentum", "clip"):
      value = getattr(self, field)
      errors.check(value >= 0, f"optimizer.{field} is {value}; it must not be negative.")
    errors.check(
      self.learning_rate > 0,
      f"optimizer.learning_rate is {self.learning_rate}; it must be positive.",
    )
    errors.check(
      0 < self.falling_share <= 1,
      f"optimizer.falling_share is {self.falling_share}; it is a share of the steps, over 0 and at"
      " most 1.",
    )
    for field in ("b1", "b2", "momentum"):
      value = getattr(self, field)
      errors.check(
        0 <= value < 1, f"optimizer.{field} is {value}; it must be at least 0 and below 1."
      )
    errors.check(
      0 <= self.plateau_improvement < 1,
      f"optimizer.plateau_improvement is {self.plateau_improvement}; it is a fraction of the best"
      " score, at least 0 and below 1.",
    )
    errors.check(
      self.plateau_divisor > 1,
      f"optimizer.plateau_divisor is {self.plateau_divisor}; it must be over 1, or the rate would"
      " not fall.",
    )
    errors.check(self.eps > 0, f"optimizer.eps is {self.eps}; it must be positive.")
    for field, (none, owner, choices) in _BELONG.items():
      value, chosen = getattr(self, field), getattr(self, owner)
      errors.check(
        value == none or chosen in choices,
        f"optimizer.{field} is {value} but optimizer.{owner} is {chosen!r}, which has no use for"
        f" it. Use {' or '.join(choices)}, or set {field} to {none:g}.",
      )


SCHEDULES = get_args(Schedule)
_FALLING = ("cosine", "linear")
# field -> the value at which it does nothing, and what it belongs to
_BELONG = {
  "weight_decay": (0.0, "name", ("adamw", "muon")),
  "momentum": (0.0, "name", ("sgd",)),
  "final_fraction": (0.0, "schedule", _FALLING),
  "falling_share": (1.0, "schedule", _FALLING),
  "plateau_improvement": (0.0, "schedule", ("plateau",)),
}


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[Any], jax.Array]:
  """Learning rate as a function of the number of updates made so far.

  The first update uses step 1's rate, so that a warm-up never starts with an update of zero.
  """
  peak, warmup = config.learning_rate, config.warmup_steps

  def rate(count: Any) -> jax.Array:
    step = jnp.asarray(count, jnp.float32) + 1
    rising = step / max(warmup, 1)
    left = max(total_steps - warmup, 1)
    share = config.falling_share
    progress = jnp.clip(((step - warmup) / left - (1 - share)) / share, 0, 1)
    low = config.final_fraction
    if config.schedule == "inverse_sqrt":
      falling = jnp.sqrt(max(warmup, 1) / jnp.maximum(step, max(warmup, 1)))
    elif config.schedule == "cosine":
      falling = low + (1 - low) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    elif config.schedule == "linear":
      falling = 1 - (1 - low) * progress
    else:
      falling = jnp.float32(1)
    return peak * jnp.where(step < warmup, rising, falling)

  return rate


def decayed(params: Any) -> Any:
  """True for every parameter that weight decay shrinks: matrices and tables.

  Biases of any shape, learned step sizes and the anchors of an ensemble are left alone.
  """

  def one(path: Any, leaf: Any) -> bool:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return leaf.ndim > 1 and not name.endswith("bias") and name not in STANDING

  return jax.tree_util.tree_map_with_path(one, params)


GROUPS = ("rest", "routing")


def groups(params: Any) -> Any:
  """The group of every parameter: `routing` for those of routers, `rest` for all others."""

  def one(path: Any, _: Any) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return "routing" if routing_parameter(name) else "rest"

  return jax.tree_util.tree_map_with_path(one, params)


def adam_in_groups(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
  """Adam, in which each of `GROUPS` counts its own updates for the correction of the bias.

  `update` takes `moving`, a tree of booleans like the parameters: a group of which nothing moves
  does not count. Its moments are for the caller to leave alone.
  """
  adam: Any = optax.scale_by_adam(b1, b2, eps)

  def init(params: Any) -> Any:
    state = adam.init(params)
    return state._replace(count={group: jnp.zeros_like(state.count) for group in GROUPS})

  def update(
    updates: Any, state: Any, params: Any = None, *, moving: Any = None, **_: Any
  ) -> tuple[Any, Any]:
    names = groups(updates)
    moving = jax.tree.map(lambda _: True, updates) if moving is None else moving
    count, found, after = dict(state.count), [], state
    for group in GROUPS:
      # The moments come out the same each time; what differs is their correction.
      one, after = adam.update(updates, state._replace(count=state.count[group]), params)
      found.append(one)
      if any(jax.tree.leaves(jax.tree.map(lambda n, m: m and n == group, names, moving))):
        count[group] = after.count
    chosen = jax.tree.map(lambda name, *each: each[GROUPS.index(name)], names, *found)
    return chosen, after._replace(count=count)

  return optax.GradientTransformationExtraArgs(init, update)


class Plateau(NamedTuple):
  """State of `scale_by_plateau`: what updates are multiplied with."""

  factor: jax.Array


def scale_by_plateau() -> optax.GradientTransformation:
  """Multiplies updates with a factor that `lower_rate` changes from outside."""

  def init(params: Any) -> Plateau:
    return Plateau(jnp.ones(()))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return jax.tree.map(lambda u: state.factor * u, updates), state

  return optax.GradientTransformation(init, update)


def lower_rate(opt_state: Any, divisor: float) -> Any:
  """The optimizer's state with the learning rate divided; for the schedule `plateau`."""

  def one(part: Any) -> Any:
    return Plateau(part.factor / divisor) if isinstance(part, Plateau) else part

  return jax.tree.map(one, opt_state, is_leaf=lambda part: isinstance(part, Plateau))


def stands_still(config: OptimizerConfig, score: float, best: float | None) -> bool:
  """Whether a score, better or not, is too close to the best before it; for the schedule `plateau`.

  Args:
    config: the configuration.
    score: the new score, where less is better the negated one.
    best: the best before, negated in the same way; None before the first.
  """
  if config.schedule != "plateau" or best is None:
    return False
  return not score > best + config.plateau_improvement * abs(best)  # a NaN is no gain


def plateau_factor(opt_state: Any) -> jax.Array | float:
  """What the learning rate is multiplied with; 1 for other schedules."""
  parts = jax.tree.leaves(opt_state, is_leaf=lambda part: isinstance(part, Plateau))
  return next((part.factor for part in parts if isinstance(part, Plateau)), 1.0)


def parts(config: OptimizerConfig) -> tuple[str, ...]:
  """The transformations that an optimizer consists of, in their order."""
  there = {
    "clip": config.clip > 0,
    "moments": True,
    "decay": config.weight_decay > 0,
    "rate": True,
    "plateau": config.schedule == "plateau",
  }
  return tuple(name for name, used in there.items() if used)


def carried_over(state: Any, old: OptimizerConfig, new: OptimizerConfig, fresh: Any) -> Any:
  """An optimizer's state as that of another, which clips, decays or divides its rate as it did not.

  Args:
    state: of `make_optimizer(old, ...)`.
    old: its configuration.
    new: the other one's; the moments are of the same kind.
    fresh: shapes of the other one's state.
  """
  known = dict(zip(parts(old), state, strict=True))

  def one(name: str, shapes: Any) -> Any:
    if name in known:
      return known[name]
    # Of what may be new, `Plateau` alone holds a number: its factor, 1 at first.
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

  return tuple(one(name, shapes) for name, shapes in zip(parts(new), fresh, strict=True))


def make_optimizer(
  config: OptimizerConfig, total_steps: int, *, grouped: bool = False
) -> optax.GradientTransformation:
  """The optimizer of a configuration, its schedule running over `total_steps` updates.

  Args:
    config: the configuration.
    total_steps: updates of all phases together.
    grouped: routers and the rest have counts of their own, as phases that freeze either need it.
  """
  rate = learning_rate(config, total_steps)
  chain: list[optax.GradientTransformation] = []
  if config.clip > 0:
    chain.append(optax.clip_by_global_norm(config.clip))
  if config.name == "sgd":
    chain.append(optax.trace(config.momentum) if config.momentum else optax.identity())
  else:
    make = adam_in_groups if grouped else optax.scale_by_adam
    adam: Any = make(config.b1, config.b2, config.eps)
    chain.append(orthogonal(adam, config.b1) if config.name == "muon" else adam)
  if config.weight_decay > 0:
    chain.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
  chain.append(optax.scale_by_learning_rate(rate))
  if config.schedule == "plateau":
    chain.append(scale_by_plateau())
  return optax.chain(*chain)
