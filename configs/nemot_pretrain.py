"""Language modelling with a Neuromodulated Transformer (Knowles 2022, section 3.2).

Run:      python -m train.main --config configs/nemot_pretrain.py --workdir runs/nemot_pretrain
Variants: (none)  small where COMPMOD_DATA is set, else grammar
          small   $COMPMOD_DATA/lm_public_domain and c4_sample: half an hour on 2 CPU cores; scored
                  on ptb and wikitext2_part, too, which it is not trained on
          grammar English sentences of the project's own grammar: needs no data, 5 minutes
          paper   the thesis's model (12 + 12 + 3 layers) and recipe, your files of C4 (many GPUs)
Baseline: NAME-decoder: a decoder shaped as GPT-2 with as many parameters;
          --config.model.gate=off: the same model without its gate
Masked:   NAME-masked: the same model in encoder mode, trained to fill in what is masked
Meta:     NAME-meta: the neuromodulatory set learns on the small part of the data, through a step of
          the rest on the large part

The tokenizer has the special tokens of questions, so that configs/nemot_qa.py can start from here.
"""

import dataclasses
import os

from compmod_jax.core import errors
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS
from compmod_jax.data.sources.documents import GrammarDocuments, TextDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.data.zero_shot import Unseen, WithUnseen
from compmod_jax.models.matching_decoder import matching_decoder
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.bilevel import BilevelConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> Experiment:
  variants = {"small": small, "grammar": grammar, "paper": paper}
  default = "small" if os.environ.get("COMPMOD_DATA") else "grammar"
  decoders = {f"{name}-decoder": name for name in variants}
  masked_ones = {f"{name}-masked": name for name in variants}
  learned = {f"{name}-meta": name for name in variants}
  errors.check_choice("variant", variant, {"", *variants, *decoders, *masked_ones, *learned})
  if variant in decoders:
    return decoder(variants[decoders[variant]]())
  if variant in masked_ones:
    return masked(variants[masked_ones[variant]]())
  if variant in learned:
    return meta(variants[learned[variant]]())
  return variants[variant or default]()


def decoder(given: Experiment) -> Experiment:
  """The same experiment with a decoder that has as many parameters."""
  assert isinstance(given.model, NemotConfig)
  assert isinstance(given.task, CausalLMConfig | MaskedLMConfig)
  model = matching_decoder(given.model, given.task.tokenizer.vocab_size)
  return dataclasses.replace(given, name=f"{given.name}, a plain decoder", model=model)


def masked(given: Experiment) -> Experiment:
  """The same experiment as masked language modelling, every token seeing the whole block."""
  old = given.task
  assert isinstance(old, CausalLMConfig)
  length = old.length - 1
  task = MaskedLMConfig(
    data=old.data,
    tokenizer=old.tokenizer,
    length=length,
    batch_tokens=old.batch_tokens // old.length * length,
  )
  return dataclasses.replace(given, name=f"{given.name}, masked", task=task)


def meta(given: Experiment) -> Experiment:
  """The same experiment in which what modulates is learned by what the rest makes of it."""
  task, phases = given.task, given.phases
  assert isinstance(task, CausalLMConfig)
  bilevel = BilevelConfig(parameters=("modulatory", "auxiliary_embedding"))
  if isinstance(task.data, GrammarDocuments):
    phases = (Phase(steps=300),)
  return dataclasses.replace(
    given,
    name=f"{given.name}, meta-learned modulation",
    task=dataclasses.replace(task, bilevel=bilevel),
    phases=phases,
    evaluate_every=min(given.evaluate_every, phases[0].steps),
  )


def small() -> Experiment:
  return Experiment(
    name="NeMoT on public domain text and C4",
    task=CausalLMConfig(
      data=WithUnseen(
        TextDocuments(
          folder="$COMPMOD_DATA",
          train=("lm_public_domain/*", "c4_sample/*train*"),
          valid=("c4_sample/*validation*",),
          unit="file",
        ),
        unseen=(
          _lines("ptb", "$COMPMOD_DATA/ptb", "ptb.valid*"),
          _lines("wikitext2", "$COMPMOD_DATA/wikitext2_part", "wiki.valid*"),
        ),
      ),
      tokenizer=TokenizerConfig(vocab_size=4000, special_tokens=TRAINED_TOKENS),
      length=129,
      batch_tokens=129 * 16,
    ),
    model=NemotConfig(
      vanilla_layers=2,
      modulatory_layers=2,
      output_layers=1,
      dim=192,
      heads=4,
      ffn_dim=768,
      max_length=128,
      dropout=0.0,
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, clip=1.0, final_fraction=0.1
    ),
    phases=(Phase(steps=4000),),
    ema=0.99,
    evaluate_every=500,
    time_limit_minutes=30,
  )


def _lines(name: str, folder: str, files: str) -> Unseen:
  return Unseen(name, TextDocuments(folder=folder, valid=(files,), unit="line"))


def grammar() -> Experiment:
  base = small()
  assert isinstance(base.task, CausalLMConfig)
  task = dataclasses.replace(
    base.task,
    data=GrammarDocuments(GrammarData(train=50_000)),
    tokenizer=dataclasses.replace(base.task.tokenizer, vocab_size=1200),
    length=65,
    batch_tokens=65 * 32,
  )
  return dataclasses.replace(
    base,
    name="NeMoT on the grammar's English",
    task=task,
    phases=(Phase(steps=1200),),
    evaluate_every=300,
    time_limit_minutes=5,
  )


def paper() -> Experiment:
  """The thesis's pre-training: a million steps of 32 texts of 768 tokens."""
  return Experiment(
    name="NeMoT on C4",
    task=CausalLMConfig(
      data=TextDocuments(folder="data/c4", train=("*train*",), valid=("*validation*",)),
      tokenizer=TokenizerConfig(
        vocab_size=50_000, special_tokens=TRAINED_TOKENS, character_coverage=0.9995
      ),
      length=769,
      batch_tokens=769 * 32,
    ),
    model=NemotConfig(),
    optimizer=OptimizerConfig(
      name="adam", learning_rate=1e-4, schedule="cosine", warmup_steps=0, b2=0.999
    ),
    phases=(Phase(steps=1_000_000),),
    evaluate_every=10_000,
  )
