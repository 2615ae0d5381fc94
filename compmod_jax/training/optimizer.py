"""Optimizers, groups of parameters with optimizers of their own, and schedules, from optax."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike
from jaxtyping import PyTree

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.parameters import chosen, matches, names, path_name
from compmod_jax.core.types import Params
from compmod_jax.mechanisms.competition.router import routing_parameter
from compmod_jax.mechanisms.recoding.config import STANDING
from compmod_jax.training.muon import Preconditioning, orthogonal

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
  newton_schulz_steps: int = 5
  """Iterations that make a step of muon orthogonal; each is three products of a matrix."""
  preconditioning: Preconditioning = "frobenius"
  """What muon does to a matrix before them: divides it by its Frobenius norm, or also its rows (the
  shorter side) by what bounds the singular values closer (aol), which saves one iteration."""

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
    check_least(self, "optimizer.", newton_schulz_steps=1)
    errors.check_choice(
      "optimizer.preconditioning", self.preconditioning, get_args(Preconditioning)
    )
    errors.check(
      self.final_fraction <= 1,
      f"optimizer.final_fraction is {self.final_fraction}; it is a fraction of the largest rate, at"
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
        f" it. Use {' or '.join(choices)}, or set {field} to {none}.",
      )


SCHEDULES = get_args(Schedule)
_FALLING = ("cosine", "linear")
# field -> the value at which it does nothing, and what it belongs to
_BELONG = {
  "weight_decay": (0.0, "name", ("adamw", "muon")),
  "newton_schulz_steps": (5, "name", ("muon",)),
  "preconditioning": ("frobenius", "name", ("muon",)),
  "momentum": (0.0, "name", ("sgd",)),
  "final_fraction": (0.0, "schedule", _FALLING),
  "falling_share": (1.0, "schedule", _FALLING),
  "plateau_improvement": (0.0, "schedule", ("plateau",)),
}


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[ArrayLike], jax.Array]:
  """Learning rate as a function of the number of updates made so far.

  The first update uses step 1's rate, so that a warm-up never starts with an update of zero.
  """
  peak, warmup = config.learning_rate, config.warmup_steps

  def rate(count: ArrayLike) -> jax.Array:
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


def decayed(params: optax.Params) -> PyTree:
  """True for every parameter that weight decay shrinks: matrices and tables.

  Biases of any shape, learned step sizes and the anchors of an ensemble are left alone.
  """

  def one(path: KeyPath, leaf: jax.Array) -> bool:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return leaf.ndim > 1 and not name.endswith("bias") and name not in STANDING

  return jax.tree_util.tree_map_with_path(one, params)


GROUPS = ("rest", "routing")
"""Groups that every model has, of the parameters that are in no other."""


@dataclasses.dataclass(frozen=True)
class ParamGroup:
  """Parameters that train together, apart from others: in phases of their own, or at a rate of
  their own."""

  name: str
  """What phases and logs call it. With the name routing: the routers' parameters."""
  parameters: tuple[str, ...] = ()
  """Names of its parameters, or of modules for all in them; * stands for any characters."""
  optimizer: OptimizerConfig | None = None
  """How they move; None: as all others do."""

  def __post_init__(self):
    errors.check(
      re.fullmatch(r"[\w.-]+", self.name) and self.name not in ("all", "rest"),
      f"groups.name is {self.name!r}; it has to be of letters, digits, '_', '.' and '-', and not"
      " 'all' or 'rest', which are all parameters and those in no group. Give another name.",
    )
    errors.check(
      bool(self.parameters) == (self.name != "routing"),
      f"groups.{self.name}.parameters is {self.parameters}; give patterns of the parameters' names,"
      " such as 'encoder*', and none to the group 'routing', whose parameters are the routers'.",
    )
    clip = self.optimizer.clip if self.optimizer else 0
    errors.check(
      not clip,
      f"groups.{self.name}.optimizer.clip is {clip}; gradients are clipped by their norm over all"
      " groups. Leave it out, and set optimizer.clip.",
    )


def groups(params: optax.Params, own: Sequence[ParamGroup] = ()) -> PyTree:
  """The name of every parameter's group: the one whose patterns stand for it, else of `GROUPS`.

  Args:
    params: the parameters, or their shapes.
    own: groups of the experiment's; see `check_groups`.
  """

  def one(path: KeyPath, _: object) -> str:
    name = path_name(path)
    built_in = "routing" if routing_parameter(name) else "rest"
    return next((group.name for group in own if matches(name, group.parameters)), built_in)

  return jax.tree_util.tree_map_with_path(one, params)


def check_groups(params: Params, own: Sequence[ParamGroup]) -> None:
  """Raises a `UserError` for groups that do not fit a model.

  A pattern that stands for no parameter does not, and neither do two groups that have a parameter
  in common.
  """
  taken = dict[str, str]()
  for group in own:
    mask = chosen(params, group.parameters, f"groups.{group.name}.parameters")
    for name, mine in zip(names(params), jax.tree.leaves(mask), strict=True):
      other = taken.setdefault(name, group.name) if mine else group.name
      errors.check(
        other == group.name,
        f"groups.{group.name}.parameters is {group.parameters}, which stand for {name!r} too, a"
        f" parameter of the group {other!r}; a parameter is in one group. Narrow the patterns of"
        " either.",
      )


def optimizers(config: OptimizerConfig, own: Sequence[ParamGroup]) -> dict[str, OptimizerConfig]:
  """How the parameters of every group move, without clipping, which is of all together."""
  config = dataclasses.replace(config, clip=0.0)
  return dict.fromkeys(GROUPS, config) | {g.name: g.optimizer or config for g in own}


def adam_in_groups(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
  """Adam, in which each of `GROUPS` counts its own updates for the correction of the bias.

  `update` takes `moving`, a tree of booleans like the parameters: a group of which nothing moves
  does not count. Its moments are for the caller to leave alone.
  """
  # Of an optimizer's state optax's types say no more than that it is a tree.
  adam: Any = optax.scale_by_adam(b1, b2, eps)

  def init(params: optax.Params) -> optax.OptState:
    state = adam.init(params)
    return state._replace(count={group: jnp.zeros_like(state.count) for group in GROUPS})

  def update(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    *,
    moving: PyTree | None = None,
    **_: object,
  ) -> tuple[optax.Updates, optax.OptState]:
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


def counting_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
  """Adam of one group of `optax.partition`; an update in which nothing moves does not count."""
  # Of an optimizer's state optax's types say no more than that it is a tree.
  adam: Any = optax.scale_by_adam(b1, b2, eps)

  def update(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    *,
    moving: PyTree | None = None,
    **_: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    found, after = adam.update(updates, state, params)
    still = moving is not None and not any(jax.tree.leaves(moving))
    return found, after._replace(count=state.count) if still else after

  return optax.GradientTransformationExtraArgs(adam.init, update)


class Plateau(NamedTuple):
  """State of `scale_by_plateau`: what updates are multiplied with."""

  factor: jax.Array


def scale_by_plateau() -> optax.GradientTransformation:
  """Multiplies updates with a factor that `lower_rate` changes from outside."""

  def init(params: optax.Params) -> Plateau:
    return Plateau(jnp.ones(()))

  def update(
    updates: optax.Updates, state: PyTree, params: optax.Params | None = None
  ) -> tuple[optax.Updates, Plateau]:
    return jax.tree.map(lambda u: state.factor * u, updates), state

  return optax.GradientTransformation(init, update)


def lower_rate(opt_state: PyTree, divisor: float, group: str | None = None) -> PyTree:
  """The optimizer's state with the learning rate divided; for the schedule `plateau`.

  Args:
    opt_state: of `make_optimizer`.
    divisor: of the rate.
    group: whose rate, where groups have optimizers of their own.
  """
  if group is not None:
    *before, parted = opt_state
    lower = lower_rate(parted.inner_states[group], divisor)
    return (*before, parted._replace(inner_states={**parted.inner_states, group: lower}))

  def one(part: object) -> object:
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
  if math.isnan(best):
    return math.isnan(score)
  return not score > best + config.plateau_improvement * abs(best)  # a NaN is no gain


def plateau_factor(opt_state: PyTree, group: str | None = None) -> jax.Array | float:
  """What the learning rate is multiplied with; 1 for other schedules. Arguments as `lower_rate`."""
  if group is not None:
    opt_state = opt_state[-1].inner_states[group]
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


def carried_over(
  state: PyTree, old: OptimizerConfig, new: OptimizerConfig, fresh: PyTree
) -> tuple[PyTree, ...]:
  """An optimizer's state as that of another, which clips, decays or divides its rate as it did not.

  Args:
    state: of `make_optimizer(old, ...)`.
    old: its configuration.
    new: the other one's; the moments are of the same kind.
    fresh: shapes of the other one's state.
  """
  known = dict(zip(parts(old), state, strict=True))

  def one(name: str, shapes: PyTree) -> PyTree:
    if name in known:
      return known[name]
    # Of what may be new, `Plateau` alone holds a number: its factor, 1 at first.
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

  return tuple(one(name, shapes) for name, shapes in zip(parts(new), fresh, strict=True))


def carried_over_groups(
  state: PyTree,
  old: tuple[OptimizerConfig, Sequence[ParamGroup]],
  new: tuple[OptimizerConfig, Sequence[ParamGroup]],
  fresh: PyTree,
) -> tuple[PyTree, ...]:
  """As `carried_over`, of optimizers with the same groups, each given with its groups."""
  then, now = optimizers(*old), optimizers(*new)
  inner = {
    name: part._replace(
      inner_state=carried_over(
        state[-1].inner_states[name].inner_state, then[name], now[name], part.inner_state
      )
    )
    for name, part in fresh[-1].inner_states.items()
  }
  # Clipping has no numbers.
  return (*fresh[:-1], state[-1]._replace(inner_states=inner))


def make_optimizer(
  config: OptimizerConfig,
  total_steps: int,
  *,
  grouped: bool = False,
  own: Sequence[ParamGroup] = (),
) -> optax.GradientTransformation:
  """The optimizer of a configuration, its schedule running over `total_steps` updates.

  Args:
    config: the configuration.
    total_steps: updates of all phases together.
    grouped: routers and the rest have counts of their own, as phases that freeze either need it.
    own: groups of parameters; each then has an optimizer of its own, and so have routers and the
      rest of what is in none of them.
  """
  clip = [optax.clip_by_global_norm(config.clip)] if config.clip > 0 else []
  if not own:
    adam = adam_in_groups if grouped else optax.scale_by_adam
    return optax.chain(*clip, *_without_clipping(config, total_steps, adam))
  each: dict[Hashable, optax.GradientTransformation] = {
    name: optax.chain(*_without_clipping(one, total_steps, counting_adam))
    for name, one in optimizers(config, own).items()
  }

  def labels(params: optax.Params) -> PyTree:
    return groups(params, own)

  return optax.chain(*clip, optax.partition(each, labels, mask_compatible_extra_args=True))


def _without_clipping(
  config: OptimizerConfig,
  total_steps: int,
  make_adam: Callable[[float, float, float], optax.GradientTransformation],
) -> list[optax.GradientTransformation]:
  """What an optimizer is a chain of, but for clipping."""
  chain: list[optax.GradientTransformation] = []
  if config.name == "sgd":
    chain.append(optax.trace(config.momentum) if config.momentum else optax.identity())
  else:
    adam = make_adam(config.b1, config.b2, config.eps)
    if config.name == "muon":
      adam = orthogonal(
        adam, config.b1, steps=config.newton_schulz_steps, preconditioning=config.preconditioning
      )
    chain.append(adam)
  if config.weight_decay > 0:
    chain.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
  chain.append(optax.scale_by_learning_rate(learning_rate(config, total_steps)))
  if config.schedule == "plateau":
    chain.append(scale_by_plateau())
  return chain


def like_parameters(
  optimizer: optax.GradientTransformation,
  state: optax.OptState,
  tree: PyTree,
  others: Callable[[jax.Array], object],
) -> PyTree:
  """An optimizer's state with something else for every parameter in it.

  Args:
    optimizer: whose state it is.
    state: the state.
    tree: like the parameters: what stands in place of their moments.
    others: from any other array of the state to what stands in its place.
  """

  def one(moment: object, given: object) -> object:
    return moment if isinstance(moment, optax.MaskedNode) else given

  return optax.tree.map_params(
    optimizer,
    one,
    state,
    tree,
    transform_non_params=others,
    is_leaf=lambda part: isinstance(part, optax.MaskedNode),
  )
