"""Starting from a trained model: what is taken over, and what stays fresh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_parameters import drawn

from compmod_jax.checkpoints.gpt2 import Gpt2, vanilla_sizes, write_gpt2
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.configs import ModelConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.run import set_up
from compmod_jax.training.warm_start import Start, merge

pytestmark = pytest.mark.usefixtures("one_device")
TOKENIZER = TokenizerConfig(vocab_size=180, special_tokens=TRAINED_TOKENS)
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 16, "dropout": 0.0, "max_length": 128}
LAYERS = {"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1}


def test_parameters_of_the_same_name_and_shape_are_taken_over():
  fresh = {"a": {"kernel": np.zeros((2, 3))}, "b": {"kernel": np.zeros(4)}}
  given = {"a": {"kernel": np.ones((2, 3))}, "b": {"kernel": np.ones(5)}, "c": {"x": np.ones(1)}}
  made, note = merge(fresh, given, where="there")
  assert made["a"]["kernel"].all()
  assert not made["b"]["kernel"].any()
  assert set(made) == {"a", "b"}
  assert note == "1 of 2 parameter arrays start from there; fresh: b"


def test_new_tasks_start_as_language_modelling_and_new_tokens_fresh():
  fresh = {name: {"x": np.zeros(2)} for name in ("output_lm", "output_gqa", "output_norm_mqa")}
  fresh["embedding"] = {"table": np.zeros((5, 2))}
  given = {"output_lm": {"x": np.full(2, 1.0)}, "output_norm_lm": {"x": np.full(2, 2.0)}}
  given["embedding"] = {"table": np.ones((3, 2))}
  made, _ = merge(fresh, given, where="there")
  assert made["output_gqa"]["x"].tolist() == made["output_lm"]["x"].tolist() == [1, 1]
  assert made["output_norm_mqa"]["x"].tolist() == [2, 2]
  assert made["embedding"]["table"].sum(axis=1).tolist() == [2, 2, 2, 0, 0]


@pytest.mark.parametrize(
  ("fresh", "given"),
  [
    ({"a": {"x": np.zeros(2)}}, {"b": {"x": np.zeros(2)}}),
    ({"embedding": {"table": np.zeros((5, 2))}}, {"embedding": {"table": np.ones((3, 4))}}),
  ],
)
def test_a_model_of_which_nothing_fits_is_told(fresh, given):
  with pytest.raises(UserError, match="same kind and size"):
    merge(fresh, given, where="there")


@pytest.fixture
def gpt2(tmp_path):
  """A checkpoint in Hugging Face's layout, and its model."""
  config = DecoderConfig(decoder_layers=1, **SIZES)

  def init(key):
    return DecoderLM(config, 20).init(key, Text(jnp.ones((1, 2), jnp.int32)))

  model = Gpt2(config, drawn(init, spread=0.1)["params"], 20)
  write_gpt2(tmp_path / "gpt2", model)
  return tmp_path / "gpt2", model


def fresh_parameters(config, vocab):
  module = config.decoder(vocab, 0)

  def init(key):
    text = Text(jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 3), jnp.int32))
    return module.init(key, text, [("lm", 1)], vanilla_logits=True)

  return drawn(init, seed=1, spread=0.1)["params"]


def test_a_gpt2_becomes_the_vanilla_set_or_the_decoder(gpt2):
  folder, model = gpt2
  start = Start(folder)
  assert start.files() is None
  config = NemotConfig(**{**SIZES, **LAYERS, **vanilla_sizes(model.config)})
  made, note = start.merged(fresh_parameters(config, 24), config)
  assert "vanilla set" in note
  theirs = model.params["decoder"]["layer_0"]
  jax.tree.map(np.testing.assert_array_equal, made["vanilla"]["layer_0"], theirs)
  made, _ = start.merged(fresh_parameters(model.config, 24), model.config)
  table = np.asarray(made["embedding"]["table"])
  np.testing.assert_array_equal(table[:20], model.params["embedding"]["table"])
  assert table[20:].any()


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"activation": "relu"}, "activation is 'relu', but the GPT-2 checkpoint has 'gelu_tanh'"),
    ({"scale_embeddings": True}, "scale_embeddings is True"),
    ({"norm_epsilon": 0.1}, r"norm_epsilon is 0\.1"),
  ],
)
def test_a_decoder_computes_what_gpt2_does_with_its_parameters(gpt2, change, words):
  folder, model = gpt2
  with pytest.raises(UserError, match=f"model.{words}"):
    Start(folder).merged({}, dataclasses.replace(model.config, **change))


def test_questions_are_learnt_from_a_language_model(tmp_path, monkeypatch):
  monkeypatch.setenv("COMPMOD_CACHE", str(tmp_path / "cache"))
  grammar = GrammarDocuments(GrammarData(train=60, valid=10, test=10, shifted=10))
  model = NemotConfig(**SIZES, **LAYERS)
  language = CausalLMConfig(data=grammar, tokenizer=TOKENIZER, length=33, batch_tokens=33 * 4)
  first = language.build(model)
  params = drawn(first.model.init, seed=3, spread=0.1)
  meta = {"model": to_json(model, ModelConfig)}
  save_model_folder(tmp_path / "first", params=params, files=first.dataset.files(), meta=meta)
  worlds = WorldsData(train=24, valid=12, test=12, shifted=12)
  experiment = Experiment(
    name="second",
    task=AnsweringConfig(data=Mixed((worlds,)), batch_questions=4, length=128, answer_length=4),
    model=dataclasses.replace(model, tasks=("mqa", "gqa", "lm")),
    start=str(tmp_path / "first"),
    phases=(Phase(steps=1),),
    ema=0.9,
  )
  run, said = set_up(experiment, tmp_path / "second", command=""), []
  state = run.fresh_state(said.append)
  assert run.task.dataset.tokenizer.to_bytes() == first.dataset.tokenizer.to_bytes()
  assert ["fresh: vanilla_head" in note for note in said] == [True]
  table = state.params["auxiliary_embedding"]["table"]
  names = experiment.model.auxiliary
  for number, name in enumerate(model.auxiliary):
    vector = params["auxiliary_embedding"]["table"][number]
    np.testing.assert_array_equal(table[names.index(name)], vector)
  pairs = [(name, name) for name in params if name != "auxiliary_embedding"]
  for name, other in [*pairs, ("output_lm", "output_gqa"), ("output_norm_lm", "output_norm_mqa")]:
    jax.tree.map(np.testing.assert_array_equal, state.params[other], params[name])
    jax.tree.map(np.testing.assert_array_equal, state.ema[other], params[name])
