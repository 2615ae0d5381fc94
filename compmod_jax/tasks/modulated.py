"""What modulation brings to tasks: models that read whole texts, and the health of gates."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.intermediates import OFF, Taps
from compmod_jax.layers.stack_config import TextStackConfig
from compmod_jax.mechanisms.modulation import health
from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
from compmod_jax.models.encoder import Encoder, EncoderConfig
from compmod_jax.models.nemot import Nemot, NemotConfig
from compmod_jax.models.nemot_config import MODULATORY, OUTPUT
from compmod_jax.models.text import Blocks, Text
from compmod_jax.tasks import competing
from compmod_jax.tasks.base import Context, Metrics

GATE = "gate"
LM = "lm"  # the task of running text


def build(config: NemotConfig | DecoderConfig, vocab: int, pad: int) -> Nemot | DecoderLM:
  """The module of a configuration."""
  return (Nemot if isinstance(config, NemotConfig) else DecoderLM)(config, vocab, pad)  # pyright: ignore[reportArgumentType]


class EncoderMode(Nemot):
  """NeMoT in encoder mode, as a masked language model is called: texts of the task lm, seen whole.

  Its parameters are those of `Nemot`.
  """

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch predicted"] | None = None,
    deterministic: bool = True,
    taps: Taps = OFF,
  ) -> Float[Array, "batch predicted vocab"]:
    """Logits of the tokens that belong at positions; see `Encoder.__call__`."""
    ids = jnp.asarray(self.config.auxiliary_ids("enc", LM), jnp.int32)
    text = Text(tokens, jnp.broadcast_to(ids[None], (len(tokens), len(ids))))
    out = super().__call__(
      text,
      [(LM, len(tokens))],
      causal=False,
      positions=positions,
      deterministic=deterministic,
      taps=taps,
    )
    return out.logits


def encoder(config: EncoderConfig | NemotConfig, vocab: int, pad: int) -> Encoder | EncoderMode:
  """The module of a masked language model.

  Raises:
    UserError: the model reads what running text lacks, or has no output set for it.
  """
  if isinstance(config, EncoderConfig):
    return Encoder(config, vocab, pad)
  check_running_text(config)
  return EncoderMode(config, vocab, pad)


def check_running_text(config: NemotConfig) -> None:
  """Raises a `UserError` unless a model can read text without questions."""
  errors.check_choice(f"task {LM!r}, which language modelling needs,", LM, config.tasks)
  errors.check(
    config.tasks == (LM,),
    f"model.tasks is {', '.join(config.tasks)}, but running text trains the output set of {LM}"
    f" alone. Set tasks to {LM}; a model of more tasks can start from the trained one (start).",
  )
  reads = config.option_interaction or config.highlighting != "off"
  errors.check(
    not reads,
    "model.option_interaction or model.highlighting is on, but running text has neither answer"
    " options nor parts of speech. Switch them off.",
  )


def with_auxiliary(
  config: Any, site: str, real: Bool[Array, "batch time"], positions: jax.Array | None = None
) -> jax.Array:
  """Positions that hold tokens, with the auxiliary ones in front where a site has them.

  Args:
    config: of the model.
    site: name of the site.
    real: true where there is a token.
    positions: of the logits, where these are not all.
  """
  if site == "logits" and positions is not None:
    return jnp.take_along_axis(real, positions, axis=1)
  if not site.startswith(f"{MODULATORY}/"):
    return real
  return jnp.pad(real, ((0, 0), (config.before, 0)), constant_values=True)


def gated(config: Any) -> bool:
  """Whether a model has a gate."""
  return isinstance(config, NemotConfig) and config.gate == "on"


def for_tasks(config: NemotConfig | DecoderConfig, blocks: Blocks) -> NemotConfig | DecoderConfig:
  """The configuration as if it had the output sets of a batch alone: those that run."""
  if not isinstance(config, NemotConfig):
    return config
  away = {f"{OUTPUT}_{task}" for task in config.tasks} - {f"{OUTPUT}_{task}" for task, _ in blocks}
  experts = tuple(
    name for name in config.expert_layers if not {name, name.rpartition("_")[0]} & away
  )
  tasks = tuple(dict.fromkeys(task for task, _ in blocks))
  return dataclasses.replace(config, tasks=tasks, expert_layers=experts)


def loss_taps(config: NemotConfig | DecoderConfig, context: Context) -> Taps:
  """What the model is run with in a loss: what `competing.loss_taps` says, and the gate."""
  taps = competing.loss_taps(config, context)
  return taps.also([GATE]) if gated(config) else taps


def gate_health(
  config: NemotConfig | DecoderConfig, taps: Taps, rows: Callable[[str], jax.Array]
) -> Metrics:
  """Mean and saturation of the gate over a batch; nothing where there is none."""
  if not gated(config):
    return {}
  found = health(jax.lax.stop_gradient(taps.captured[GATE]), rows(GATE))
  return {f"gate/{name}": value for name, value in found.items()}


def parameters(config: NemotConfig | DecoderConfig, vocab: int) -> int:
  """How many parameters a model has, the vanilla set's own head left out."""
  model = build(config, vocab, 0)
  tasks = config.tasks if isinstance(config, NemotConfig) else ("",)
  before = config.before if isinstance(config, NemotConfig) else 1
  text = Text(jnp.ones((len(tasks), 2), jnp.int32), jnp.zeros((len(tasks), before), jnp.int32))
  blocks = [(task, 1) for task in tasks]
  shapes = jax.eval_shape(lambda key: model.init(key, text, blocks), jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def matching_decoder(config: NemotConfig, vocab: int) -> DecoderConfig:
  """A decoder of the same width whose parameters match those of a modulated model.

  Its output layer is its own, as the modulated model's is. Layers are added as long as there are
  too few parameters; then the feed-forward networks' width makes up for the rest.

  Raises:
    UserError: the two differ by more than 2 %.
  """
  wanted = parameters(config, vocab)
  fields = {field.name for field in dataclasses.fields(TextStackConfig)}
  shared = fields - {"compete", "expert_layers"}
  found = DecoderConfig(
    **{name: getattr(config, name) for name in shared},
    decoder_layers=1,
    tied=False,
    positions=config.positions,
    scale_embeddings=config.scale_embeddings,
  )
  one = parameters(found, vocab)
  layer = parameters(dataclasses.replace(found, decoder_layers=2), vocab) - one
  layers = max(1, round(1 + (wanted - one) / layer))
  # Every unit of a feed-forward network has a row, a column and a bias.
  units = round((wanted - one - (layers - 1) * layer) / (layers * (2 * config.dim + 1)))
  found = dataclasses.replace(found, decoder_layers=layers, ffn_dim=max(1, config.ffn_dim + units))
  have = parameters(found, vocab)
  errors.check(
    abs(have - wanted) <= 0.02 * wanted,
    f"No decoder of width {config.dim} has about {wanted:,} parameters; the nearest has {have:,}."
    " Choose another width.",
  )
  return found
