"""Recoding: activations corrected by gradient steps on an error signal, in training and in use.

`descent` takes the steps, `signals` are what they lower, `anchors` keep the members of an ensemble
apart, `config` says what a recurrent language model does of it.
"""

from compmod_jax.mechanisms.recoding.config import AnchorConfig, RecodingConfig
from compmod_jax.mechanisms.recoding.descent import Recoded, recode

__all__ = ["AnchorConfig", "Recoded", "RecodingConfig", "recode"]
