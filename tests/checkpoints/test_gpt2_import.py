"""A GPT-2 folder becomes a model folder by one command, and is analysed by another."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compmod_jax
from compmod_jax.checkpoints.gpt2 import Gpt2, read_gpt2, with_tokens, write_gpt2
from compmod_jax.checkpoints.huggingface_folder import CONFIG
from compmod_jax.commands import analyse, convert
from compmod_jax.core.errors import UserError
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.tokenizers.gpt2 import END, MERGES, VOCAB, WHOLE, read_gpt2_tokenizer
from compmod_jax.models.decoder_lm import DecoderConfig, DecoderLM
from compmod_jax.models.text import Text
from compmod_jax.training import run

tokenizers = pytest.importorskip("tokenizers")
GRAMMAR = GrammarDocuments(GrammarData(train=200, valid=10, test=10, shifted=10))
PIECES = 380


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
  """A folder as `transformers` writes it: random weights, and the tokenizer as one file."""
  folder, made = tmp_path_factory.mktemp("gpt2"), tokenizers.ByteLevelBPETokenizer()
  made.train_from_iterator(GRAMMAR.load("train"), vocab_size=PIECES - 1, show_progress=False)
  state = json.loads(made.to_str())
  state["model"]["vocab"][END] = PIECES - 1
  (folder / WHOLE).write_text(json.dumps(state))
  config = DecoderConfig(decoder_layers=2, dim=16, heads=2, ffn_dim=16, max_length=24, dropout=0.0)
  module = DecoderLM(config, PIECES, PIECES)
  text = Text(jnp.ones((1, 2), jnp.int32))
  params = nn.unbox(jax.jit(module.init)(jax.random.key(0), text))["params"]
  write_gpt2(folder, Gpt2(config, jax.tree.map(np.asarray, params), PIECES), eos=PIECES - 1)
  return folder


@pytest.fixture
def texts(tmp_path):
  """A folder of text."""
  lines = list(GRAMMAR.load("train"))
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "a.txt").write_text("\n\n".join(lines))
  return tmp_path / "data"


def test_tokens_that_are_added_have_hardly_any_probability_and_change_no_other_logit(theirs):
  model = read_gpt2(theirs)
  params = {**model.params, "output_norm": {**model.params["output_norm"]}}
  # Logits far from 0, where a vector of zeros would have nearly all of the probability.
  params["output_norm"]["bias"] = np.full(16, -1.0, np.float32)
  params["embedding"] = {"table": model.params["embedding"]["table"] + 1}
  model = model._replace(params=params)
  more = with_tokens(model, PIECES + 3)
  tokens = Text(jnp.asarray(np.random.default_rng(0).integers(0, PIECES, (2, 9))))

  def logits(one):
    module = DecoderLM(one.config, one.vocab, one.vocab)
    return jax.jit(module.apply)({"params": one.params}, tokens).logits

  found, before = logits(more), logits(model)
  np.testing.assert_allclose(found[..., :PIECES], before, rtol=1e-5)
  mean = np.broadcast_to(np.mean(before, axis=-1, keepdims=True), (2, 9, 3))
  np.testing.assert_allclose(found[..., PIECES:], mean, rtol=1e-4)
  assert mean.max() < -10
  added = jax.nn.softmax(found)[..., PIECES:].sum(-1)
  assert (added <= 3 / (PIECES + 3)).all()
  with pytest.raises(UserError, match="use its tokenizer"):
    with_tokens(more, PIECES)


def test_heads_that_are_no_part_of_the_width_are_not_exported(theirs, tmp_path):
  model = read_gpt2(theirs)
  wide = dataclasses.replace(model.config, head_dim=2 * model.config.dim)
  with pytest.raises(UserError, match=f"head_dim = {wide.head_dim}, .* heads of width dim / heads"):
    write_gpt2(tmp_path / "out", model._replace(config=wide))
  assert not (tmp_path / "out").exists()


def test_a_tokenizer_in_one_file_is_that_of_its_parts(theirs, tmp_path):
  state = json.loads((theirs / WHOLE).read_text())["model"]
  (tmp_path / VOCAB).write_text(json.dumps(state["vocab"]))
  pairs = [one if isinstance(one, str) else " ".join(one) for one in state["merges"]]
  (tmp_path / MERGES).write_text("\n".join(["#version: 0.2", *pairs]))
  parts = read_gpt2_tokenizer(tmp_path)
  assert read_gpt2_tokenizer(theirs).to_bytes() == parts.to_bytes()
  assert parts.pieces == PIECES
  # Where both are there the parts are read.
  (tmp_path / WHOLE).write_text("{}")
  assert read_gpt2_tokenizer(tmp_path).to_bytes() == parts.to_bytes()
  (tmp_path / VOCAB).unlink()
  with pytest.raises(UserError, match="holds no tokenizer of byte pairs"):
    read_gpt2_tokenizer(tmp_path)


def test_two_commands_from_a_folder_of_theirs_to_the_report_on_roles(
  theirs, texts, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)
  ours = tmp_path / "ours"
  convert.main(["--huggingface", str(theirs), "--workdir", str(ours), "--data", str(texts)])
  model = compmod_jax.load(ours)
  (scored,) = model.score(["The dog sleeps."])
  assert np.isfinite(scored.log_probability)
  assert model.task.dataset.config.data.folder == str(texts)
  analyse.main(
    ["roles", "--workdir", str(ours), "--split", "test", "--sentences", "6", "--importance", "2",
     "--steps", "1", "--quiet"]
  )  # fmt: skip
  printed = capsys.readouterr().out
  data = json.loads((ours / "analysis" / "roles" / "result.json").read_text())
  assert list(data["modules"]) == ["decoder/layer_0/self", "decoder/layer_1/self"]
  assert "Positional heads: 0 of 4" in printed
  assert "no relations" in printed


def test_without_text_the_grammar_is_read_whose_syntax_is_known(theirs, tmp_path):
  convert.import_model(theirs, tmp_path / "ours")
  data = compmod_jax.load(tmp_path / "ours").task.dataset.config.data
  assert data == GrammarDocuments()
  assert data.load("test").relations is not None


@pytest.mark.parametrize("fields", [{"n_positions": 4}, {"n_inner": 8}])
def test_tensors_that_do_not_fit_the_sizes_of_their_configuration_are_named(
  theirs, tmp_path, fields
):
  folder = shutil.copytree(theirs, tmp_path / "other")
  config = json.loads((folder / CONFIG).read_text())
  (folder / CONFIG).write_text(json.dumps(config | fields))
  with pytest.raises(UserError, match=r"do not fit the sizes in config\.json"):
    read_gpt2(folder)


def test_a_tokenizer_without_a_vocabulary_is_named(theirs, tmp_path):
  (tmp_path / WHOLE).write_text(json.dumps({"model": {"type": "BPE", "merges": []}}))
  with pytest.raises(UserError, match="holds no tokenizer of byte pairs"):
    read_gpt2_tokenizer(tmp_path)


def test_what_does_not_belong_together_is_named_before_anything_is_written(theirs, tmp_path):
  wrong = tmp_path / "wrong"
  shutil.copytree(theirs, wrong)
  state = json.loads((wrong / WHOLE).read_text())
  last = " ".join(state["model"]["merges"].pop()).replace(" ", "")
  end = state["model"]["vocab"].pop(last)
  state["model"]["vocab"] = {
    piece: number - (number > end) for piece, number in state["model"]["vocab"].items()
  }
  (wrong / WHOLE).write_text(json.dumps(state))
  with pytest.raises(UserError, match=f"has {PIECES - 1} tokens, but the model has {PIECES}"):
    convert.import_model(wrong, tmp_path / "ours")
  with pytest.raises(UserError, match="nowhere"):
    convert.import_model(theirs, tmp_path / "ours", str(tmp_path / "nowhere"))
  assert not (tmp_path / "ours").exists()
