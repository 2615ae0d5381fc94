"""Checkpoints of Hugging Face written and read, without their library; see also tests/peers."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from compmod_jax.checkpoints.huggingface import Checkpoint
from compmod_jax.checkpoints.huggingface import read_checkpoint as read
from compmod_jax.checkpoints.huggingface import write_checkpoint as write
from compmod_jax.checkpoints.huggingface_folder import CONFIG, INDEX, WEIGHTS
from compmod_jax.checkpoints.huggingface_tokenizer import read_tokenizer
from compmod_jax.commands import convert
from compmod_jax.core.errors import UserError
from compmod_jax.models.encoder import Encoder, EncoderConfig

SIZES = EncoderConfig(encoder_layers=2, dim=8, heads=2, ffn_dim=12, max_length=10)
VOCAB = 11


def checkpoint(kind, pad=1, config=SIZES):
  """A model with random parameters."""
  model = Encoder(config, VOCAB, pad)
  shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2), int)))["params"]
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
  return Checkpoint(config, params, VOCAB, pad, kind)


@pytest.fixture(scope="module", params=["roberta", "bert"])
def written(request, tmp_path_factory):
  made = checkpoint(request.param)
  folder = tmp_path_factory.mktemp("hf") / "new" / request.param
  write(folder, made, bos=0, eos=2)
  return made, folder


def test_what_is_written_is_read_back_to_the_last_bit(written):
  made, folder = written
  found = read(folder)
  assert found._replace(params=None) == made._replace(params=None)
  jax.tree.map(np.testing.assert_array_equal, found.params, made.params)


def test_old_names_half_precision_and_several_files_are_read(written, tmp_path):
  made, folder = written
  tensors = safetensors.numpy.load_file(folder / WEIGHTS)
  old = {".weight": ".gamma", ".bias": ".beta"}
  renamed = {}
  for name, value in tensors.items():
    stem, dot, last = name.rpartition(".")
    norm = "LayerNorm" in stem
    renamed[stem + (old[dot + last] if norm else dot + last)] = value.astype(ml_dtypes.bfloat16)
  renamed[f"{made.kind}.pooler.dense.bias"] = np.zeros(8, np.float32)
  names = sorted(renamed)
  files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
  shutil.copy(folder / CONFIG, tmp_path)
  for file, part in files.items():
    safetensors.numpy.save_file({name: renamed[name] for name in part}, tmp_path / file)
  index = {"weight_map": {name: file for file, part in files.items() for name in part}}
  (tmp_path / INDEX).write_text(json.dumps(index))
  found = read(tmp_path).params

  def close(a, b):
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)

  jax.tree.map(close, found, made.params)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "gpt2"}, "model_type in .* is 'gpt2'"),
    ({"hidden_act": "silu"}, "hidden_act in .* is 'silu'"),
    ({"is_decoder": True}, "is_decoder = True"),
    ({"position_embedding_type": "relative_key"}, "relative_key"),
    ({"num_hidden_layers": None}, "a size is missing or no number"),
  ],
)
def test_models_of_other_kinds_are_refused_by_field(written, tmp_path, change, message):
  shutil.copytree(written[1], tmp_path / "m")
  config = json.loads((tmp_path / "m" / CONFIG).read_text())
  (tmp_path / "m" / CONFIG).write_text(json.dumps(config | change))
  with pytest.raises(UserError, match=message):
    read(tmp_path / "m")


def test_missing_additional_and_untied_tensors_are_named(written, tmp_path):
  made, folder = written
  whole = safetensors.numpy.load_file(folder / WEIGHTS)
  head = {"roberta": "lm_head", "bert": "cls.predictions"}[made.kind]
  table = whole[f"{made.kind}.embeddings.word_embeddings.weight"]
  cases = [
    ({k: v for k, v in whole.items() if not k.startswith(head)}, f"has no tensor {head}"),
    (whole | {f"{made.kind}.extra.weight": table}, "no place for: .*extra.weight"),
    (whole | {f"{head}.decoder.weight": table + 1}, "differs from the word embeddings"),
  ]
  shutil.copy(folder / CONFIG, tmp_path)
  for tensors, message in cases:
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=message):
      read(tmp_path)
  (tmp_path / WEIGHTS).write_bytes(b"nonsense")
  with pytest.raises(UserError, match="is damaged"):
    read(tmp_path)
  (tmp_path / WEIGHTS).unlink()
  with pytest.raises(UserError, match=f"There is no {WEIGHTS}"):
    read(tmp_path)
  with pytest.raises(UserError, match=f"There is no {CONFIG}"):
    read(tmp_path / "nowhere")


@pytest.mark.parametrize(
  "fields",
  [
    {"norm": "pre"},
    {"compete": ("encoder_self",)},
    {"expert_layers": ("encoder",)},
    {"random_positions": 600},
    {"positions": "rotary"},
  ],
)
def test_what_their_layout_cannot_hold_is_refused(tmp_path, fields):
  made = checkpoint("roberta", config=dataclasses.replace(SIZES, **fields))
  with pytest.raises(UserError, match=r"Export a model with(out these| positions = learned)"):
    write(tmp_path / "m", made)
  assert not (tmp_path / "m").exists()


def changed(folder, place, **fields):
  """A copy of a folder whose configuration has other fields; `...` leaves one out."""
  shutil.copytree(folder, place)
  config = json.loads((place / CONFIG).read_text()) | fields
  kept = {name: value for name, value in config.items() if value is not ...}
  (place / CONFIG).write_text(json.dumps(kept))
  return place


def test_roberta_s_head_uses_gelu_whatever_its_layers_use(written, tmp_path):
  made, folder = written
  found = read(changed(folder, tmp_path / "m", hidden_act="relu"))
  assert found.config.activation == "relu"
  assert found.config.head_activation == ("gelu" if made.kind == "roberta" else None)
  tokens = jnp.ones((1, 3), int) * 4
  params = {"params": jax.device_put(found.params)}
  logits = Encoder(found.config, VOCAB, 1).apply(params, tokens)
  uses_relu = dataclasses.replace(found.config, head_activation="relu")
  other = Encoder(uses_relu, VOCAB, 1).apply(params, tokens)
  distance = float(jnp.abs(logits - other).max())
  assert distance > 0.1 if made.kind == "roberta" else distance == 0
  again = tmp_path / "again"
  write(again, found)
  assert json.loads((again / CONFIG).read_text())["hidden_act"] == "relu"
  assert read(again).config == found.config
  kinds = {"roberta", "bert"} - {made.kind}
  with pytest.raises(UserError, match="head_activation = .*Export it as " + made.kind):
    write(tmp_path / "other", found._replace(kind=kinds.pop()))


def test_what_a_configuration_leaves_out_means_what_it_means_to_theirs(written, tmp_path):
  made, folder = written
  for kind, pad in (("roberta", 1), ("bert", 0)):
    write(tmp_path / kind, checkpoint(kind, pad))
    place = changed(tmp_path / kind, tmp_path / f"{kind}-less", pad_token_id=..., hidden_act=...)
    assert read(place).pad == pad
    assert read(place).config == SIZES
  place = changed(folder, tmp_path / "m", layer_norm_eps=...)
  assert read(place).config.norm_epsilon == 1e-12
  place = changed(folder, tmp_path / "null", pad_token_id=None)
  if made.kind == "bert":
    assert read(place).pad == 0
  else:
    with pytest.raises(UserError, match="pad_token_id = None"):
      read(place)


def test_two_biases_of_the_output_that_differ_are_refused(written, tmp_path):
  made, folder = written
  whole = safetensors.numpy.load_file(folder / WEIGHTS)
  head = {"roberta": "lm_head", "bert": "cls.predictions"}[made.kind]
  shutil.copy(folder / CONFIG, tmp_path)
  bias = whole[f"{head}.bias"]
  safetensors.numpy.save_file(whole | {f"{head}.decoder.bias": bias}, tmp_path / WEIGHTS)
  np.testing.assert_array_equal(read(tmp_path).params["head"]["bias"], bias)
  safetensors.numpy.save_file(whole | {f"{head}.decoder.bias": bias + 1}, tmp_path / WEIGHTS)
  with pytest.raises(UserError, match=r"decoder\.bias differs from"):
    read(tmp_path)


@pytest.mark.parametrize(
  "name", ["../model.safetensors", "/etc/passwd", "/dev/zero", "..", "", "a/b", "a\\b", "a\0b", 3]
)
def test_an_index_cannot_name_files_outside_of_its_folder(written, tmp_path, name):
  folder = tmp_path / "m"
  folder.mkdir()
  shutil.copy(written[1] / CONFIG, folder)
  shutil.copy(written[1] / WEIGHTS, tmp_path)
  (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
  with pytest.raises(UserError, match=r"a\.weight is in .*no name of a file in that folder"):
    read(folder)


def test_files_that_a_stranger_wrote_are_read_within_limits(written, tmp_path):
  folder = tmp_path / "m"
  shutil.copytree(written[1], folder)
  index, config, weights = folder / INDEX, folder / CONFIG, folder / WEIGHTS
  for text, message in (
    ("[" * 100_000, "nested deeper"),
    ("[]", "holds no object"),
    ('{"weight_map": []}', "has no weight_map"),
    ('{"weight_map": {"a": "zero.safetensors"}}', "zero.safetensors is damaged .*no plain file"),
    ('{"weight_map": {"a": "gone.safetensors"}}', r"There is no gone\.safetensors"),
  ):
    (folder / "zero.safetensors").unlink(missing_ok=True)
    (folder / "zero.safetensors").symlink_to("/dev/zero")
    index.write_text(text)
    with pytest.raises(UserError, match=message):
      read(folder)
  index.unlink()
  with open(weights, "r+b") as file:
    file.truncate(1 << 42)  # takes no room
  with pytest.raises(UserError, match="has 4,398,046,511,104 bytes, and at most"):
    read(folder)
  for text in ("[" * 100_000, "[]", '{"hidden_size": ' + "9" * 5000 + "}", "\xff"):
    config.write_text(text, "latin-1")
    with pytest.raises(UserError, match=r"config\.json (cannot be read|holds no object)"):
      read(folder)


@pytest.mark.parametrize(
  "fields", [{"hidden_size": 10**5}, {"max_position_embeddings": 10**9}, {"intermediate_size": 99}]
)
def test_tensors_that_do_not_fit_the_sizes_of_their_configuration_are_named(
  written, tmp_path, fields
):
  with pytest.raises(UserError, match=r"do not fit the sizes in config\.json"):
    read(changed(written[1], tmp_path / "m", **fields))


def test_importing_replaces_nothing_but_a_model_s_folder(written, tmp_path):
  theirs = tmp_path / "theirs"
  shutil.copytree(written[1], theirs)
  notes = tmp_path / "notes"
  notes.mkdir()
  (notes / "a.txt").write_text("mine")
  (tmp_path / "file").write_text("mine")
  for place in (theirs, notes, tmp_path / "file"):
    with pytest.raises(UserError, match="no model's folder: what it holds would be replaced"):
      convert.import_model(theirs, place)
  assert read(theirs).kind == written[0].kind
  assert (notes / "a.txt").read_text() == (tmp_path / "file").read_text() == "mine"
  # New, empty and model folders get past this, up to the tokenizer, which is not there.
  ours = tmp_path / "ours"
  for prepare in (lambda: None, ours.mkdir, (ours / "model.json").touch):
    prepare()
    with pytest.raises(UserError, match="There is no tokenizer"):
      convert.import_model(theirs, ours)


def test_exporting_does_not_overwrite_the_configuration_of_a_run(tmp_path):
  (tmp_path / CONFIG).write_text('{"seed": 0}')
  with pytest.raises(UserError, match="not that of a Hugging Face model"):
    convert.export_model(tmp_path, None, tmp_path, "bert")
  assert (tmp_path / CONFIG).read_text() == '{"seed": 0}'


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"tokenizer.json": "[" * 100_000}, "nested deeper"),
    ({"tokenizer.json": "{}"}, "has no field model"),
    ({"tokenizer.json": '{"model": {}}'}, "it is no tokenizer"),
    ({"tokenizer.json": "{}", "tokenizer_config.json": "[1]"}, "holds no object"),
    ({"vocab.json": "[]", "merges.txt": ""}, "are no vocabulary"),
    ({"vocab.json": "{}"}, "cannot be read"),
    ({"vocab.txt": "\xff"}, "is no vocabulary"),
    ({}, "There is no tokenizer"),
  ],
)
def test_damaged_tokenizers_are_named_and_not_followed_by_a_traceback(tmp_path, files, message):
  pytest.importorskip("tokenizers")
  for name, text in files.items():
    (tmp_path / name).write_text(text, "latin-1")
  with pytest.raises(UserError, match=message):
    read_tokenizer(tmp_path)
