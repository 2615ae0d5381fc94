"""Tiny trained models of every task that `predict` knows, and what it makes of hostile lines."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compmod_jax.commands import predict
from compmod_jax.commands.options import open_model
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.models.matching_decoder import matching_decoder
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.loop import Loop
from compmod_jax.training.optimizer import OptimizerConfig
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.progress import Progress
from compmod_jax.training.run import set_up
from compmod_jax.training.writer import Writer

_STEPS = 20
_GRAMMAR = GrammarData(train=200, valid=20, test=20, shifted=20)
_WORLDS = WorldsData(train=240, valid=12, test=12, shifted=12)
# Good lines, one for each task; they stand among the hostile ones and are never lost either.
_GOOD = {
  "translation": b"der hund schl\xc3\xa4ft .",
  "masked": b"The dog <mask> in the <mask> .",
  "answering": b"Anna is in the hall. | Where is Anna?",
}
# Options of `predict`, and the lines that it writes for each line then.
_OPTIONS = {
  "translation": (({}, 1), ({"nbest": 2}, 2)),
  "masked": (({}, 1), ({"top": 0}, 1)),
  "answering": (({}, 1), ({"nbest": 2}, 2)),
}


def experiments() -> dict[str, Experiment]:
  """An experiment of seconds for each of the models."""
  masked = TokenizerConfig("bpe", 400, special_tokens=("<mask>",))
  questions = dataclasses.replace(AnsweringConfig().tokenizer, vocab_size=160)
  answering = AnsweringConfig(
    data=Mixed((_WORLDS,)),
    tokenizer=questions,
    batch_questions=64,
    length=96,
    answer_length=4,
    decode=DecodeConfig(beams=2),
  )
  sizes: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 16, "max_length": 96}
  nemot = NemotConfig(
    **sizes, tasks=("mqa", "gqa"), vanilla_layers=1, modulatory_layers=1, output_layers=1
  )
  tasks = {
    "translation": (
      TranslationConfig(
        data=_GRAMMAR,
        tokenizer=TokenizerConfig("bpe", 400),
        batch=BatchConfig(tokens=1024, buckets=(16, 128)),
        decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=4),
      ),
      TransformerConfig(encoder_layers=1, decoder_layers=1, **{**sizes, "max_length": 192}),
    ),
    "masked": (
      MaskedLMConfig(
        data=GrammarDocuments(_GRAMMAR), tokenizer=masked, length=32, batch_tokens=512
      ),
      EncoderConfig(encoder_layers=1, **{**sizes, "max_length": 32}),
    ),
    "answering": (answering, nemot),
    "answering: decoder": (answering, matching_decoder(nemot, 160)),
  }
  return {
    name: Experiment(
      name=name,
      task=task,
      model=model,
      optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
      phases=(Phase(steps=_STEPS),),
      evaluate_every=_STEPS,
      evaluate_sentences=12,
      log_every=_STEPS,
      keep_models=1,
    )
    for name, (task, model) in tasks.items()
  }


class Predictor:
  """`predict` with one model, in this process.

  Args:
    name: one of `experiments`.
    workdir: of a run of it; trained if it is not there.
  """

  def __init__(self, name: str, workdir: Path):
    if not (workdir / "models").is_dir():
      _train(experiments()[name], workdir)
    kind = name.split(":")[0]
    self.good, self._options = _GOOD[kind], _OPTIONS[kind]
    self._args = predict.Args(workdir=workdir, quiet=True)
    self._opened = open_model(self._args)
    self._answers = dict[str, list[str]]()

  def lost(self, lines: list[bytes], turn: int) -> int:
    """How many of these lines have no output, or another's; options by turns.

    The good ones among them must have the same output wherever they stand.
    """
    options, each = self._options[turn % len(self._options)]
    args = dataclasses.replace(self._args, **options)
    sink = io.BytesIO()
    predict.put_out(
      self._opened, args, io.BytesIO(b"\n".join(lines) + b"\n"), sink, Progress(0, quiet=True)
    )
    out = sink.getvalue().decode().split("\n")[:-1]
    if len(out) != each * len(lines):
      return max(1, abs(each * len(lines) - len(out)))
    # Programs that know other ends of lines must count the same ones.
    wrong = sum(len(line.splitlines()) > 1 for line in out)
    for place, line in enumerate(lines):
      own = out[place * each : (place + 1) * each]
      if each > 1:
        wrong += any(not row.startswith(f"{place + 1}\t") for row in own)
        own = [row.partition("\t")[2] for row in own]
      if line == self.good:
        wrong += self._answers.setdefault(str(options), own) != own
    return wrong


def _train(experiment: Experiment, workdir: Path) -> None:
  made = set_up(experiment, workdir, command="")
  with Writer(workdir, total_steps=made.total_steps, quiet=True) as writer, Preemption() as held:
    Loop(made, writer, held).train()


def predictors(folder: Path) -> dict[str, Callable[[], Predictor]]:
  """How to make each of them; training takes seconds."""
  return {
    f"predict: {name}": lambda name=name: Predictor(name, folder / name.replace(": ", "-"))
    for name in experiments()
  }
