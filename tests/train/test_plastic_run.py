"""Plastic language models and fast weights through the programs: train, continue, look inside."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_masked
import tiny_recurrent
from programs import metrics_of, train

import compmod_jax
from compmod_jax.commands import analyse
from compmod_jax.commands.reproduce import Args, grid
from compmod_jax.core.errors import UserError
from compmod_jax.data.sequences import AssociationData
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.mechanisms.plasticity import PlasticConfig
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.recurrent import LstmCellConfig, RecurrentConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.sequence import SequenceConfig
from compmod_jax.tools.describe import count_parameters
from compmod_jax.training.experiment import Phase, load_config

pytestmark = pytest.mark.usefixtures("one_device")

# Networks with the simple rule learn associations below.
CELLS = {
  "network": PlasticConfig(dim=5, rule="retroactive", alpha=2.0),
  "hebbian": PlasticConfig("lstm", dim=5, rule="hebbian", alpha=2.0),
}
HEBBIAN, MODULATION = "cell/recurrent/hebbian", "cell/recurrent/modulation"
OFF = {HEBBIAN: jnp.zeros_like}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  counts = {"train": 40, "valid": 6, "test": 6}
  return tiny_masked.write_text(tmp_path_factory.mktemp("plastic") / "text", counts)


@pytest.fixture(scope="module", params=CELLS)
def workdir(request, one_device, text, tmp_path_factory):
  base = tiny_recurrent.make_experiment(text)
  model = RecurrentConfig(cell=CELLS[request.param], embedding_dim=4)
  optimizer = dataclasses.replace(load_config("cue_association").optimizer, learning_rate=0.03)
  experiment = dataclasses.replace(
    base, model=model, optimizer=optimizer, phases=(Phase(steps=30),)
  )
  place = tmp_path_factory.mktemp("runs") / request.param
  train(experiment, place, report=False)
  return place


@pytest.fixture(scope="module")
def model(workdir):
  return compmod_jax.load(workdir)


def test_training_lowers_the_loss(workdir):
  losses = [line["loss"] for line in metrics_of(workdir, "train")]
  assert losses[-1] < 0.8 * losses[0]


def test_every_hypothesis_of_a_beam_has_traces_of_its_own(model):
  """What beam search says of its texts is what reading them says."""
  prompt = "bat 0 dog"
  (found,) = model.generations([prompt], length=4, beams=3, n_best=3, length_penalty=0.0)
  assert len({one.whole for one in found}) == 3
  before = len(model.tokenizer.encode(prompt))
  for one in found:
    nll = model.score([one.whole])[0].nll[before : before + len(one.tokens)]
    assert one.score == pytest.approx(-np.sum(nll), abs=1e-4)


def test_traces_are_captured_and_edited_by_name(model):
  texts = ["bat 0 dog 2 emu 3", "cow 1"]
  found = model.capture(texts, [HEBBIAN, "cell/output"])
  assert found[HEBBIAN].shape[2:] == (5, 5)
  assert np.abs(found[HEBBIAN]).max() <= 1
  assert np.abs(found[HEBBIAN][0, -1]).max() > 0
  sites = model.sites()
  assert (MODULATION in sites) == (model.model.config.cell.rule != "hebbian")
  off = model.edit(OFF)
  assert not off.capture(texts, [HEBBIAN])[HEBBIAN].any()
  # A cell whose traces stay at zero is one whose coefficients are zero.
  params = jax.device_get(model.params)
  params["cell"]["recurrent"]["alpha"] = np.zeros((5, 5), np.float32)
  still = dataclasses.replace(model, params=params)
  for mine, its in zip(off.score(texts), still.score(texts), strict=True):
    np.testing.assert_allclose(mine.nll, its.nll, atol=1e-5)
  assert not np.allclose(off.score(texts)[0].nll, model.score(texts)[0].nll, atol=1e-5)
  assert off.generate(["bat 0"], length=3) == still.generate(["bat 0"], length=3)


def result(workdir, output, *options):
  common = ["--workdir", str(workdir), "--quiet", "--output", str(output)]
  analyse.main(["plasticity", *common, *options])
  return json.loads((output / "result.json").read_text())


def test_the_report_of_a_language_model_has_its_scores_without_traces(model, workdir, tmp_path):
  found = result(workdir, tmp_path / "out", "--split", "test", "--shown", "1")
  task, params = model.task, model.params
  whole = task.evaluate(params, "test").values
  assert found["scores"]["as trained"]["perplexity"] == pytest.approx(whole["perplexity"])
  off = task.edited(OFF).evaluate(params, "test").values
  assert found["scores"]["traces zero"]["perplexity"] == pytest.approx(off["perplexity"])
  assert off["perplexity"] != pytest.approx(whole["perplexity"], rel=1e-4)
  modulated = model.model.config.cell.rule != "hebbian"
  assert ("modulation constant" in found["scores"]) == modulated
  plots = tmp_path / "out" / "plots"
  assert {path.stem for path in plots.glob("*.png")} == {"over_time_0", "sequence_0_0"}


def test_the_report_of_associations_counts_what_cells_do(one_device, tmp_path):
  data = AssociationData(cues=4, answers=3, pairs=2, test_pairs=(2,), train=64, valid=8, test=8)
  base = load_config("cue_association")
  cell = PlasticConfig(dim=5, rule="simple", alpha=2.0, rate=0.5)
  experiment = dataclasses.replace(
    base,
    task=SequenceConfig(data, rows=16, eval_rows=8),
    model=RecurrentConfig(cell=cell, embedding_dim=4),
    phases=(Phase(steps=20),),
    evaluate_every=20,
  )
  train(experiment, tmp_path / "run", report=False)
  found = result(tmp_path / "run", tmp_path / "out", "--split", "pairs_2", "--shown", "2")
  model = compmod_jax.load(tmp_path / "run")
  batch = next(iter(model.task.dataset.eval_batches("pairs_2")))
  rows = [{name: column[row] for name, column in batch.items()} for row in range(8)]
  seen = model.capture(rows, [HEBBIAN, MODULATION])
  means = found["means"]["cell/recurrent"]
  traces = seen[HEBBIAN]
  np.testing.assert_allclose(means["size"], np.abs(traces).mean((0, 2, 3)), rtol=1e-5)
  np.testing.assert_allclose(means["drive"], seen[MODULATION].mean((0, 2)), atol=1e-6)
  changes = np.abs(np.diff(traces, axis=1, prepend=0)).mean((0, 2, 3))
  np.testing.assert_allclose(means["change"], changes, atol=1e-6)
  np.testing.assert_allclose(means["clipped"], (np.abs(traces) > 1 - 1e-6).mean((0, 2, 3)))
  tokens = (tmp_path / "out" / "tokens_0.csv").read_text()
  assert "cue 4" in tokens
  assert "answer 3" in tokens
  assert "?" in tokens
  assert any("loss is" in sentence for sentence in found["summary"])


@pytest.mark.parametrize(("joined", "layers"), [(False, 2), (True, 1)])
def test_the_report_of_fast_weights_rebuilds_them(joined, layers, one_device, text, tmp_path):
  base = tiny_masked.make_experiment(text)
  task = CausalLMConfig(
    data=base.task.data,
    tokenizer=base.task.tokenizer,
    length=17,
    batch_tokens=68,
    joined=joined,
  )
  sizes = {"dim": 8, "heads": 2, "ffn_dim": 8, "max_length": 16, "dropout": 0.0}
  decoder = DecoderConfig(decoder_layers=layers, fast_weights="modulated", **sizes)
  experiment = dataclasses.replace(
    base, task=task, model=decoder, phases=(Phase(steps=12),), evaluate_every=12
  )
  train(experiment, tmp_path / "run", report=False)
  found = result(tmp_path / "run", tmp_path / "out", "--split", "test", "--shown", "1")
  model = compmod_jax.load(tmp_path / "run")
  assert list(found["means"]) == [f"decoder/layer_{layer}/fast" for layer in range(layers)]
  assert found["scores"].keys() == {"as trained", "traces zero", "modulation constant"}
  for layer in range(layers):
    assert np.all(np.asarray(found["means"][f"decoder/layer_{layer}/fast"]["size"]) > 0)
    assert (tmp_path / "out" / "plots" / f"sequence_0_{layer}.svg").is_file()
  off = {site: jnp.zeros_like for site in model.sites() if site.endswith("/fast/written")}
  scores = model.task.edited(off).evaluate(model.params, "test").values
  assert found["scores"]["traces zero"]["loss"] == pytest.approx(scores["loss"])
  assert model.generate(["bat 0"], length=3, beams=2)


def test_a_model_without_plastic_connections_is_refused(one_device, text, tmp_path):
  base = tiny_recurrent.make_experiment(text)
  plain = RecurrentConfig(cell=LstmCellConfig(4), embedding_dim=4)
  experiment = dataclasses.replace(base, model=plain, phases=(Phase(steps=2),))
  train(experiment, tmp_path / "run", report=False)
  with pytest.raises(UserError, match="has no plastic connections"):
    result(tmp_path / "run", tmp_path / "out")


def test_models_that_are_compared_have_as_many_parameters():
  for plain, *others in (
    ("lstm", "", "hebbian", "retroactive"),
    ("transformer-plain", "transformer", "transformer-hebbian"),
  ):
    base = load_config(f"plastic_lm:{plain}")
    assert isinstance(base.task.data, GrammarDocuments)
    built = base.task.build(base.model)
    count, files = count_parameters(built), built.dataset.files()  # one tokenizer for all
    for other in others:
      experiment = load_config(f"plastic_lm:{other}" if other else "plastic_lm")
      assert experiment.task == base.task
      task = experiment.task.build(experiment.model, files=files)
      assert count_parameters(task) == pytest.approx(count, rel=0.01), other


def test_the_table_has_a_plain_lstm_and_every_rule():
  spec, cells = grid(Args("plastic_lm", scale="tiny", seeds=2))
  rules = [row.experiment.model.cell for row in spec.rows.values()]
  assert isinstance(rules[0], LstmCellConfig)
  assert [cell.rule for cell in rules[1:]] == ["hebbian", "simple", "retroactive"]
  assert len(cells) == 8
  assert {cell.experiment.time_limit_minutes for cell in cells} == {0.0}
  other, _ = grid(Args("plastic_lm", scale="ptb", seeds=1))
  assert "ptb" in next(iter(other.rows.values())).experiment.task.data.folder
  assert other.rows.keys() == spec.rows.keys()
