"""Your own data, from a few lines in a file to an answer, with models that train in a minute.

Run:      python -m train.main --config configs/own.py:pairs --workdir runs/own_pairs
Variants: pairs      mine/train.tsv and mine/valid.tsv: a source, a tab and its translation a line
                     (also without a variant)
          text       mine/train.txt and mine/valid.txt: a document a line
          questions  mine/train.jsonl and mine/valid.jsonl: a question a line, as JSON
Files:    docs/your_own_data.md shows them, and what to do with the trained models

The sizes are for a handful of lines; that page says what to change for more.
"""

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

FOLDER, STEPS = "mine", 300


def get_config(variant: str) -> Experiment:
  variants = {"pairs": pairs, "text": text, "questions": questions}
  errors.check_choice("variant", variant, {"", *variants})
  return variants[variant or "pairs"]()


def _experiment(name: str, task, model) -> Experiment:
  return Experiment(
    name=f"own {name}",
    task=task,
    model=model,
    optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=20, clip=1.0),
    phases=(Phase(steps=STEPS),),
    evaluate_every=STEPS // 3,
    time_limit_minutes=5,
  )


def pairs() -> Experiment:
  """Translation, with heads that compete."""
  task = TranslationConfig(
    data=TextData(folder=FOLDER, pattern="{split}.tsv", tests=()),
    tokenizer=TokenizerConfig(kind="words", vocab_size=1000),
    batch=BatchConfig(tokens=512, ceiling=32, bucket_count=1),
    decode=DecodeConfig(beams=4),
  )
  model = TransformerConfig(
    encoder_layers=1,
    decoder_layers=1,
    dim=64,
    heads=4,
    ffn_dim=128,
    norm="pre",
    max_length=64,
    dropout=0.0,
    compete=("encoder_self", "cross"),
  )
  return _experiment("pairs", task, model)


def text() -> Experiment:
  """Language modelling with a decoder."""
  task = CausalLMConfig(
    data=TextDocuments(folder=FOLDER, train=("train.txt",), valid=("valid.txt",), unit="line"),
    tokenizer=TokenizerConfig(kind="words", vocab_size=1000),
    length=33,
    batch_tokens=33 * 4,
  )
  model = DecoderConfig(decoder_layers=1, dim=64, heads=4, ffn_dim=128, max_length=64, dropout=0.0)
  return _experiment("text", task, model)


def questions() -> Experiment:
  """Question answering with a Neuromodulated Transformer."""
  data = QASet("own", "jsonl", FOLDER, train=("train.jsonl",), valid=("valid.jsonl",))
  task = AnsweringConfig(
    data=Mixed(seeds=(data,)),
    tokenizer=TokenizerConfig(vocab_size=200, special_tokens=TRAINED_TOKENS),
    length=96,
    answer_length=16,
    batch_questions=8,
  )
  model = NemotConfig(
    tasks=("mqa", "gqa"),
    vanilla_layers=1,
    modulatory_layers=1,
    output_layers=1,
    dim=64,
    heads=4,
    ffn_dim=128,
    max_length=96,
    dropout=0.0,
  )
  return _experiment("questions", task, model)
