"""What there is to choose from: the configurations of all tasks, and of all models."""

from compmod_jax.models.competing_experts import CompetingExpertsConfig
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.neural_interpreter import InterpreterConfig
from compmod_jax.models.neuromodulated import NeuromodulatedConfig
from compmod_jax.models.recurrent import RecurrentConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.continual import ContinualConfig
from compmod_jax.tasks.few_shot import FewShotConfig
from compmod_jax.tasks.few_shot_text import FewShotTextConfig
from compmod_jax.tasks.fuzzy_logic import FuzzyLogicConfig
from compmod_jax.tasks.image_experts import ImageExpertsConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.logic_in_context import LogicInContextConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.meta_transfer import CausalDirectionConfig, MetaTransferConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.tasks.translation import TranslationConfig

TaskConfig = (
  TranslationConfig
  | MaskedLMConfig
  | LanguageModelConfig
  | CausalLMConfig
  | AnsweringConfig
  | FewShotConfig
  | FewShotTextConfig
  | SequenceConfig
  | MetaTransferConfig
  | FuzzyLogicConfig
  | LogicInContextConfig
  | ImageExpertsConfig
  | ContinualConfig
)
ModelConfig = (
  TransformerConfig
  | EncoderConfig
  | LstmConfig
  | NemotConfig
  | DecoderConfig
  | Seq2SeqLstmConfig
  | ConvNetConfig
  | RecurrentConfig
  | CausalDirectionConfig
  | InterpreterConfig
  | CompetingExpertsConfig
  | NeuromodulatedConfig
)
