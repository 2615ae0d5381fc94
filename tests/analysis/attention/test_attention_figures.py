"""Pictures of attention: their panels, tokens and numbers."""

import csv
import json

import numpy as np
import pytest
import tiny_model

import compmod_jax
from compmod_jax.analysis import attention
from compmod_jax.analysis.attention import attention_modules, attention_pictures, read_attention
from compmod_jax.analysis.attention.report import _sums
from compmod_jax.commands import analyse
from compmod_jax.core.errors import UserError
from compmod_jax.training import run

TEXT = "der hund schläft"
CROSS = "decoder/layer_0/cross"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return tiny_model.make_workdir(tmp_path_factory.mktemp("attention") / "run")


@pytest.fixture(scope="module")
def model(workdir):
  return compmod_jax.load(workdir)


def words(labels):
  return [label.get_text() for label in labels]


def test_heads_are_panels_with_tokens_on_both_axes_and_the_router_beside(model):
  pair = (TEXT, "the dog sleeps")
  assert attention_modules(model) == [
    "encoder/layer_0/self",
    "decoder/layer_0/self",
    "decoder/layer_0/cross",
  ]
  pictures = model.attention_pictures(pair, ["encoder/layer_0/self", "decoder/layer_0/self", CROSS])
  captured = model.capture([pair], [f"{CROSS}/attention", f"{CROSS}/router/weights"])
  panels = [axes for axes in pictures[CROSS].axes if axes.get_title(loc="left")]
  assert len(panels) == 2
  for head, axes in enumerate(panels):
    assert words(axes.get_xticklabels()) == ["der", "hund", "schläft", "</s>"]
    assert words(axes.get_yticklabels()) == ["<s>", "the", "dog", "sleeps"]
    drawn = np.asarray(axes.collections[0].get_array()).reshape(4, 4)
    np.testing.assert_allclose(drawn, captured[f"{CROSS}/attention"][0, head], atol=1e-6)
    np.testing.assert_allclose(drawn.sum(axis=1), 1, atol=1e-5)
    weight = captured[f"{CROSS}/router/weights"][0, :, head]
    assert axes.get_title(loc="left") == f"head {head}, mean weight {weight.mean():.2f}"
    (beside,) = axes.child_axes
    np.testing.assert_allclose(np.asarray(beside.collections[0].get_array()).ravel(), weight)
  # Heads that do not compete have no router, and a decoder does not look ahead.
  plain = read_attention(model, pair, ["decoder/layer_0/self"])["decoder/layer_0/self"]
  assert plain.router is None
  assert (np.triu(plain.attention[0], 1) == 0).all()
  titles = [axes.get_title(loc="left") for axes in pictures["decoder/layer_0/self"].axes]
  assert titles[:2] == ["head 0", "head 1"]


def test_what_weights_add_up_to_is_said():
  softmax = np.full((2, 3, 4), 0.25)
  assert _sums(softmax) == "rows sum to 1."
  assert _sums(0.9 * softmax) == "rows do not sum to 1 in this form of attention."
  assert "below 0 are drawn as 0" in _sums(softmax - 0.5 * np.eye(3, 4))


def test_the_program_writes_a_picture_of_every_module_without_reading_the_data(
  workdir, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)
  (workdir / "data").rename(tmp_path / "away")
  options = ["--output", str(tmp_path / "out"), "--text", TEXT, "vogel", "--module", CROSS]
  analyse.main(["attention", "--workdir", str(workdir), "--quiet", *options])
  names = {path.name for path in (tmp_path / "out/plots").glob("*.png")}
  assert names == {f"text_{n}_decoder_layer_0_cross.png" for n in (0, 1)}
  with (tmp_path / "out/attention.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
  assert {row["key word"] for row in rows if row["text"] == "1"} == {"vogel", "</s>"}
  record = json.loads((tmp_path / "out/result.json").read_text())
  assert record["texts"] == [TEXT, "vogel"]
  (tmp_path / "away").rename(workdir / "data")


def test_what_cannot_be_drawn_is_named(model):
  with pytest.raises(UserError, match=r"is 'decoder/layer_0/corss'.*Did you mean"):
    attention_pictures(model, TEXT, ["decoder/layer_0/corss"])
  with pytest.raises(UserError, match="give --text"):
    attention.Attention()
  with pytest.raises(UserError, match="--target has 1 texts and --text 2"):
    attention.Attention(text=("a", "b"), target=("c",))
