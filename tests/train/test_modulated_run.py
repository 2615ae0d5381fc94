"""Modulated language models through the programs: train, load, score, look at the gate."""

import dataclasses

import numpy as np
import pytest
from programs import metrics_of, train

import compmod_jax
from compmod_jax.models.matching_decoder import parameters
from compmod_jax.training.experiment import Phase, load_config

pytestmark = pytest.mark.usefixtures("one_device")
LAYERS = ("vanilla_layers", "modulatory_layers", "output_layers", "decoder_layers")
TEXTS = ["The dog sleeps.", "A cat which sees the dog will not jump."]


def tiny(monkeypatch, variant):
  """The experiment on the grammar, with fewer sentences, tokens and steps."""
  monkeypatch.delenv("COMPMOD_DATA", raising=False)
  given = load_config(f"configs/nemot_pretrain.py:{variant}")
  grammar = dataclasses.replace(given.task.data.grammar, train=200, valid=10, test=10, shifted=10)
  task = dataclasses.replace(
    given.task,
    data=dataclasses.replace(given.task.data, grammar=grammar),
    tokenizer=dataclasses.replace(given.task.tokenizer, vocab_size=150),
    length=33,
    batch_tokens=33 * 8,
  )
  layers = {name: 1 for name in vars(given.model) if name in LAYERS}
  model = dataclasses.replace(given.model, dim=16, heads=2, ffn_dim=16, **layers)
  return dataclasses.replace(
    given, task=task, model=model, phases=(Phase(steps=4),), evaluate_every=4, log_every=1
  )


@pytest.mark.parametrize(
  "variant", ["grammar", pytest.param("grammar-decoder", marks=pytest.mark.slow)]
)
def test_a_language_model_is_trained_and_used(variant, monkeypatch, tmp_path):
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  experiment = tiny(monkeypatch, variant)
  train(experiment, tmp_path / "run")
  lines = metrics_of(tmp_path / "run", "train")
  assert [line["step"] for line in lines] == [1, 2, 3, 4]
  gates = [line.get("gate/mean") for line in lines]
  assert all(0 < gate < 1 for gate in gates) if variant == "grammar" else gates == [None] * 4
  (evaluated,) = metrics_of(tmp_path / "run", "eval")
  assert evaluated["perplexity"] == pytest.approx(np.exp(evaluated["loss"]))

  model = compmod_jax.load(tmp_path / "run")
  scored = model.score(TEXTS)
  assert [len(one.nll) for one in scored] == [len(model.tokenizer.encode(t)) + 1 for t in TEXTS]
  if variant == "grammar":
    gate = model.capture(TEXTS, ["gate"])["gate"]
    assert ((gate > 0) & (gate < 1)).all()
    closed = model.edit({"gate": lambda gate: 0 * gate}).score(TEXTS)
    assert not np.allclose(closed[0].nll, scored[0].nll)


@pytest.mark.parametrize("name", ["grammar", "small", "paper"])
def test_the_plain_decoder_has_as_many_parameters(name):
  given, plain = (load_config(f"configs/nemot_pretrain.py:{n}") for n in (name, f"{name}-decoder"))
  vocab = given.task.tokenizer.vocab_size
  assert parameters(plain.model, vocab) == pytest.approx(parameters(given.model, vocab), rel=0.02)
  assert plain.task == given.task
