"""An LSTM language model whose states are corrected by gradients at every step (Ulmer 2019).

Run:      python -m train.main --config configs/lm_recoding.py --workdir runs/lm_recoding
Variants: (none)     English sentences of the project's own grammar: needs no data, minutes on a CPU
          ptb        $COMPMOD_DATA/ptb, Mikolov's split of the Penn Treebank: the thesis's model
          ptb-plain  the same width without recoding: tied, dropout 0.5, smaller batches, 10 epochs
          ptb-small  recoded, 2 layers of 200 units, 10 epochs
          wikitext2  $COMPMOD_DATA/wikitext2_part
          text       your files train*, valid*, test* in data/text, one sentence a line
Signal:   add --config.model.recoding.signal=none (nll, argmax, entropy, mc_dropout, ensemble, ...)
"""

import dataclasses

from compmod_jax.core import errors
from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.lstm_lm import LstmConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

# Gulordava et al. 2018: the rate is divided by 4 after an epoch that is not the best so far.
RECIPE = OptimizerConfig(
  name="sgd", learning_rate=20.0, schedule="plateau", warmup_steps=0, clip=0.25
)
# For few epochs: gains of 3 % count as none, so that the rate falls early enough.
FEW_EPOCHS = dataclasses.replace(RECIPE, plateau_improvement=0.03)


def get_config(variant: str) -> Experiment:
  variants = {
    "": grammar,
    "ptb": ptb,
    "ptb-plain": ptb_plain,
    "ptb-small": ptb_small,
    "wikitext2": wikitext2,
    "text": text,
  }
  errors.check_choice("variant", variant, variants)
  return variants[variant]()


def grammar() -> Experiment:
  return Experiment(
    name="recoding by surprisal on the grammar's English",
    task=LanguageModelConfig(
      data=GrammarDocuments(GrammarData(train=30_000, test=1000, shifted=500)), rows=32
    ),
    model=LstmConfig(dim=128, embedding_dim=128, recoding=RecodingConfig(signal="surprisal")),
    optimizer=RECIPE,
    phases=(Phase(epochs=8),),
    time_limit_minutes=5,
  )


def _lines(name: str, folder: str) -> TextDocuments:
  return TextDocuments(
    folder=folder,
    train=(f"{name}train*",),
    valid=(f"{name}valid*",),
    test=() if name == "wiki." else (f"{name}test*",),
    unit="line",
  )


def ptb() -> Experiment:
  """The thesis's model and recipe (section 5.1.2), on the usual split."""
  return Experiment(
    name="recoding by surprisal on the Penn Treebank",
    task=LanguageModelConfig(data=_lines("ptb.", "$COMPMOD_DATA/ptb")),
    model=LstmConfig(recoding=RecodingConfig(signal="surprisal")),
    optimizer=RECIPE,
    phases=(Phase(epochs=8),),
  )


def ptb_plain() -> Experiment:
  base = ptb()
  return dataclasses.replace(
    base,
    name="a plain LSTM on the Penn Treebank",
    task=dataclasses.replace(base.task, rows=32),
    model=dataclasses.replace(base.model, tied=True, dropout=0.5, recoding=RecodingConfig()),
    optimizer=FEW_EPOCHS,
    phases=(Phase(epochs=10),),
  )


def ptb_small() -> Experiment:
  base = ptb()
  return dataclasses.replace(
    base,
    name="recoding by surprisal on the Penn Treebank, a small model",
    model=dataclasses.replace(base.model, dim=200, embedding_dim=200),
    optimizer=FEW_EPOCHS,
    phases=(Phase(epochs=10),),
  )


def wikitext2() -> Experiment:
  base = ptb()
  task = dataclasses.replace(base.task, data=_lines("wiki.", "$COMPMOD_DATA/wikitext2_part"))
  return dataclasses.replace(base, name="recoding by surprisal on part of WikiText-2", task=task)


def text() -> Experiment:
  base = ptb()
  tokenizer = TokenizerConfig(vocab_size=10_000)
  task = dataclasses.replace(base.task, data=_lines("", "data/text"), tokenizer=tokenizer)
  return dataclasses.replace(base, name="recoding by surprisal", task=task)
