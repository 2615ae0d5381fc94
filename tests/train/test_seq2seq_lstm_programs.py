"""The sequence-to-sequence LSTM through what works on any model of translations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_model

import compmod_jax
from compmod_jax.analysis.roles.measure import KINDS
from compmod_jax.analysis.subject import Subject
from compmod_jax.commands import analyse
from compmod_jax.commands.options import ModelArgs, open_model
from compmod_jax.core.errors import UserError
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.seq2seq_lstm import Seq2SeqLstmConfig
from compmod_jax.training.experiment import load_config
from compmod_jax.training.step import init_state, make_step

pytestmark = pytest.mark.usefixtures("one_device")
SIZES = {"dim": 16, "embedding_dim": 16, "attention_dim": 16, "max_length": 48}
RECODED = Seq2SeqLstmConfig(**SIZES, recoding=RecodingConfig("nll", size=0.5))
LINES = ["der hund schläft", "", "die katze sieht einen vogel"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  return tiny_model.make_workdir(tmp_path_factory.mktemp("lstm") / "run", RECODED)


@pytest.fixture(scope="module")
def model(workdir):
  return compmod_jax.load(workdir)


def test_training_with_recoding_lowers_the_loss_and_moves_every_parameter(tmp_path):
  given = tiny_model.make_experiment(tiny_model.write_data(tmp_path / "data"))
  task = given.task.build(RECODED)
  params, optimizer = nn.unbox(jax.jit(task.model.init)(jax.random.key(0))), optax.adam(1e-2)
  options = {
    "micro_batches": 1,
    "ema": 0.0,
    "mask": jax.tree.map(lambda _: True, params),
  }
  step = jax.jit(make_step(task, optimizer, lambda _: jnp.float32(0.01), **options))
  state, losses = init_state(params, (), optimizer, 0.0), []
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  for _ in range(30):
    state, metrics = step(state, next(batches), jax.random.key(0))
    losses.append(float(metrics["objective"]))
  assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
  moved = jax.tree.map(lambda old, new: bool((old != new).any()), params, state.params)
  assert all(jax.tree.leaves(moved))


def test_a_translation_is_as_probable_as_its_score_in_the_search_says(model):
  """Blank lines have theirs, too."""
  found = [best for (best, *_) in model.hypotheses(LINES)]
  assert found[1].text == ""
  pairs = [(line, one.text) for line, one in zip(LINES, found, strict=True) if line]
  again = [model.task.generator.scorer.encode([pair])[1][0] for pair in pairs]
  kept = [one for one in found if one.text]
  # Of words that are read again as they were written.
  same = [list(one.tokens) == list(tokens) for one, tokens in zip(kept, again, strict=True)]
  assert any(same)
  for one, score, counts in zip(kept, model.score(pairs), same, strict=True):
    if counts:
      assert score.log_probability / len(one.tokens) == pytest.approx(one.score, abs=1e-4)


def test_recoding_may_differ_from_training_or_be_left_out(model, workdir):
  pairs = [(LINES[0], "the dog sleeps")]

  def log_probability(*fields):
    opened = open_model(ModelArgs(workdir=workdir, recoding=fields)).model
    return opened.score(pairs)[0].log_probability

  recoded, still, plain = (log_probability(one) for one in ("size=0.5", "size=0.0", "signal=none"))
  assert recoded == pytest.approx(model.score(pairs)[0].log_probability, abs=1e-5)
  assert still == pytest.approx(plain, abs=1e-5)
  assert abs(recoded - plain) > 1e-3
  with pytest.raises(UserError, match=r"recoding\.share is 0\.5"):
    log_probability("share=0.5")


def test_additive_attention_is_drawn_as_a_module_of_one_head(model):
  pair = (LINES[0], "the dog sleeps")
  (figure,) = model.attention_pictures(pair).values()
  panel = figure.axes[0]
  shown = [label.get_text() for label in panel.get_xticklabels()]
  assert shown[:3] == LINES[0].split()
  weights = model.capture([pair], ["decoder/cross/attention"])["decoder/cross/attention"]
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
  (mesh, *_) = panel.collections
  np.testing.assert_allclose(np.asarray(mesh.get_array()), weights[0, 0], atol=1e-6)


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("heads", "neither heads nor experts"),
    ("ablate", "neither heads nor experts"),
    ("gates", "has no gate"),
    ("traces", "no recurrent language model"),
    ("probe", "no recurrent language model"),
  ],
)
def test_what_it_does_not_have_is_not_analysed(model, name, words):
  given = {"text": ("the dog sleeps",)} if name == "traces" else {}
  options = analyse.ANALYSES[name].options(**given)
  with pytest.raises(UserError, match=words):
    options.measure(Subject(model.task, model.params, "test"))


def test_where_its_attention_looks_is_measured_though_it_has_no_heads_to_weigh(model):
  subject = Subject(model.task, model.params, "test", sentences=4)
  settings = analyse.ANALYSES["roles"].options(untrained=False)
  found = settings.measure(subject)
  (look,) = found.halves[0].looks.values()
  assert look.module.name == "decoder/cross"
  assert sum(look.weight(kind)[0] for kind in KINDS) == pytest.approx(1, abs=1e-5)
  assert 0 <= look.entropy[0] <= look.most_entropy
  assert (found.importance, found.spectra) == ([], {})
  made = analyse.ANALYSES["roles"].make_page(settings, subject, found)
  assert made.data["modules"]["decoder/cross"]["heads"] == 1


@pytest.mark.parametrize("variant", ["", "recoding", "tatoeba", "debug"])
def test_every_variant_is_of_this_model_and_one_is_recoded(variant):
  given = load_config(f"configs/nmt_lstm.py:{variant}" if variant else "configs/nmt_lstm.py")
  assert isinstance(given.model, Seq2SeqLstmConfig)
  assert given.model.recoding.active == (variant == "recoding")
