"""Few-shot classification of texts: methods on an encoder, masked pre-training, end to end."""

import dataclasses
import functools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compmod_jax
from compmod_jax.core.errors import UserError
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.episodes import split_episode
from compmod_jax.data.sources.classes import ClassLines
from compmod_jax.data.text_classes import TextLines
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.mechanisms.competition import CompetitionConfig
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.base import StepContext
from compmod_jax.tasks.few_shot import (
  BlackBox,
  FewShotConfig,
  FineTune,
  Leopard,
  Maml,
  Matching,
  Prototypes,
)
from compmod_jax.tasks.few_shot_text import FewShotTextConfig
from compmod_jax.training.step import gradients

CONTEXT = StepContext(jax.random.key(0), jnp.int32(0), True)
MODEL = EncoderConfig(
  encoder_layers=1, dim=8, heads=2, ffn_dim=12, max_length=12, norm="pre", dropout=0.0,
  attention_dropout=0.0,
)  # fmt: skip
EPISODES = ClassEpisodeConfig(ways=2, shots=2, queries=2, batch=2)
LAYERS = ("encoder_*", "output_norm")
METHODS = {
  "leopard": Leopard(dim=4, hidden=6, parameters=LAYERS),
  "whole support": Leopard(dim=4, hidden=6, subsets=1, steps=2, parameters=()),
  "first order": Leopard(dim=4, hidden=6, first_order=True),
  "black box": BlackBox(context=3, hidden=6),
  "prototypes": Prototypes(),
  "matching": Matching(),
  "maml": Maml(learned="parameter"),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
  """A class is the texts that hold one of a few words of its own."""
  folder, random = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
  number = 0
  for split, count in (("train", 6), ("valid", 4), ("test", 4)):
    found = []
    for _ in range(count):
      own = [f"w{number + i}" for i in range(2)]
      number += 2
      for _ in range(6):
        words = [*random.choice(["a", "b", "c", "d"], 3), random.choice(own)]
        text = " ".join(random.permutation(words))
        found.append(json.dumps({"class": f"of {own[0]}", "text": text}))
    (folder / f"{split}.jsonl").write_text("\n".join(found))
  return TextLines(str(folder))


def config(lines, **fields):
  given = {
    "data": lines,
    "tokenizer": TokenizerConfig(kind="words", vocab_size=60),
    "length": 8,
    "episodes": EPISODES,
    "evaluate_episodes": 6,
  }
  return FewShotTextConfig(**(given | fields))


@functools.cache
def built(lines, **fields):
  task = config(lines, **fields).build(MODEL)
  batch = next(task.dataset.train_batches(seed=0, multiple=1)[0])
  batch = {name: jnp.asarray(column) for name, column in batch.items()}
  return task, fresh(lines, fields["method"]), batch


@functools.cache
def fresh(lines, method):
  """Parameters, which depend on the method alone."""
  init = config(lines, method=method).build(MODEL).model.init
  return nn.unbox(jax.jit(init)(jax.random.key(1)))


@functools.cache
def compiled(task, micro_batches):
  return jax.jit(
    lambda params, batch: gradients(task.loss, params, (), batch, CONTEXT, micro_batches)
  )


def slopes_of(task, params, batch, micro_batches=1):
  return compiled(task, micro_batches)(params, batch)


def moved(slopes):
  """Names, by their first two parts, of the parameters that have a gradient."""
  found = jax.tree_util.tree_leaves_with_path(slopes)
  return {
    "/".join(str(key.key) for key in path[:2]) for path, leaf in found if np.abs(leaf).max() > 0
  }


@pytest.mark.parametrize(
  ("method", "groups"), [*((name, (1, 1)) for name in METHODS), ("leopard", (0, 2))]
)
def test_groups_of_tasks_and_micro_batches_give_the_gradient_of_all_together(lines, method, groups):
  found = []
  for at_once, micro_batches in ((0, 1), groups):
    task, params, batch = built(lines, method=METHODS[method], tasks_at_once=at_once)
    slopes, value, _, _, metrics = slopes_of(task, params, batch, micro_batches)
    found.append((slopes, value, metrics["nll"], metrics["accuracy"]))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), *found)


def test_all_of_leopard_learns_outside_step_sizes_too(lines):
  task, params, batch = built(lines, method=METHODS["leopard"])
  assert {*params["step_sizes"]["layers"]} == {"encoder_0", "output_norm"}
  found = moved(slopes_of(task, params, batch)[0])
  wanted = {"leopard/generator", "leopard/reader", "step_sizes/layers", "step_sizes/reader"}
  assert wanted | {"step_sizes/softmax", "encoder_0/self_attention", "embedding/table"} <= found
  assert not {name for name in found if name.startswith("head/")}  # of masked tokens


def test_the_order_of_the_classes_of_an_episode_does_not_matter(lines):
  """Logits go with the classes, whatever their numbers, for methods without a head of their own."""
  for name in ("leopard", "black box", "prototypes"):
    task, params, batch = built(lines, method=METHODS[name])
    model, episode = task.model, {k: x[0] for k, x in batch.items()}
    support, query = split_episode(episode, EPISODES.support)
    run = jax.jit(
      lambda s, q, model=model, p=params: model.method.logits(model.embed, p, s, q, 2, False)
    )
    swapped = {k: jnp.concatenate([x[2:], x[:2]]) for k, x in support.items()}
    swapped["labels"] = support["labels"]
    np.testing.assert_allclose(
      run(swapped, query)[:, ::-1], run(support, query), rtol=1e-3, atol=1e-5
    )


def test_padding_does_not_change_features(lines):
  short, params, _ = built(lines, method=Prototypes())
  long = config(lines, method=Prototypes(), length=12).build(MODEL)
  found = [
    jax.jit(task.model.embed)(params, jnp.asarray(task.dataset.tokens(["a b", "w1 a c d"])))
    for task in (short, long)
  ]
  np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_several_numbers_of_classes_are_trained_and_scored_with_the_same_parameters(lines):
  task, params, batch = built(
    lines, method=METHODS["leopard"], mixed_ways=(3, 2), also_ways=(3, 4), also_shots=(4,)
  )
  assert batch["index"].shape[1] == 3 * 4
  assert np.isfinite(slopes_of(task, params, batch)[1])
  found = task.evaluate(params, "test").values
  assert {"accuracy", "3_way/accuracy", "4_way/accuracy", "4_shot/accuracy"} <= {*found}
  assert found["episodes"] == found["4_way/episodes"] == 6


def test_filler_episodes_change_nothing(lines):
  task, params, batch = built(lines, method=METHODS["leopard"])
  more = {k: jnp.concatenate([x, jnp.full_like(x, -(k == "index"))]) for k, x in batch.items()}
  found, other = (slopes_of(task, params, one)[:2] for one in (batch, more))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, other)


# Masked language modelling.


def test_fine_tuning_trains_masked_tokens_and_no_classes(lines):
  task, params, batch = built(lines, method=FineTune())
  found = slopes_of(task, params, batch)
  assert {"head/transform", "encoder_0/self_attention", "embedding/table"} <= moved(found[0])
  other = {**batch, "labels": 1 - batch["labels"]}
  np.testing.assert_array_equal(slopes_of(task, params, other)[1], found[1])
  filler = {k: jnp.concatenate([x, jnp.full_like(x, -(k == "index"))]) for k, x in batch.items()}
  np.testing.assert_allclose(slopes_of(task, params, filler)[1], found[1], rtol=1e-5)


def test_masked_tokens_are_trained_beside_episodes_where_they_have_a_weight(lines):
  task, params, batch = built(lines, method=METHODS["leopard"], masked=0.5)
  slopes, value, terms, _, _ = slopes_of(task, params, batch)
  assert {"head/transform", "leopard/reader"} <= moved(slopes)
  episodes = built(lines, method=METHODS["leopard"])[0]
  alone = slopes_of(episodes, params, batch)[1]
  masked = terms["masked/cross_entropy"].value()
  np.testing.assert_allclose(value, alone + 0.5 * masked, rtol=1e-4)


STEPS = FineTune(rates=(1e-4, 0.05), steps=(1, 6), choose_on=5)


@pytest.mark.parametrize("method", [STEPS, Leopard(dim=4, hidden=6, tuned=STEPS)])
def test_fine_tuning_is_scored_at_what_is_best_on_validation_classes(lines, method):
  task, params, _ = built(lines, method=method)
  found = task.evaluate(params, "test").values
  model, accuracies = task.model, {}
  run = jax.jit(
    lambda support, query, rate: method.trajectory(model.embed, params, support, query, 2, rate)
  )

  def score(split, count):
    """(rate, number of steps) -> accuracies of the split's episodes."""
    sums = {}
    for batch in task.dataset.episodes(split, count=count):
      for i in range(len(batch["index"])):
        if batch["index"][i, 0] >= 0:
          episode = {name: jnp.asarray(column[i]) for name, column in batch.items()}
          support, query = split_episode(episode, EPISODES.support)
          for rate in STEPS.rates:
            logits = run(support, query, rate)
            for number, steps in enumerate(STEPS.steps):
              right = np.mean(np.argmax(logits[number], -1) == query["labels"])
              sums.setdefault((rate, steps), []).append(right)
    return sums

  valid = {key: np.mean(value) for key, value in score("valid", 5).items()}
  accuracies = score("test", 6)
  chosen = found["fine_tuning/step_size"], found["fine_tuning/steps"]
  assert valid[chosen] == pytest.approx(max(valid.values()))
  assert found["accuracy"] == pytest.approx(np.mean(accuracies[chosen]), abs=1e-6)
  assert task.metric == "accuracy"


def test_fine_tuning_of_leopard_starts_where_its_own_steps_end(lines):
  """From the generated and adapted layer, and it is left out in training."""
  plain = METHODS["leopard"]
  tuned = dataclasses.replace(plain, tuned=FineTune(rates=(1e-7,), steps=(1, 3)))
  task, params, batch = built(lines, method=plain)
  episode = {name: x[0] for name, x in batch.items()}
  support, query = split_episode(episode, EPISODES.support)

  def logits(method, train):
    run = jax.jit(lambda: method.logits(task.model.embed, params, support, query, 2, train))
    return run()

  expected = logits(plain, False)
  np.testing.assert_array_equal(logits(tuned, True), logits(plain, True))
  np.testing.assert_allclose(logits(tuned, False), expected, atol=1e-4)
  large = dataclasses.replace(plain, tuned=FineTune(rates=(0.1,), steps=(3,)))
  assert np.abs(logits(large, False) - expected).max() > 0.1


# Mistakes.


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"method": Leopard(subsets=2), "also_shots": (3,)}, r"subsets is 2, but a support has 3"),
    ({"method": Maml(), "also_ways": (3,)}, r"asks for \[3\] classes, but the head of MAML"),
    ({"mixed_ways": (1, 2)}, r"task.mixed_ways is \(1, 2\) .* an episode has 2 classes"),
    ({"masked": -1.0}, r"task.masked is -1.0; it must not be negative"),
    ({"length": 2}, r"task.length is 2; it must be at least 3"),
  ],
)
def test_bad_tasks_name_their_field(lines, fields, words):
  with pytest.raises(UserError, match=words):
    config(lines, **fields)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: Leopard(subsets=0), r"method.subsets is 0; it must be at least 1"),
    (lambda: Leopard(rate=0.0), r"method.rate is 0.0; it must be positive"),
    (lambda: BlackBox(context=0), r"method.context is 0; it must be at least 1"),
    (lambda: FineTune(rates=()), r"method.rates is \(\); give one step size"),
    (lambda: FineTune(steps=(5, 2)), r"method.steps is \(5, 2\); give ascending"),
    (lambda: FineTune(optimizer="adagrad"), r"method.optimizer is 'adagrad'"),
    (lambda: FineTune(choose_on=0), r"method.choose_on is 0"),
  ],
)
def test_bad_methods_name_their_field(make, words):
  with pytest.raises(UserError, match=words):
    make()


@pytest.mark.parametrize(
  ("model", "words"),
  [
    (ConvNetConfig(), r"needs an encoder"),
    (dataclasses.replace(MODEL, max_length=4), r"task.length is 8 but model.max_length is 4"),
    (
      dataclasses.replace(
        MODEL, compete=("encoder_self",), competition=CompetitionConfig(balance=0.1)
      ),
      r"routers with losses of their own",
    ),
  ],
)
def test_a_model_that_does_not_fit_is_refused(lines, model, words):
  with pytest.raises(UserError, match=words):
    config(lines).build(model)


def test_a_pattern_of_no_parameter_is_refused_before_training(lines):
  with pytest.raises(UserError, match=r"method.parameters has 'encoder_7"):
    config(lines, method=Leopard(parameters=("encoder_7",))).build(MODEL)
  with pytest.raises(UserError, match=r"method.tuned.parameters has 'encoder_7"):
    config(lines, method=Leopard(tuned=FineTune(parameters=("encoder_7",)))).build(MODEL)


def test_pictures_refuse_steps_that_they_would_not_choose():
  with pytest.raises(UserError, match=r"method.tuned is set, but the scores of pictures"):
    FewShotConfig(method=Leopard(subsets=1, tuned=FineTune()))


# Other models and programs.


def test_leopard_and_a_black_box_also_learn_pictures(tmp_path):
  random = np.random.default_rng(0)
  for split in ("train", "valid", "test"):
    rows = [
      json.dumps({"class": f"{split}{c}", "input": random.normal(size=(4, 4, 1)).tolist()})
      for c in range(3)
      for _ in range(4)
    ]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
  for method in (METHODS["first order"], BlackBox(context=3, hidden=6)):
    task = FewShotConfig(
      data=ClassLines(str(tmp_path)), episodes=EPISODES, method=method, train_ways=3
    ).build(ConvNetConfig(blocks=1, filters=4))
    batch = next(task.dataset.train_batches(seed=0, multiple=1)[0])
    params = nn.unbox(jax.jit(task.model.init)(jax.random.key(1)))
    slopes = slopes_of(task, params, {k: jnp.asarray(x) for k, x in batch.items()})[0]
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes))


OWN = """
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.text_classes import TextLines
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.models.encoder import EncoderConfig
from compmod_jax.tasks.few_shot import FineTune, Leopard
from compmod_jax.tasks.few_shot_text import FewShotTextConfig
from compmod_jax.training.experiment import Experiment, Phase

def get_config(variant):
  tuned = variant == "fine_tune"
  method = FineTune(rates=(0.01,), steps=(2,)) if tuned else Leopard(dim=4, hidden=6)
  return Experiment(
    name="own texts",
    task=FewShotTextConfig(
      data=TextLines({folder!r}),
      tokenizer=TokenizerConfig(kind="words", vocab_size=60),
      length=8,
      episodes=ClassEpisodeConfig(ways=2, shots=2, queries=2, batch=2),
      method=method,
      evaluate_episodes=4,
    ),
    model=EncoderConfig(
      encoder_layers=1, dim=8, heads=2, ffn_dim=12, max_length=12, norm="pre", dropout=0.0,
      attention_dropout=0.0,
    ),
    phases=(Phase(steps=4),),
    start="" if tuned else {start!r},
    evaluate_every=2,
    checkpoint_every=1,
    watch_sentences=0,
  )
"""


@pytest.mark.usefixtures("one_device")
def test_a_run_starts_from_the_masked_language_model_and_tells_classes_of_one_s_own(
  lines, tmp_path
):
  from compmod_jax.commands.train import main
  from compmod_jax.training.warm_start import Start

  file, first = tmp_path / "own.py", tmp_path / "first"
  file.write_text(OWN.format(folder=lines.folder, start=str(first)))
  main(["--config", f"{file}:fine_tune", "--workdir", str(first)])
  main(["--config", str(file), "--workdir", str(tmp_path / "whole")])
  whole = compmod_jax.load(tmp_path / "whole", model="step-00000004")
  assert {"leopard", "step_sizes"} <= {*whole.params}
  before = compmod_jax.load(first)
  assert whole.task.dataset.files() == before.task.dataset.files()
  random = nn.unbox(jax.jit(whole.task.model.init)(jax.random.key(0)))
  merged, _ = Start(first).merged(random, whole.task.model.config)
  jax.tree.map(np.testing.assert_array_equal, merged["encoder_0"], before.params["encoder_0"])
  # Resumed to the same bits.
  again = shutil.copytree(tmp_path / "whole", tmp_path / "again")
  for step in (3, 4):
    shutil.rmtree(next((again / "checkpoints").glob(f"step_{step:08}*")))
  shutil.rmtree(again / "models")
  main(["--config", str(file), "--workdir", str(again)])
  other = compmod_jax.load(again, model="step-00000004")
  jax.tree.map(np.testing.assert_array_equal, whole.params, other.params)
  # Its use from Python.
  texts = ["w1 a", "b w2", "c w1 a", "d w2"]
  labels = np.array([0, 1, 0, 1])
  found = whole.classify(texts, labels, ["a w1"])
  assert found.shape == (1, 2)
  np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
  three = whole.classify([*texts, "a w3", "b w4"], np.array([0, 1, 0, 1, 2, 2]), ["a w1"])
  assert three.shape == (1, 3)
  with pytest.raises(UserError, match=r"labels has \[3, 1\] examples of the classes"):
    whole.classify(texts, np.array([0, 0, 0, 1]), ["a w1"])
  with pytest.raises(UserError, match="no example of class 1, but of class 2"):
    whole.classify(texts, np.array([0, 0, 2, 2]), ["a w1"])
  with pytest.raises(UserError, match=r"support is 'a text'; give a list"):
    whole.classify("a text", labels, ["a w1"])
  assert {"features", "encoder/output"} <= {*whole.sites()}
  captured = whole.capture(texts, ["features", "encoder/output"])
  assert captured["features"].shape == (4, 8)
  assert captured.words("encoder/output")[0][1:3] == ["w1", "a"]
  assert captured.valid("encoder/output").sum(1).tolist() == [4, 4, 5, 4]
