"""German to English by an LSTM with attention (Bahdanau, Cho and Bengio 2015).

Run:      python -m train.main --config configs/nmt_lstm.py --workdir runs/nmt_lstm
Variants: (none)     the project's own grammar, minutes on 2 CPU cores
          recoding   the same; the decoder's states go down the next token's entropy at every step,
                     in training and in use (Ulmer 2019)
          tatoeba    $COMPMOD_DATA/tatoeba_en_de
          debug      a model and data so small that a run ends within a minute, and learns nothing
Luong's:  add --config.model.attention=multiplicative
Signal:   add --config.model.recoding.signal=nll (surprisal, argmax, entropy, predicted_error, none)
In use:   python -m train.predict --workdir W --recoding size=0.1 < in > out (or signal=none); an
          unrecoded model can be recoded as decoders are, --recode_layer -1 --recode_size 0.1
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {
    "": grammar,
    "grammar": grammar,
    "recoding": recoding,
    "tatoeba": tatoeba,
    "debug": debug,
  }
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def grammar() -> Experiment:
  return Experiment(
    name="an LSTM with attention on the grammar",
    task=TranslationConfig(
      data=GrammarData(train=100_000),
      tokenizer=TokenizerConfig(vocab_size=3000),
      target_tokenizer=TokenizerConfig(vocab_size=1200),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=4),
    ),
    model=Seq2SeqLstmConfig(dim=128, embedding_dim=128, attention_dim=128, dropout=0.1),
    optimizer=OptimizerConfig(learning_rate=4e-3, schedule="cosine", warmup_steps=200, clip=1.0),
    phases=(Phase(steps=1900),),
    ema=0.98,
    evaluate_every=475,
    evaluate_sentences=200,
    time_limit_minutes=5,
  )


def recoding() -> Experiment:
  base = grammar()
  model = dataclasses.replace(base.model, recoding=RecodingConfig(signal="entropy", size=0.1))
  return dataclasses.replace(base, name="a recoded LSTM with attention on the grammar", model=model)


def tatoeba() -> Experiment:
  base = grammar()
  return dataclasses.replace(
    base,
    name="an LSTM with attention on Tatoeba, German to English",
    task=TranslationConfig(
      data=TextData(folder="$COMPMOD_DATA/tatoeba_en_de", unseen=True),
      tokenizer=TokenizerConfig(vocab_size=6000),
      target_tokenizer=TokenizerConfig(vocab_size=4000),
      batch=BatchConfig(tokens=2048, ceiling=64, bucket_count=12, bucket_multiple=1),
    ),
    model=Seq2SeqLstmConfig(dim=256, embedding_dim=256, attention_dim=256),
    phases=(Phase(steps=5200),),
    ema=0.99,
    evaluate_every=1300,
    evaluate_sentences=300,
    time_limit_minutes=57,
  )


def debug() -> Experiment:
  base = grammar()
  return dataclasses.replace(
    base,
    name="a tiny LSTM with attention",
    task=TranslationConfig(
      data=GrammarData(train=300, valid=40, test=20, shifted=10),
      tokenizer=TokenizerConfig(vocab_size=300),
      target_tokenizer=TokenizerConfig(vocab_size=300),
      batch=BatchConfig(tokens=512, ceiling=64, bucket_count=1),
      decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=2),
    ),
    model=Seq2SeqLstmConfig(dim=16, embedding_dim=16, attention_dim=16),
    phases=(Phase(steps=20),),
    evaluate_every=10,
    evaluate_sentences=4,
  )
