"""Four kinds of run so small that each takes seconds, for programs that break them on purpose.

    python -m train.main --config benchmarks/tiny_runs.py:translation --workdir runs/tiny

Variants: translation, masked (language model), recurrent (language model with recoding), questions
(a Neuromodulated Transformer). Data are the project's own; every mechanism that keeps a state of
its own between steps is on: dropout, averages, phases, the plateau's rate, carried LSTM states.
"""

from typing import Any

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

STEPS = 48
EVERY = 24  # steps between evaluations
SCHEDULE: dict[str, Any] = {
  "evaluate_every": EVERY,
  "checkpoint_every": 6,
  "log_every": 6,
  "evaluate_sentences": 8,
  "watch_sentences": 4,
  "keep_last": 3,
  "keep_models": 2,
}


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, KINDS)
  return KINDS[variant]()


def _grammar() -> GrammarData:
  return GrammarData(train=200, valid=8, test=8, shifted=4)


def _words() -> TokenizerConfig:
  return TokenizerConfig(kind="words", vocab_size=120)


def translation() -> Experiment:
  return Experiment(
    name="tiny translation",
    task=TranslationConfig(
      data=_grammar(),
      tokenizer=_words(),
      target_tokenizer=_words(),
      batch=BatchConfig(tokens=160, buckets=(32,)),
      decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1,
      decoder_layers=1,
      dim=16,
      heads=2,
      ffn_dim=32,
      max_length=40,
      norm="pre",
      dropout=0.1,
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=10, clip=1.0),
    phases=(
      Phase("rest", trainable="rest", steps=STEPS // 2),
      Phase("heads", trainable="routing", steps=STEPS // 2),
    ),
    ema=0.9,
    **SCHEDULE,
  )


def masked() -> Experiment:
  return Experiment(
    name="tiny masked language model",
    task=MaskedLMConfig(
      data=GrammarDocuments(_grammar()), tokenizer=_words(), length=16, batch_tokens=128
    ),
    model=EncoderConfig(
      encoder_layers=1, dim=16, heads=2, ffn_dim=16, max_length=16, compete=("encoder_self",)
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=4),
    phases=(Phase(steps=STEPS),),
    **SCHEDULE,
  )


def recurrent() -> Experiment:
  return Experiment(
    name="tiny recurrent language model",
    task=LanguageModelConfig(
      data=GrammarDocuments(_grammar()), tokenizer=_words(), rows=8, length=6, eval_rows=4
    ),
    model=LstmConfig(
      dim=8,
      embedding_dim=8,
      dropout=0.1,
      recoding=RecodingConfig(signal="mc_dropout", samples=2, size=0.5),
    ),
    optimizer=OptimizerConfig(
      name="sgd", learning_rate=20.0, schedule="plateau", warmup_steps=0, clip=0.25
    ),
    phases=(Phase(steps=STEPS),),
    **SCHEDULE,
  )


def questions() -> Experiment:
  data = WorldsData(train=48, valid=12, test=12, shifted=12)
  tokenizer = AnsweringConfig().tokenizer
  return Experiment(
    name="tiny questions",
    task=AnsweringConfig(
      data=Mixed((data,)),
      tokenizer=TokenizerConfig(
        kind=tokenizer.kind, vocab_size=160, special_tokens=tokenizer.special_tokens
      ),
      length=96,
      answer_length=4,
      batch_questions=4,
    ),
    model=NemotConfig(
      tasks=("mqa", "gqa"),
      vanilla_layers=1,
      modulatory_layers=1,
      output_layers=1,
      dim=16,
      heads=2,
      ffn_dim=16,
      max_length=96,
      dropout=0.1,
    ),
    optimizer=OptimizerConfig(name="muon", learning_rate=2e-3, schedule="cosine", warmup_steps=4),
    phases=(Phase(steps=STEPS),),
    **SCHEDULE,
  )


KINDS = {
  "translation": translation,
  "masked": masked,
  "recurrent": recurrent,
  "questions": questions,
}
