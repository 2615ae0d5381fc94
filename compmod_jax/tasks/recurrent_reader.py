"""A recurrent language model over stretches of text, with all that its recoding needs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax import errors
from compmod_jax.mechanisms.recoding_config import RecodingConfig
from compmod_jax.models.lstm_lm import Given, LstmLM, Output
from compmod_jax.sites import OFF, Edit, Taps
from compmod_jax.tasks.base import Batch

# Keep what recoding draws apart from dropout, which is drawn from the same key.
_NOISE, _SHARE = 0x4EC0, 0x5A2E


@dataclasses.dataclass(frozen=True)
class RecurrentReader:
  """Runs a model over batches of `data.streams`.

  Attributes:
    model: the LSTM.
    noise_seed: of what recoding draws where no key is given; its masks are then the same for every
      row, so that what a text is given does not depend on its place among others.
    classifier: of weak supervision, if that is the signal.
    edits: site -> change of that activation.
  """

  model: LstmLM
  noise_seed: int
  classifier: Mapping[str, Any] | None
  edits: Mapping[str, Edit]

  def __call__(
    self,
    params: Any,
    states: Any,
    batch: Batch,
    rng: jax.Array | None,
    *,
    train: bool,
    taps: Taps = OFF,
    **more: Any,
  ) -> Output:
    """What the model makes of a batch.

    Args:
      params: the model's parameters.
      states: from before the first token, of every row.
      batch: `tokens` and `targets` [batch, time], and `label` for weak supervision.
      rng: what is drawn from; without it nothing but what `noise_seed` says.
      train: as in training: with dropout, and recoding as it is set for training.
      taps: sites to read or change.
      **more: for the model's call.

    Raises:
      UserError: the signal is weak supervision, and the batch has no labels.
    """
    recoding = self.model.config.recoding
    key = jax.random.key(self.noise_seed) if rng is None else rng
    shape = batch["tokens"].shape
    active = None
    if recoding.only or recoding.share < 1:
      chosen = _active(recoding, jax.random.fold_in(key, _SHARE), shape[1])
      active = jnp.broadcast_to(chosen[None], shape)
    noise = jax.random.fold_in(key, _NOISE)
    out: Any = self.model.apply(
      {"params": params},
      jnp.asarray(batch["tokens"]),
      jnp.asarray(batch["targets"]),
      states,
      rng=rng if train else None,
      recode=recoding.applies(train=train),
      given=Given(active, self._labels(batch), self._weights(), noise, alike=rng is None),
      taps=taps.editing(self.edits),
      **more,
    )
    return out

  def _labels(self, batch: Batch) -> jax.Array | None:
    errors.check(
      self.classifier is None or "label" in batch,
      "The model recodes by weak supervision, which needs a label for every text; none is known"
      " here. Switch recoding off (--recoding signal=none).",
    )
    return jnp.asarray(batch["label"], jnp.float32) if "label" in batch else None

  def _weights(self) -> dict[str, jax.Array] | None:
    if self.classifier is None:
      return None
    return {name: jnp.asarray(value, jnp.float32) for name, value in self.classifier.items()}


def _active(recoding: RecodingConfig, key: jax.Array, time: int) -> jax.Array:
  """Which of the time steps of a stretch are recoded, 0 or 1."""
  drawn = jax.random.uniform(key, (time,) if recoding.limit == "steps" else ())
  active = jnp.broadcast_to(drawn < recoding.share, (time,))
  if recoding.only:
    active = active & jnp.isin(jnp.arange(time), jnp.asarray(recoding.only))
  return active.astype(jnp.float32)
