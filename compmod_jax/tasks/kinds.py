"""What there is to choose from: the configurations of all tasks, and of all models."""

from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.translation import TranslationConfig

TaskConfig = TranslationConfig | MaskedLMConfig
ModelConfig = TransformerConfig | EncoderConfig
