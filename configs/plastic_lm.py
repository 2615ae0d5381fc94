"""Language models whose connections change while they read, and plain ones of as many parameters.

Plastic LSTMs (Miconi et al. 2020, section 4.3; Knowles 2022, section 2.3), and decoders with fast
weights beside self-attention (Knowles 2022, section 4.4.2).

Run:      python -m train.main --config configs/plastic_lm.py --workdir runs/plastic_lm
Variants: (none)               an LSTM with plastic connections to the cell input, simple
                               modulation, on English sentences of the project's own grammar
          hebbian              the same without modulation
          retroactive          the same with eligibility traces
          lstm                 a plain LSTM of as many parameters
          network              a plastic recurrent network, simple modulation
          ptb, ptb-hebbian, ptb-retroactive, ptb-lstm
                               the same on $COMPMOD_DATA/ptb, Mikolov's split of the Penn Treebank
          transformer          a decoder with fast weights whose plasticity is gated, on the grammar
          transformer-hebbian  with fast weights of one rate everywhere
          transformer-plain    without fast weights, of as many parameters
"""

from typing import Any

from compmod_jax.core import errors
from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.plasticity import PlasticConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.recurrent import LstmCellConfig, RecurrentConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

WIDTH, PTB_WIDTH = 64, 200
# Widths at which a plain LSTM has as many parameters as the plastic one, its readout included.
PLAIN, PTB_PLAIN = 66, 203
CELLS = {
  "": PlasticConfig("lstm", WIDTH, "simple"),
  "hebbian": PlasticConfig("lstm", WIDTH, "hebbian"),
  "retroactive": PlasticConfig("lstm", WIDTH, "retroactive"),
  "lstm": LstmCellConfig(PLAIN),
  "network": PlasticConfig("network", WIDTH, "simple"),
  "ptb": PlasticConfig("lstm", PTB_WIDTH, "simple"),
  "ptb-hebbian": PlasticConfig("lstm", PTB_WIDTH, "hebbian"),
  "ptb-retroactive": PlasticConfig("lstm", PTB_WIDTH, "retroactive"),
  "ptb-lstm": LstmCellConfig(PTB_PLAIN),
}
SIZES: dict[str, Any] = {
  "decoder_layers": 2, "dim": 64, "heads": 4, "max_length": 128, "dropout": 0.0,
}  # fmt: skip
# Feed-forward networks as wide as makes up for the parameters of fast weights and their gates.
DECODERS = {
  "transformer": DecoderConfig(fast_weights="modulated", ffn_dim=256, **SIZES),
  "transformer-hebbian": DecoderConfig(fast_weights="hebbian", ffn_dim=288, **SIZES),
  "transformer-plain": DecoderConfig(ffn_dim=417, **SIZES),
}
DATA = GrammarDocuments(GrammarData(train=10_000, test=1000, shifted=500))


def get_config(variant: str) -> Experiment:
  errors.check_choice("variant", variant, (*CELLS, *DECODERS))
  return decoder(variant) if variant in DECODERS else recurrent(variant)


def recurrent(variant: str) -> Experiment:
  treebank = variant.startswith("ptb")
  data = TextDocuments(
    folder="$COMPMOD_DATA/ptb",
    train=("ptb.train*",),
    valid=("ptb.valid*",),
    test=("ptb.test*",),
    unit="line",
  )
  cell = CELLS[variant]
  return Experiment(
    name=f"a language model of {cell.describe()}",
    task=LanguageModelConfig(data=data if treebank else DATA, rows=32),
    model=RecurrentConfig(
      cell=cell,
      embedding_dim=PTB_WIDTH if treebank else WIDTH,
      dropout=0.3 if treebank else 0.0,
    ),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=3e-3, schedule="cosine", warmup_steps=50, b2=0.999, clip=1.0
    ),
    phases=(Phase(epochs=8 if treebank else 6),),
    time_limit_minutes=0.0 if treebank else 5.0,
  )


def decoder(variant: str) -> Experiment:
  """Blocks of many sentences, each of which may read those before it."""
  model = DECODERS[variant]
  return Experiment(
    name=f"a language model of {model.describe()}",
    task=CausalLMConfig(
      data=DATA,
      tokenizer=TokenizerConfig(vocab_size=1200),
      length=129,
      batch_tokens=129 * 16,
      joined=True,
    ),
    model=model,
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=100, clip=1.0, final_fraction=0.1
    ),
    phases=(Phase(epochs=6),),
    time_limit_minutes=5.0,
  )
