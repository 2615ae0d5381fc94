"""What competition brings to the loss of any task: dropped heads, routers' losses, their health."""

from collections.abc import Callable

import jax

from compmod_jax.core.intermediates import Taps
from compmod_jax.core.losses import Term
from compmod_jax.layers.stack_config import StackConfig
from compmod_jax.mechanisms.competition import drophead, losses
from compmod_jax.mechanisms.competition.statistics import routers_captured, routers_statistics
from compmod_jax.tasks.base import Context, Metrics


def objective(config: StackConfig) -> dict[str, float]:
  """The active losses of routers and their weights."""
  return losses.objective(config.routers())


def loss_taps(config: StackConfig, context: Context) -> Taps:
  """What the model is run with: records what `read` needs, and drops heads in training."""
  edits = {}
  if context.train:
    edits = drophead.edits(
      config.drophead, config.dropped_sites(), rng=context.rng, progress=context.progress
    )
  wanted = routers_captured(config.routing_sites())
  return Taps(capture=wanted | losses.captured_sites(config.routers()), edits=edits)


def read(
  config: StackConfig, taps: Taps, rows: Callable[[str], jax.Array]
) -> tuple[dict[str, Term], Metrics]:
  """The routers' losses and their health over a batch.

  Args:
    config: of the model.
    taps: of `loss_taps`, after the model ran.
    rows: from a site to the positions [batch, time] at which it holds real tokens.
  """
  return (
    losses.terms(config.routers(), taps.captured, rows),
    routers_statistics(config.routing_sites(), taps.captured, rows),
  )
