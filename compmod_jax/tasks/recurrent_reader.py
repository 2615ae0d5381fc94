"""A recurrent language model over stretches of text, with all that its recoding needs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Edit, Taps
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import Given, LstmLM, Output
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
    stretch: tuple[jax.Array, int] | None = None,
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
      stretch: the place of the first token in a longer text, and how long that is: what is drawn
        at every position is what would be drawn there if the text were read at once.
      taps: sites to read or change.
      **more: for the model's call.

    Raises:
      UserError: the signal is weak supervision, and the batch has no labels.
    """
    recoding = self.model.config.recoding
    key = jax.random.key(self.noise_seed) if rng is None else rng
    shape = batch["tokens"].shape
    start, longest = (0, shape[1]) if stretch is None else stretch
    noise, active, keys = jax.random.fold_in(key, _NOISE), None, None
    if recoding.only or recoding.share < 1:
      chosen = _active(recoding, jax.random.fold_in(key, _SHARE), longest)
      chosen = jax.lax.dynamic_slice_in_dim(chosen, start, shape[1])
      active = jnp.broadcast_to(chosen[None], shape)
    if recoding.signal == "mc_dropout" and stretch is not None:
      keys = jax.random.key_data(jax.random.split(noise, longest))
      keys = jax.lax.dynamic_slice_in_dim(keys, start, shape[1])
    out: Any = self.model.apply(
      {"params": params},
      jnp.asarray(batch["tokens"]),
      jnp.asarray(batch["targets"]),
      states,
      rng=rng if train else None,
      recode=recoding.applies(train=train),
      given=Given(
        active,
        self._labels(batch),
        self._weights(),
        noise,
        keys,
        jnp.asarray(batch["counted"]) > 0 if "counted" in batch else None,
        alike=rng is None,
      ),
      taps=taps.editing(self.edits),
      **more,
    )
    return out

  def prefill(
    self,
    params: Any,
    tokens: Int[Array, "batch time"],
    lengths: Int[Array, " batch"],
    last: Int[Array, " batch"],
    *,
    beams: int,
    length: int,
    taps: Taps = OFF,
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts: leaves [batch, beams, ...].

    A signal that looks at the target recodes a state once the token after it is known, so that the
    token read last waits for the next one.

    Args:
      params: the model's parameters.
      tokens: prompts without their last tokens, padded at the end.
      lengths: how many tokens of each.
      last: last tokens of the prompts, the first of `step`.
      beams: hypotheses an example.
      length: most steps.
      taps: sites to change.
    """
    longest = tokens.shape[1] + length

    def read(tokens: jax.Array, count: jax.Array, last: jax.Array) -> Any:
      targets = jnp.where(jnp.arange(len(tokens)) + 1 < count, jnp.roll(tokens, -1), last)

      def advance(states: Any, given: tuple[jax.Array, ...]) -> tuple[Any, None]:
        place, token, target = given
        after = self._one(params, states, token, target, place, longest, taps).states
        return jax.tree.map(lambda a, b: jnp.where(place < count, a, b), after, states), None

      xs = (jnp.arange(len(tokens)), tokens, targets)
      return jax.lax.scan(advance, self.model.initial_states(1), xs)[0]

    def beam_by_beam(leaf: jax.Array) -> jax.Array:
      return jnp.broadcast_to(leaf[:, None], (len(leaf), beams, *leaf.shape[1:]))

    return {
      "states": jax.tree.map(beam_by_beam, jax.vmap(read)(tokens, lengths, last)),
      "place": beam_by_beam(lengths),
      "waiting": jnp.full((len(tokens), beams), -1, jnp.int32),
    }

  def step(
    self,
    params: Any,
    cache: Mapping[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    longest: int,
    taps: Taps = OFF,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Log-probabilities after one more token of every beam, and the cache that includes it.

    Args:
      params: the model's parameters.
      cache: of `prefill`, or of the step before.
      tokens: what every beam reads.
      longest: positions of prompts and steps together.
      taps: sites to change.
    """
    recoding = self.model.config.recoding
    # The most probable token, which `argmax` looks at, is known at once.
    waits = recoding.supervised and recoding.signal != "argmax" and recoding.applies(train=False)

    def one(own: Mapping[str, Any], token: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
      states, place, waiting = own["states"], own["place"], own["waiting"]
      if waits:
        some = jnp.maximum(waiting, 0)
        after = self._one(params, states, some, token, place, longest, taps).states
        states = jax.tree.map(lambda a, b: jnp.where(waiting >= 0, a, b), after, states)
        place, waiting = place + (waiting >= 0), token
      out = self._one(params, states, token, token, place, longest, taps, logits=True)
      assert out.logits is not None
      if not waits:
        states, place = out.states, place + 1
      return out.logits[0, 0], {"states": states, "place": place, "waiting": waiting}

    own = {name: cache[name] for name in ("states", "place", "waiting")}
    return jax.vmap(jax.vmap(one))(own, tokens)

  def _one(
    self,
    params: Any,
    states: Any,
    token: jax.Array,
    target: jax.Array,
    place: jax.Array,
    longest: int,
    taps: Taps,
    **more: Any,
  ) -> Output:
    """One token of one text."""
    batch = {"tokens": token.reshape(1, 1), "targets": target.reshape(1, 1)}
    stretch = place, longest
    return self(params, states, batch, None, train=False, stretch=stretch, taps=taps, **more)

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
