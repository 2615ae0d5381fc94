"""Networks whose parts compete for their input, in JAX and Flax.

    import compmod_jax

    model = compmod_jax.load("runs/nmt_cah")
    model.translate(["Der Hund schläft."])

`load` opens what `compmod train` trained; see `compmod_jax.api`. The names of this module are what
most people need: trained models, the mechanisms, the layers and models that have them, and
experiments. Each is imported when it is used; everything else is imported from its module.
"""

from typing import TYPE_CHECKING, Any

from compmod_jax import _renamed

if TYPE_CHECKING:
  from compmod_jax.api import load
  from compmod_jax.core.errors import UserError
  from compmod_jax.core.intermediates import zero_units
  from compmod_jax.data.tokenizers import TokenizerConfig
  from compmod_jax.decoding import DecodeConfig, beam_search, greedy, sample
  from compmod_jax.layers.attention import Attention
  from compmod_jax.layers.basic import FeedForward
  from compmod_jax.layers.block import Block
  from compmod_jax.layers.experts import Experts, ExpertsConfig
  from compmod_jax.layers.lstm import LSTMCell
  from compmod_jax.mechanisms.competition.drophead import DropHeadConfig
  from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router
  from compmod_jax.mechanisms.modulation import modulate
  from compmod_jax.mechanisms.recoding import RecodingConfig, recode
  from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
  from compmod_jax.models.encoder import Encoder, EncoderConfig
  from compmod_jax.models.lstm_lm import LstmConfig, LstmLM
  from compmod_jax.models.nemot import Nemot, NemotConfig
  from compmod_jax.models.transformer import Transformer, TransformerConfig
  from compmod_jax.trained import TrainedModel
  from compmod_jax.training.experiment import Experiment, Phase
  from compmod_jax.training.optimizer import OptimizerConfig

# Where each public name is defined, below this package.
_HOMES = {
  "Attention": "layers.attention",
  "Block": "layers.block",
  "CompetitionConfig": "mechanisms.competition.router",
  "DecodeConfig": "decoding",
  "DecoderConfig": "models.decoder_lm",
  "DecoderLM": "models.decoder_lm",
  "DropHeadConfig": "mechanisms.competition.drophead",
  "Encoder": "models.encoder",
  "EncoderConfig": "models.encoder",
  "Experiment": "training.experiment",
  "Experts": "layers.experts",
  "ExpertsConfig": "layers.experts",
  "FeedForward": "layers.basic",
  "LSTMCell": "layers.lstm",
  "LstmConfig": "models.lstm_lm",
  "LstmLM": "models.lstm_lm",
  "Nemot": "models.nemot",
  "NemotConfig": "models.nemot",
  "OptimizerConfig": "training.optimizer",
  "Phase": "training.experiment",
  "RecodingConfig": "mechanisms.recoding",
  "Router": "mechanisms.competition.router",
  "TokenizerConfig": "data.tokenizers",
  "TrainedModel": "trained",
  "Transformer": "models.transformer",
  "TransformerConfig": "models.transformer",
  "UserError": "core.errors",
  "beam_search": "decoding",
  "greedy": "decoding",
  "load": "api",
  "modulate": "mechanisms.modulation",
  "recode": "mechanisms.recoding",
  "sample": "decoding",
  "zero_units": "core.intermediates",
}

_renamed.install()

__version__ = "0.1.0"

__all__ = [
  "Attention",
  "Block",
  "CompetitionConfig",
  "DecodeConfig",
  "DecoderConfig",
  "DecoderLM",
  "DropHeadConfig",
  "Encoder",
  "EncoderConfig",
  "Experiment",
  "Experts",
  "ExpertsConfig",
  "FeedForward",
  "LSTMCell",
  "LstmConfig",
  "LstmLM",
  "Nemot",
  "NemotConfig",
  "OptimizerConfig",
  "Phase",
  "RecodingConfig",
  "Router",
  "TokenizerConfig",
  "TrainedModel",
  "Transformer",
  "TransformerConfig",
  "UserError",
  "beam_search",
  "greedy",
  "load",
  "modulate",
  "recode",
  "sample",
  "zero_units",
]


def __getattr__(name: str) -> Any:
  # JAX takes a second to import: whoever wants one module should not wait for all of them.
  import importlib

  if name not in _HOMES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from compmod_jax.core import extras

  with extras.needed():
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
