"""The computations that `benchmarks.structure` follows, on models that train for two steps."""

import contextlib
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import identical

# Makes what the computation needs and returns the computation alone.
Case = Callable[[], Callable[[], object]]


def _trained(name: str) -> tuple[Any, Path]:
  """A model of one of the cases of `benchmarks.identical`, and its workdir."""
  import compmod_jax
  from compmod_jax.commands import train

  workdir = Path(tempfile.mkdtemp()) / "run"
  with contextlib.redirect_stdout(io.StringIO()):
    train.main(identical.arguments(identical.CASES[name], workdir, steps=2))
  return compmod_jax.load(workdir), workdir


def training_step() -> Callable[[], object]:
  """The step of a translation model with competing heads, as JAX traces it for one batch.

  What a run sets up (batches, optimizer, shapes of the state) is there before.
  """
  from compmod_jax.commands.config_option import parse
  from compmod_jax.commands.train import Args
  from compmod_jax.training.run import set_up

  workdir = Path(tempfile.mkdtemp()) / "run"
  arguments = identical.arguments(identical.CASES["translation"], workdir, steps=2)
  run = set_up(parse(Args, arguments).config, workdir, command="")
  state, batch = run.abstract_state(), run.place(next(run.iterators[0]))
  step = run.jitted_step("all")
  return lambda: step.lower(state, batch, run.key)


def translation() -> Callable[[], object]:
  """A sentence, translated by beam search."""
  model, _ = _trained("translation")
  return lambda: model.translate(["Der Hund schläft ."])


def answer() -> Callable[[], object]:
  """A question, answered by NeMoT."""
  model, _ = _trained("questions")
  return lambda: model.answer(["Anna took the ball. | What did Anna take?"])


def recoded_evaluation() -> Callable[[], object]:
  """A split, scored by a language model whose states are recoded at every step."""
  model, _ = _trained("recoding")
  return lambda: model.task.evaluate(model.params, "test")


CASES: dict[str, Case] = {
  "training step": training_step,
  "translation": translation,
  "answer": answer,
  "recoded evaluation": recoded_evaluation,
}
