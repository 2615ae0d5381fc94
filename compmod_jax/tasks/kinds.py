"""What there is to choose from: the configurations of all tasks, and of all models."""

from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.lstm_lm_config import LstmConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.translation import TranslationConfig

TaskConfig = TranslationConfig | MaskedLMConfig | LanguageModelConfig
ModelConfig = TransformerConfig | EncoderConfig | LstmConfig
