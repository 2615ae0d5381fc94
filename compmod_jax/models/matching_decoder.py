"""A plain decoder with as many parameters as a modulated model, to compare the two."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from compmod_jax.core import errors
from compmod_jax.layers.stack import TextStackConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text


@functools.cache
def parameters(config: NemotConfig | DecoderConfig, vocab: int) -> int:
  """How many parameters a model has, the vanilla set's own head left out."""
  model, tasks = config.decoder(vocab, 0), config.output_tasks() or ("",)
  before = len(config.auxiliary_ids("dec", tasks[0])) or 1
  text = Text(jnp.ones((len(tasks), 2), jnp.int32), jnp.zeros((len(tasks), before), jnp.int32))
  blocks = [(task, 1) for task in tasks]
  shapes = jax.eval_shape(lambda key: model.init(key, text, blocks), jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def matching_decoder(config: NemotConfig, vocab: int) -> DecoderConfig:
  """A plain decoder of the same width whose parameters match those of a modulated model.

  Its output layer is its own, as the modulated model's is. Layers are added as long as there are
  too few parameters; then the feed-forward networks' width makes up for the rest.

  Raises:
    UserError: the two differ by more than 2 %.
  """
  wanted = parameters(config, vocab)
  fields = {field.name for field in dataclasses.fields(TextStackConfig)}
  shared = fields - set(config.mechanisms_off())
  found = DecoderConfig(
    **{name: getattr(config, name) for name in shared},
    decoder_layers=1,
    tied=False,
    scale_embeddings=config.scale_embeddings,
  )
  one = parameters(found, vocab)
  layer = parameters(dataclasses.replace(found, decoder_layers=2), vocab) - one
  layers = max(1, round(1 + (wanted - one) / layer))
  # Every unit of a feed-forward network has a row, a column and a bias.
  have, unit = one + (layers - 1) * layer, layers * (2 * config.dim + 1)
  units = max(1 - config.ffn_dim, round((wanted - have) / unit))
  found = dataclasses.replace(found, decoder_layers=layers, ffn_dim=config.ffn_dim + units)
  have += units * unit
  errors.check(
    abs(have - wanted) <= 0.02 * wanted,
    f"No decoder of width {config.dim} has about {wanted:,} parameters; the nearest has {have:,}."
    " Choose another width.",
  )
  return found
