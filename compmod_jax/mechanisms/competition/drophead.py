r"""DropHead: whole attention heads are dropped in training, each sequence its own ones.

.. math:: o_i \leftarrow \frac{\xi_i}{\gamma}\, o_i, \qquad
   \gamma = \frac{1}{H} \sum_i \xi_i, \qquad P(\xi_i = 0) = p

A draw that drops every head keeps one, drawn uniformly, so that :math:`\gamma` is never 0 and each
head's mean factor is exactly 1. Where heads compete, the softmax over heads does not see the mask,
which multiplies outputs: before or after their weights do comes to the same, except that heads that
lost may have an output other than zeros. Before, the competition can be fused.

Source: Zhou et al. 2020; Kolios 2023, section 3.11, equation 3.25.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.intermediates import Edit

Schedule = Literal["none", "v", "constant", "curriculum", "anti_curriculum"]

# Keeps the draws apart from those of ordinary dropout, which start from the same key.
_STREAM = 0x0D20


@dataclasses.dataclass(frozen=True)
class DropHeadConfig:
  """With which probability heads are dropped in the course of training (Kolios 2023, 3.11.2)."""

  schedule: Schedule = "none"
  """Probability over training: none; v (`start` to 0 to `end`); constant (`start`);
  curriculum (0 to `end`); anti_curriculum (`start` to 0). All are linear in the steps."""
  start: float = 0.2
  """Probability at the first step (v, constant, anti_curriculum)."""
  end: float = 0.2
  """Probability at the last step (v, curriculum)."""
  turn: float = 0.5
  """Share of all steps after which v turns."""

  def __post_init__(self):
    errors.check_choice("drophead.schedule", self.schedule, get_args(Schedule))
    for field in ("start", "end"):
      value = getattr(self, field)
      errors.check(
        0 <= value < 1, f"drophead.{field} is {value}; it must be at least 0 and below 1."
      )
    errors.check(
      0 <= self.turn <= 1, f"drophead.turn is {self.turn}; it is a share of training, 0 to 1."
    )
    users = {"start": ("v", "constant", "anti_curriculum"), "end": ("v", "curriculum")}
    for field, schedules in {**users, "turn": ("v",)}.items():
      default = DropHeadConfig.__dataclass_fields__[field].default
      errors.check(
        self.schedule in schedules or getattr(self, field) == default,
        f"drophead.{field} is {getattr(self, field)} but drophead.schedule is {self.schedule!r},"
        f" which has no use for it. Set the schedule to {' or '.join(schedules)}, or leave"
        f" {field} out.",
      )

  @property
  def active(self) -> bool:
    """Whether any head is ever dropped."""
    used = {"none": (), "constant": (self.start,), "curriculum": (self.end,)}
    used |= {"anti_curriculum": (self.start,), "v": (self.start, self.end)}
    return any(used[self.schedule])


def probability(config: DropHeadConfig, progress: float | Float[Array, ""]) -> Float[Array, ""]:
  r"""Probability with which a head is dropped, at a point of training.

  .. math:: p(x) = p_{start} \left(1 - \frac{x}{t}\right)_+ + p_{end}
            \left(\frac{x - t}{1 - t}\right)_+

  with the turning point t for v, t = 1 for anti_curriculum and t = 0 for curriculum.

  Args:
    config: the schedule.
    progress: x, 0 at the first step and 1 at the last.

  Source: Kolios 2023, section 3.11.2 and figure 3.10.
  """
  x = jnp.asarray(progress, jnp.float32)
  if config.schedule == "none":
    return jnp.zeros_like(x)
  if config.schedule == "constant":
    return jnp.full_like(x, config.start)
  turn = {"v": config.turn, "curriculum": 0.0, "anti_curriculum": 1.0}[config.schedule]
  p = jnp.zeros_like(x)
  if turn > 0:
    p += config.start * jnp.maximum(1 - x / turn, 0)
  if turn < 1:
    p += config.end * jnp.maximum((x - turn) / (1 - turn), 0)
  return p


def draw(
  rng: jax.Array, p: float | Float[Array, ""], sequences: int, heads: int
) -> Bool[Array, "sequences heads"]:
  """Which heads stay in each sequence: each is dropped with probability `p`, but never all.

  Among the heads of a draw that drops all of them, the largest of their uniform numbers is anyone's
  with the same probability: it stays.

  Args:
    rng: a key.
    p: probability, at least 0 and at most 1.
    sequences: how many masks.
    heads: how many heads each has.
  """
  uniform = jax.random.uniform(rng, (sequences, heads))
  return uniform >= jnp.minimum(p, jnp.max(uniform, axis=-1, keepdims=True))


def factors(kept: Bool[Array, "sequences heads"]) -> Float[Array, "sequences heads"]:
  r"""What the heads' outputs are multiplied with, :math:`\xi_i / \gamma`; float32."""
  share = jnp.mean(kept, axis=-1, keepdims=True, dtype=jnp.float32)
  return kept / share


def drop_heads(
  outputs: Float[Array, "batch time heads head_dim"], *, rng: jax.Array, p: Float[Array, ""]
) -> Float[Array, "batch time heads head_dim"]:
  """Outputs of an attention module's heads, some heads of each sequence dropped at all positions.

  Args:
    outputs: of every head, weighted or not.
    rng: a key.
    p: probability of dropping a head.
  """
  batch, _, heads, _ = outputs.shape
  factor = factors(draw(rng, p, batch, heads))
  return outputs * factor[:, None, :, None].astype(outputs.dtype)


def edits(
  config: DropHeadConfig,
  sites: Iterable[str],
  *,
  rng: jax.Array,
  progress: float | Float[Array, ""],
) -> dict[str, Edit]:
  """DropHead as edits of heads' outputs; none where no head is ever dropped.

      sites = ["encoder/layer_0/self/heads"]
      intermediates = Intermediates(edits=edits(config, sites, rng=rng, progress=0.3))

  Args:
    config: the schedule.
    sites: names of the outputs of all attention modules; each draws masks of its own.
    rng: key of the step, which other random numbers may start from too.
    progress: 0 at the first step and 1 at the last.
  """
  if not config.active:
    return {}
  p, rng = probability(config, progress), jax.random.fold_in(rng, _STREAM)
  return {
    site: functools.partial(drop_heads, rng=jax.random.fold_in(rng, number), p=p)
    for number, site in enumerate(sites)
  }
