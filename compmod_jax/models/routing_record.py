"""The router weights of every step of decoding, which a cache keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.layers.block import StackConfig


def routing_cache(config: StackConfig, shape: tuple[int, int, int]) -> dict[str, jax.Array]:
  """Room for the weights of the decoder's routers, site -> [batch, beams, length, units].

  Args:
    config: of the model.
    shape: batch, beams and length.
  """
  sites = config.routing_sites("decoder")
  return {site: jnp.zeros((*shape, config.units(site))) for site in sites}


def record_step(
  run: Callable[[Intermediates], tuple[jax.Array, dict[str, Any]]],
  cache: dict[str, Any],
  intermediates: Intermediates,
) -> tuple[jax.Array, dict[str, Any]]:
  """A step of decoding that also writes the weights for which the cache has room.

  Args:
    run: makes logits and the next cache.
    cache: before the step, with `routing` and `position`.
    intermediates: sites to read or change.
  """
  routing = cache["routing"]
  if not routing:
    return run(intermediates)
  record = intermediates.apart().also(routing)
  logits, after = run(record)
  intermediates.merge(
    {k: v for k, v in record.captured.items() if intermediates.wants(k)}, record.seen
  )
  place = (0, 0, cache["position"], 0)
  written = {
    site: jax.lax.dynamic_update_slice(kept, record.captured[site][:, :, None], place)
    for site, kept in routing.items()
  }
  return logits, after | {"routing": written}
