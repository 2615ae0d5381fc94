"""A trained model opens, translates, shows its activations and takes edits."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

import compmod_jax
from compmod_jax import api
from compmod_jax.checkpoints.model_folder import load_model_folder, save_model_folder
from compmod_jax.commands.options import ModelArgs, open_model
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import takes_valid
from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK

SENTENCES = ["der hund schläft", "", "die katze sieht einen vogel und ein fisch", " \t", "vogel"]
PAIRS = [("der hund schläft", "the dog sleeps"), ("die katze sieht", "A cat sees One bird")]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
  return tiny_model.make_workdir(tmp_path_factory.mktemp("api") / "run")


@pytest.fixture(scope="module")
def model(workdir):
  return compmod_jax.load(workdir)


@pytest.fixture(scope="module")
def everything(model) -> dict[str, np.ndarray]:
  """All activations for PAIRS."""
  return model.capture(PAIRS)


@pytest.fixture
def folder(workdir, tmp_path) -> Path:
  """A copy of the best model that a test may damage."""
  return shutil.copytree(workdir / "models" / "best", tmp_path / "model")


# Opening.


def test_fields_of_the_configuration_can_differ_from_training(workdir, model):
  """Those of which parameters know nothing: sinusoids go on."""
  longer = " ".join(["hund"] * model.model.config.max_length)
  with pytest.raises(UserError, match="the model has positions for"):
    model.capture([longer], ["encoder/output"])
  fields = ModelArgs(workdir, model_fields=("max_length=100",))
  found = open_model(fields).model.capture([longer], ["encoder/output"])
  assert found["encoder/output"].shape[1] > model.model.config.max_length
  with pytest.raises(UserError, match=r"none there.*Leave encoder_layers as in training"):
    api.with_fields(model, encoder_layers=3)
  for wrong in ("max_lenth=3", "max_length", "max_length=[]"):
    with pytest.raises(UserError, match="max_length"):
      open_model(ModelArgs(workdir, model_fields=(wrong,)))


def test_importing_the_package_imports_neither_jax_nor_programs():
  code = (
    "import sys, compmod_jax; assert 'jax' not in sys.modules; dir(compmod_jax)\n"
    "compmod_jax.load; found = {name.partition('.')[0] for name in sys.modules}\n"
    "assert 'jax' in found and not found & {'train', 'orbax', 'tensorflow', 'matplotlib'}, found"
  )
  root = Path(__file__).parents[1]
  subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=root)


def test_a_workdir_opens_its_best_model_unless_another_is_named(workdir, model):
  there = load_model_folder(workdir / "models" / "best")[0]
  jax.tree.map(np.testing.assert_array_equal, there, jax.tree.map(np.asarray, model.params))
  assert compmod_jax.load(workdir / "models" / "best").meta == model.meta
  assert compmod_jax.load(str(workdir), model="step-00000010").meta["step"] == 10


def test_an_unknown_attribute_of_the_package_is_an_attribute_error():
  with pytest.raises(AttributeError, match="no attribute 'lod'"):
    _ = compmod_jax.lod


def test_a_workdir_caught_between_two_renames_still_opens(workdir, tmp_path):
  models = shutil.copytree(workdir, tmp_path / "run") / "models"
  (models / "best").rename(models / ".best.previous")
  assert compmod_jax.load(tmp_path / "run").meta["step"] == 30


def test_a_folder_without_a_model_is_a_user_error_that_says_so(tmp_path):
  with pytest.raises(UserError, match=r"There is no folder .*nowhere"):
    compmod_jax.load(tmp_path / "nowhere")
  (tmp_path / "models").mkdir()
  with pytest.raises(UserError, match="holds no trained model") as error:
    compmod_jax.load(tmp_path)
  assert "\n" not in str(error.value)


def test_an_unknown_model_name_is_answered_with_those_that_exist(workdir):
  with pytest.raises(UserError, match=r"'bets'.*average|'bets'.*Did you mean 'best'"):
    compmod_jax.load(workdir, model="bets")
  with pytest.raises(UserError, match="itself a model's folder"):
    compmod_jax.load(workdir / "models" / "best", model="best")


def test_a_model_folder_that_holds_no_model_is_refused(folder):
  save_model_folder(folder, params={}, files={}, meta={"holds": "tokenizers"})
  with pytest.raises(UserError, match="does not describe a trained model"):
    compmod_jax.load(folder)


def test_another_tokenizer_than_the_saved_one_is_refused(folder):
  tokenizer = folder / "target.tokenizer"
  tokenizer.write_bytes(tokenizer.read_bytes().replace(b"dog", b"god"))
  with pytest.raises(UserError, match=r"target\.tokenizer.*checksum"):
    compmod_jax.load(folder)


def test_parameters_of_another_shape_are_listed(folder):
  params, files, meta = load_model_folder(folder)
  params["decoder_embedding"]["table"] = np.zeros((3, 16), np.float32)
  save_model_folder(folder, params=params, files=files, meta=meta)
  with pytest.raises(UserError, match=r"decoder_embedding/table: \(3, 16\) there"):
    compmod_jax.load(folder)


def test_a_configuration_with_an_unknown_field_is_refused_by_name(folder):
  params, files, meta = load_model_folder(folder)
  meta["model"]["hedas"] = 2
  save_model_folder(folder, params=params, files=files, meta=meta)
  with pytest.raises(UserError, match="hedas"):
    compmod_jax.load(folder)


# Translating.


def test_every_sentence_gets_its_translation_and_a_blank_one_an_empty_one(model):
  texts = model.translate(SENTENCES)
  assert [bool(text) for text in texts] == [bool(s.strip()) for s in SENTENCES]
  assert len(set(texts)) == 4
  assert model.translate(SENTENCES[::-1]) == texts[::-1]


def test_wrong_arguments_of_translate_are_user_errors(model):
  with pytest.raises(UserError, match=r"is 'beans'.*Did you mean 'beams'"):
    model.translate(SENTENCES, beans=2)
  with pytest.raises(UserError, match="beams is 0"):
    model.translate(SENTENCES, beams=0)
  with pytest.raises(UserError, match="give a list"):
    model.translate("der hund")


# Looking inside.


def test_capture_returns_what_a_forward_pass_holds(model, everything):
  weights, heads = "encoder/layer_0/self/router/weights", "decoder/layer_0/cross/heads"
  assert everything["source"].shape == (2, 4)
  assert everything["target"].shape == (2, 6)
  assert everything[weights].shape == (2, 4, 2)
  assert everything[heads].shape == (2, 6, 2, 8)
  np.testing.assert_allclose(everything[weights].sum(axis=-1), 1, atol=1e-6)
  batch = {name: jnp.asarray(everything[name]) for name in ("source", "target")}
  logits = jax.jit(model.task.model.forward)(model.params, batch)
  np.testing.assert_allclose(everything["logits"], logits, atol=1e-4)
  words = [model.target_tokenizer.decode(row.tolist()) for row in everything["target"]]
  assert words == [target for _, target in PAIRS]


def test_capture_gives_the_text_of_the_token_at_every_position(everything):
  sources = [["der", "hund", "schläft", "</s>"], ["die", "katze", "sieht", "</s>"]]
  assert everything.words("encoder/layer_0/self/router/weights") == sources
  read = [["<s>", "the", "dog", "sleeps", "", ""], ["<s>", "A", "cat", "sees", "One", "bird"]]
  cross = "decoder/layer_0/cross/attention"
  assert everything.words(cross) == read
  assert everything.words(cross, keys=True) == sources
  assert everything.words("decoder/layer_0/self/attention", keys=True) == read
  assert everything.words("logits", predicted=True)[0] == ["the", "dog", "sleeps", "</s>", "", ""]
  assert everything.words("target")[0] == ["the", "dog", "sleeps", "</s>", "", ""]
  assert everything.valid("logits").tolist() == [[True] * 4 + [False] * 2, [True] * 6]
  assert everything.valid(cross, keys=True).all()


def test_every_site_can_be_captured_and_has_a_name(model, everything):
  names = model.sites()
  assert set(everything) == {*names, "source", "target"}
  assert {"encoder/layer_0/self/router/scores", "encoder/output", "logits"} <= set(names)
  assert all(everything[name].dtype == np.float32 for name in names)


def test_capture_of_sentences_follows_the_models_own_translation(model):
  found = model.capture(SENTENCES[:1], ["logits"])
  best = model.hypotheses(SENTENCES[:1])[0][0]
  assert found["target"][0].tolist() == best.tokens.tolist()


def test_capture_of_the_encoder_alone_needs_no_translation(model):
  found = model.capture(SENTENCES, ["encoder/output"])
  assert sorted(found) == ["encoder/output", "source"]
  assert found["source"][1].tolist() == [EOS] + [PAD] * 8


def test_wrong_arguments_of_capture_are_user_errors(model):
  with pytest.raises(UserError, match="Did you mean 'encoder/output'"):
    model.capture(PAIRS, ["encoder/outptu"])
  with pytest.raises(UserError, match="at least one sentence"):
    model.capture([])
  with pytest.raises(UserError, match="mixes"):
    model.capture([*PAIRS, "der hund"], ["logits"])
  with pytest.raises(UserError, match="positions for 48"):
    model.capture(["der " * 60], ["encoder/output"])


# Changing what happens inside.


def test_step_by_step_decoding_runs_with_the_same_edits_as_a_forward_pass(model):
  first, second = compmod_jax.zero_units(0, axis=2), compmod_jax.zero_units(1, axis=2)
  edited = model.edit({"encoder/layer_0/self/heads": first, "decoder/layer_0/self/heads": second})
  tokens = edited.hypotheses(SENTENCES[2:3], method="greedy")[0][0].tokens
  source = [*model.source_tokenizer.encode(SENTENCES[2]), EOS]
  batch = {"source": jnp.asarray([source], jnp.int32), "target": jnp.asarray(tokens)[None]}

  def best(task):
    logits = np.array(jax.jit(task.model.forward)(model.params, batch))[0]
    logits[:, [PAD, BOS, UNK]] = -np.inf
    return logits.argmax(axis=-1)[:-1].tolist()  # the last may be the end that the limit forces

  assert best(edited.task) == tokens[:-1].tolist()
  assert best(model.task) != tokens[:-1].tolist()


def test_an_edit_leaves_the_model_it_was_made_from_alone(model, everything):
  site = "encoder/layer_0/self/router/weights"
  one_head = model.edit({site: lambda x: jnp.zeros_like(x).at[..., 0].set(1)})
  both = one_head.edit({"encoder/output": lambda x: x * 0})
  assert not model.task.model.edits
  assert set(one_head.task.model.edits) == {site}
  found = both.capture(PAIRS, [site, "encoder/output"])
  assert (found[site][..., 0] == 1).all()
  assert (found["encoder/output"] == 0).all()
  again = model.capture(PAIRS)
  assert all((again[name] == everything[name]).all() for name in everything)


def test_edits_are_part_of_evaluation(model):
  silenced = model.edit({"logits": lambda x: x * 0})
  values = silenced.task.evaluate(silenced.params, "test", decode=False).values
  assert values["perplexity"] == pytest.approx(model.target_tokenizer.vocab_size, rel=1e-5)


def test_an_edit_that_needs_the_valid_mask_gets_it_whatever_the_batch(model):
  """The mean over a sentence: right only without the padding of the bucket."""

  def mean(value, valid):
    sums = jnp.sum(jnp.where(valid[..., None], value, 0), axis=1, keepdims=True)
    return jnp.broadcast_to(sums / jnp.sum(valid, axis=1)[:, None, None], value.shape)

  sentence, site = "der hund schläft", "encoder/output"
  edited = model.edit({site: mean})
  captured = edited.capture([sentence], [site])[site][0]
  plain = model.capture([sentence], [site])[site][0]
  np.testing.assert_allclose(captured, np.broadcast_to(plain.mean(0), plain.shape), atol=1e-5)
  # In `translate` the batch is padded to its bucket: the translation is that of the whole pass.
  (found,) = edited.hypotheses([sentence], method="greedy")
  batch = {
    "source": jnp.asarray([[*model.source_tokenizer.encode(sentence), EOS]]),
    "target": jnp.asarray(found[0].tokens)[None],
  }
  logits = np.array(jax.jit(edited.task.model.forward)(model.params, batch))[0]
  logits[:, [PAD, BOS, UNK]] = -np.inf
  assert logits.argmax(axis=-1)[:-1].tolist() == found[0].tokens[:-1].tolist()
  assert edited.translate(SENTENCES)[0] == edited.translate([sentence])[0]


def test_while_decoding_the_mask_says_which_rows_are_sentences(model):
  seen = {}

  def look(value, valid):
    seen[value.shape[:2]] = valid.shape
    return jnp.where(valid[:, :, None], value, jnp.nan)

  edited = model.edit({"decoder/layer_0/output": look})
  plain = model.hypotheses(SENTENCES[:3])
  for found, expected in zip(edited.hypotheses(SENTENCES[:3]), plain, strict=True):
    assert found[0].tokens.tolist() == expected[0].tokens.tolist()
  assert all(shape == mask for shape, mask in seen.items())
  assert {beams for _, beams in seen} == {3}


def test_edits_of_one_argument_stay_as_they_are():
  assert not takes_valid(lambda x: x)
  assert not takes_valid(lambda x, axis=0: x)
  assert not takes_valid(compmod_jax.zero_units(1))
  assert not takes_valid(jax.tree_util.Partial(lambda scale, x: scale * x, 2.0))
  assert not takes_valid(jnp.tanh)
  assert takes_valid(lambda x, valid: x)


# Scoring.


def test_pairs_are_scored_by_the_log_probability_of_every_target_token(model, everything):
  found = model.score([*PAIRS, ("vogel", "")])
  logits = jax.nn.log_softmax(everything["logits"])
  for row, one in enumerate(found[:2]):
    expected = np.take_along_axis(logits[row], everything["target"][row][:, None], 1)[:, 0]
    np.testing.assert_allclose(one.log_probabilities, expected[: len(one.tokens)], atol=1e-4)
    assert one.log_probability == pytest.approx(float(expected[: len(one.tokens)].sum()), abs=1e-3)
    assert one.words == [*PAIRS[row][1].split(), "</s>"]
  assert found[2].words == ["</s>"]
  # The score of a translation that the model made itself, before its length counts.
  best = model.hypotheses(["die katze sieht"], length_penalty=0.0, max_extra=9)[0][0]
  if best.tokens[-1] == EOS and UNK not in best.tokens:
    (again,) = model.score([("die katze sieht", best.text)])
    assert again.log_probability == pytest.approx(best.score, abs=1e-3)


def test_what_is_no_pair_or_too_long_is_not_scored(model):
  with pytest.raises(UserError, match=r"scores a list of \(source, target\)"):
    model.score(["der hund"])
  with pytest.raises(UserError, match=r"pairs\[1\] has 61 tokens with its end in its target"):
    model.score([PAIRS[0], ("der hund", "the " * 60)])


def test_an_edit_of_an_unknown_site_is_answered_with_the_nearest(model):
  with pytest.raises(UserError, match="Did you mean 'encoder/output'"):
    model.edit({"encoder/outptu": lambda x: x})


def test_translations_may_be_recoded_step_by_step(model):
  plain = model.hypotheses(["der hund schläft", ""])
  assert plain[0][0].entropy is None
  found = model.hypotheses(["der hund schläft", ""], recode_layer=-1, recode_size=0.0)
  assert [h[0].text for h in found] == [h[0].text for h in plain]
  assert found[0][0].entropy.shape == (2,)
  pushed = model.hypotheses(["der hund schläft"], recode_layer=0, recode_size=0.01)[0][0]
  assert pushed.entropy[1] < pushed.entropy[0]
  with pytest.raises(UserError, match="recode_layer is 5"):
    model.translate(["der hund"], recode_layer=5)
