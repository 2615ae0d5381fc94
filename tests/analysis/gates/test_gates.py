"""Gates of small modulated models with random parameters, beside direct computation."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from compmod_jax.analysis.gates import edits as changes
from compmod_jax.analysis.gates import effects as measured
from compmod_jax.analysis.gates.maps import maps_of_texts, readable
from compmod_jax.analysis.gates.measure import Gates, collect
from compmod_jax.analysis.gates.reading import (
  ALL,
  KIND,
  PART,
  TASK,
  Tokens,
  Totals,
  categories,
  read_batch,
  spread,
)
from compmod_jax.analysis.gates.report import make_page, summary
from compmod_jax.analysis.report import page
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.data.qa.batches import blocks_of
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.tagger import Tagged
from compmod_jax.data.qa.tokenized import without_special
from compmod_jax.data.qa.unified import encode, segments
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.models.text import Text
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig

SIZES = {"vanilla_layers": 1, "modulatory_layers": 1, "output_layers": 1, "dropout": 0.0}
SIZES |= {"dim": 16, "heads": 2, "ffn_dim": 16}
PLACE = "gates/output_0/logits"
MODEL = NemotConfig(tasks=("mqa", "gqa"), gate_places=("output_0/logits",), max_length=520, **SIZES)


def random_parameters(task):
  """Parameters with which a gate is neither open nor closed, and outputs depend on the text."""

  def of_leaf(path, leaf):
    plain = {"scale": jnp.ones_like, "bias": jnp.zeros_like}
    return plain.get(path[-1].key, lambda leaf: jnp.asarray(leaf) * 0.6)(leaf)

  return jax.tree.map_with_path(of_leaf, tiny_model.random_parameters(task, 0))


@pytest.fixture(scope="module")
def subject():
  """A model that answers, and a batch of each task, padded to one length."""
  config = AnsweringConfig(
    data=Mixed((WorldsData(train=60, valid=24, test=24, shifted=12),)),
    batch_questions=6,
    length=512,
    answer_length=4,
  )
  small = dataclasses.replace(config.tokenizer, vocab_size=160)
  task = dataclasses.replace(config, tokenizer=small).build(MODEL)
  made = Subject(task, random_parameters(task), "test")
  short = [batch for batch in made.batches if batch["tokens"].shape[1] == 128]
  chosen = [
    [int(n) for b in short if f"rows/{name}" in b for n in b["index"] if n >= 0][:6]
    for name in MODEL.tasks
  ]
  assert min(map(len, chosen)) >= 3
  return dataclasses.replace(made, chosen=sorted(chosen[0] + chosen[1]))


@pytest.fixture(scope="module")
def runner(subject):
  return changes.Runner(subject)


@pytest.fixture(scope="module")
def totals(runner):
  return collect(runner)


@pytest.fixture(scope="module")
def variants(runner, totals):
  means = {site: found.means for site, found in totals.items()}
  told = changes.swaps((), runner.task, runner.config)
  return {one.name: one for one in changes.variants(runner, means, told)}


@pytest.fixture(scope="module")
def direct(subject):
  """From a batch to losses and gates of the model itself."""

  @functools.partial(jax.jit, static_argnames=("blocks",))
  def call(text, labels, gates, *, blocks):
    edits = {site: lambda _, gate=gate: gate for site, gate in gates.items()}
    intermediates = Intermediates(capture=frozenset(["gate", PLACE]), edits=edits)
    logits = subject.task.model.module.apply(
      {"params": subject.params}, text, blocks, intermediates=intermediates
    ).logits
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[
      ..., 0
    ], intermediates.captured

  def of_batch(batch, *, token="", output="", gates=None):
    tokens = jnp.asarray(batch["tokens"])
    ((own, rows),) = blocks_of(batch)
    ids = jnp.asarray([MODEL.auxiliary_ids("dec", token or own)] * rows)
    text = Text(tokens[:, :-1], ids)
    return call(text, tokens[:, 1:], gates or {}, blocks=((output or own, rows),))

  return of_batch


def question(subject, number):
  return subject.task.dataset.questions(subject.split)[0][number]


def rows_of(subject):
  """Batch, row and question of everything that the subject reads."""
  for batch in subject.batches:
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      yield batch, row, question(subject, int(batch["index"][row]))


def spelt_kinds(task, asked):
  """The kind of every token of a question but the last, from its pieces."""
  found, answered = [], False
  for piece in segments(asked):
    count = 1 if piece.kind == "special" else len(task.dataset.tokenizer.encode(piece.text))
    kind = piece.kind
    if kind == "special":
      kind = {"<p>": "marker", "<q>": "marker", "<sep>": "separator"}.get(piece.text, "label")
    found += ["answer" if answered else kind] * count
    answered |= piece.text == "<sep>"
  return found[:-1]


# Reading.


def test_means_by_kind_are_those_of_the_captured_gates(subject, totals, direct):
  values = {"gate": {}, PLACE: {}}
  gates = {id(batch): direct(batch)[1] for batch in subject.batches}
  for batch, row, asked in rows_of(subject):
    for site, found in values.items():
      gate = np.asarray(gates[id(batch)][site][row], np.float64)
      gate = gate if site == "gate" else np.exp(gate)
      for place, kind in enumerate(spelt_kinds(subject.task, asked)):
        found.setdefault(kind, []).append(gate[place])
  for site, found in values.items():
    cells = {cell.category: cell for cell in totals[site].cells(samples=100) if cell.group == KIND}
    assert set(cells) == set(found)
    for kind, rows in found.items():
      expected, cell = np.array(rows), cells[kind]
      assert cell.tokens == len(rows)
      assert cell.mean == pytest.approx(expected.mean(), rel=1e-5)
      assert cell.spread == pytest.approx(expected.std(), rel=1e-3)
      assert cell.closed == pytest.approx(np.mean(expected < 0.1), abs=1e-4)
      assert cell.open == pytest.approx(np.mean(expected > 0.9), abs=1e-4)
      bins = np.histogram(expected, 20, (0, 1))[0] / expected.size
      np.testing.assert_allclose(cell.bins, bins, atol=1e-3)
    assert cells["passage"].low <= cells["passage"].mean <= cells["passage"].high
    every = np.concatenate([np.array(rows) for rows in found.values()])
    np.testing.assert_allclose(totals[site].means, every.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(totals[site].deviations, every.std(axis=0), rtol=1e-3, atol=1e-5)
    varies = spread(totals[site])
    assert varies.channels**2 + varies.tokens**2 == pytest.approx(every.var(), rel=1e-3)


def test_parts_of_speech_are_those_of_the_whole_question(subject):
  task, tagged = subject.task, Tagged(subject.task.dataset.tokenizer)
  names = categories(task)
  assert names[PART] == PARTS_OF_SPEECH
  reads = {id(batch): read_batch(task, batch) for batch in subject.batches}
  for batch, row, asked in rows_of(subject):
    read = reads[id(batch)]
    tokenized = encode(
      asked,
      lambda text: task.dataset.tokenizer.encode(without_special(text)),
      task.dataset.question_tokenizer.special_ids,
      512,
      tag=lambda text: tagged(without_special(text)),
    )
    found = read.groups[PART][row][: tokenized.answer_start]
    assert found.tolist() == tokenized.tags[: tokenized.answer_start].tolist()
    assert names[TASK][read.groups[TASK][row][0]] == tokenized.task.strip("<>")
    assert read.counted[row].sum() == len(tokenized.ids) - 1


def test_tokens_are_shown_as_they_are_read(subject):
  tokenizer = subject.task.dataset.tokenizer
  words = [word for word in readable(tokenizer, tokenizer.encode("Annas went.")) if word != "␣"]
  assert "".join(words).replace("-", "") == "Annaswent."
  assert words[-1] == "."
  assert words[1].startswith("-")


# Changes.


def test_gates_are_removed_and_frozen_as_if_given_to_the_model(subject, runner, variants, direct):
  batch = subject.batches[0]
  plain, own = direct(batch)
  ones = {"gate": jnp.ones_like(own["gate"]), PLACE: jnp.zeros_like(own[PLACE])}
  frozen = variants["frozen at its mean"].change.filling
  means = {
    "gate": jnp.broadcast_to(frozen["gate"].reshape(1, 1, -1), own["gate"].shape),
    PLACE: jnp.broadcast_to(jnp.log(frozen[PLACE]).reshape(1, 1, -1), own[PLACE].shape),
  }
  given = {
    "as trained": own,
    "removed": ones,
    "frozen at its mean": means,
    "gate alone removed": {**own, "gate": ones["gate"]},
    f"{PLACE} alone removed": {**own, PLACE: ones[PLACE]},
  }
  for name, gates in given.items():
    losses, used = runner(batch, variants[name])
    expected, _ = direct(batch, gates=gates)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)
    assert name == "as trained" or np.abs(losses - plain).max() > 1e-3
    if name == "removed":
      assert all(bool(jnp.all(gate == 1)) for gate in used.values())


def test_a_swapped_token_is_read_by_the_neuromodulatory_set_alone(
  subject, runner, variants, direct
):
  for batch in subject.batches:
    ((own, _),) = blocks_of(batch)
    other = {"mqa": "gqa", "gqa": "mqa"}[own]
    for name, output in (("task token swapped", own), ("token and output set swapped", other)):
      losses, _ = runner(batch, variants[name])
      expected, _ = direct(batch, token=other, output=output)
      np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)


def test_swapping_twice_changes_nothing(subject, runner, variants):
  token, both = (variants[n] for n in ("task token swapped", "token and output set swapped"))
  np.testing.assert_array_equal(token.change.ids[token.change.ids], np.arange(len(MODEL.auxiliary)))
  batch = subject.batches[0]
  once = changes.relabelled(batch, both.run_as)
  assert once.keys() != batch.keys()
  assert changes.relabelled(once, both.run_as).keys() == batch.keys()
  # The token of a question that is run as another task's is swapped back to its own.
  _, gates = runner(batch, both._replace(change=token.change))
  _, plain = runner(batch, runner.trained)
  np.testing.assert_array_equal(gates["gate"], plain["gate"])


# Effects.


def test_effects_are_differences_of_mean_losses_of_answers(subject, runner, variants, direct):
  some = [variants["as trained"], variants["task token swapped"]]
  losses = measured.measure_losses(runner, some)
  totals = np.zeros((2, 2))
  for batch in subject.batches:
    other = {"mqa": "gqa", "gqa": "mqa"}[blocks_of(batch)[0][0]]
    found = [direct(batch)[0], direct(batch, token=other)[0]]
    for row in np.flatnonzero(batch["index"] >= 0).tolist():
      asked = question(subject, int(batch["index"][row]))
      # Token n + 1 is predicted at position n; in multiple choice only the label counts.
      first = spelt_kinds(subject.task, asked).index("separator")
      count = 1 if asked.options else len(subject.task.dataset.tokenizer.encode(asked.answer)) + 1
      for side in (0, 1):
        totals[side] += float(found[side][row, first : first + count].sum()), count
  means = totals[:, 0] / totals[:, 1]
  effects = {(e.variant, e.part): e for e in measured.effects(losses, None, seed=0, samples=200)}
  assert effects["as trained", "all"].loss == pytest.approx(means[0], rel=1e-4)
  assert effects["as trained", "all"].loss_change is None
  change = effects["task token swapped", "all"].loss_change.difference
  assert change.value == pytest.approx(means[1] - means[0], rel=1e-3, abs=1e-5)
  assert change.low <= change.value <= change.high
  assert losses.moved["as trained"] == {"gate": 0.0, PLACE: 0.0}
  assert losses.moved["task token swapped"]["gate"] > 0


def test_answers_that_most_changes_change_come_first():
  asked = [Question("yes_no", f"{n}?", answers=("yes",)) for n in "abc"]
  outputs = {"as trained": ["no", "no", "yes"], "x": ["no", "yes", "?"], "y": ["no", "no", "no"]}
  scores = {name: np.array([float(o == "yes") for o in found]) for name, found in outputs.items()}
  answers = measured.Answers(np.array([4, 7, 9]), asked, outputs, scores)
  assert measured.most_changed(answers, 20).numbers.tolist() == [9, 7]
  nats = {name: np.ones(3) for name in outputs}
  losses = measured.Losses(np.array(["gqa"] * 3), np.ones(3), nats, {})
  effect = measured.effects(losses, answers, seed=0, samples=100)[1]
  assert effect.score == pytest.approx(100 / 3)
  assert effect.changed == pytest.approx(200 / 3)
  assert effect.malformed == pytest.approx(100 / 3)
  assert effect.score_change.difference.value == pytest.approx(0)


# The report.


def page_of(settings, subject):
  return make_page(settings, subject, settings.measure(subject))


def test_the_report_of_a_model_that_answers(subject):
  batch = next(batch for batch in subject.batches if "rows/gqa" in batch)
  chosen = batch["index"].tolist()
  records = [{"kind": "train", "step": s, "gate/mean": 0.5, "gate/closed": 0.1 * s} for s in (1, 2)]
  some = dataclasses.replace(subject, records=records, chosen=chosen)
  first = question(subject, chosen[0])
  typed = f"{first.passage} | {first.question}"
  made = page_of(Gates(text=(typed,), task=("gqa=mqa",), decode=5, samples=100), some)
  every = [item for section in made.sections for item in section.items]
  items = {item.name: item for item in every if not isinstance(item, page.Sample)}
  assert set(items) >= {"map_0_gate", "groups_gate", "histogram_gate", "channels", "places"}
  assert {"training", "effects", "effects_gates", "effects_tokens"} <= set(items)
  axes = {panel.get_title("left"): panel for panel in items["effects_gates"].figure.axes}
  units = {"score": "change, points", "loss": "change, nats per token"}
  assert {title: panel.get_xlabel() for title, panel in axes.items()} == units
  assert [effect["questions"] for effect in made.data["effects"]] == [5] * 7
  kinds = [row[2] for row in items["map_0"].rows if row[4] == "gate"]
  assert kinds[0] == "marker"
  assert {"passage", "question", "separator"} <= set(kinds)
  assert items["map_0_gate"].caption.startswith("The model answers")
  # What is decoded under a change is what an edited task decodes.
  table = items["changed"]
  trained, removed = (table.columns.index(name) for name in ("as trained", "removed"))
  asked = [question(subject, row[0]) for row in table.rows]
  edited = subject.task.edited({"gate": jnp.ones_like, PLACE: jnp.zeros_like})
  expected = edited.generator(edited.model, subject.params, asked)
  assert [row[removed] for row in table.rows] == [best[0].text or "(nothing)" for best in expected]
  assert any(row[removed] != row[trained] for row in table.rows)
  (first, *_) = (item for item in every if isinstance(item, page.Sample))
  assert ("right", table.rows[0][2]) in first.entries


def test_a_category_in_few_texts_has_its_mean_and_no_interval():
  numbers, names = np.arange(40), ("often", "rare")
  totals = Totals({KIND: names, ALL: ("all",)}, numbers, 2)
  rng, counted = np.random.default_rng(0), np.ones((40, 20), bool)
  kinds = np.zeros((40, 20), np.int64)
  kinds[:3, :12] = 1  # 36 tokens in 3 texts: resampled sets of texts without any are common
  gate = rng.uniform(size=(40, 20, 2)).astype(np.float32)
  totals.add(jnp.asarray(gate), Tokens(counted, {KIND: kinds, ALL: 0 * kinds}), numbers)
  cells = {cell.category: cell for cell in totals.cells()}
  assert (cells["rare"].texts, cells["often"].texts, cells["all"].texts) == (3, 40, 40)
  assert cells["rare"].mean == pytest.approx(gate[:3, :12].mean(), rel=1e-5)
  assert cells["often"].low < cells["often"].mean < cells["often"].high
  (sentence,) = [s for s in summary({"gate": [*cells.values()]}, {"gate": totals}) if "by" in s]
  assert "3 texts: no interval" in sentence
  assert "nan" not in sentence


def test_a_summary_of_few_texts_has_no_intervals_and_no_nan(subject):
  few = dataclasses.replace(subject, chosen=subject.chosen[:4])
  made = page_of(Gates(maps=0, decode=3, samples=100), few)
  text = " ".join(made.summary)
  assert "nan" not in text
  assert "texts: no interval" in text
  assert "nats per token (4 examples: no interval)" in text
  assert "points (3 examples: no interval)" in text
  assert "p =" not in text


def test_the_report_of_a_language_model(tmp_path):
  rng = np.random.default_rng(0)
  for split, count in (("train", 40), ("valid", 9)):
    lines = [" ".join(rng.choice(["dog", "cat", "sees", "the"], 5)) for _ in range(count)]
    (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
  data = TextDocuments(
    folder=str(tmp_path), train=("train.txt",), valid=("valid.txt",), unit="line"
  )
  words = TokenizerConfig(kind="words", vocab_size=20)
  config = CausalLMConfig(data=data, tokenizer=words, length=13, batch_tokens=52, stride=5)
  task = config.build(NemotConfig(max_length=16, **SIZES))
  subject = Subject(task, random_parameters(task), "valid")
  made = page_of(Gates(maps=1, samples=100), subject)
  values = task.evaluate(subject.params, "valid").values
  assert made.data["effects"][0]["loss"] == pytest.approx(values["loss"], rel=1e-5)
  names = [effect["variant"] for effect in made.data["effects"]]
  assert names == ["as trained", "frozen at its mean", "removed"]
  cells = {cell["category"]: cell["tokens"] for cell in made.data["gates"]["gate"]}
  assert cells["all"] == values["tokens"]
  assert cells["end of document"] == cells["special"] == 9
  written = page.write(made, tmp_path / "report")
  names = {path.name for path in (*written.tables, *written.pictures)}
  assert names >= {"groups.csv", "map_0.csv", "map_0_gate.png", "effects_gates.svg"}
  assert json.loads(written.json.read_text())["gates"]["gate"][0]["tokens"] == cells["all"]
  assert "frozen at its mean" in written.html.read_text()
  runner = changes.Runner(subject)
  (drawn,) = maps_of_texts(runner, ("the dog sees",))
  assert drawn.words == ["</s>", "the", "dog", "sees"]
  assert drawn.parts == ["special", "other", "noun", "verb"]
  with pytest.raises(UserError, match="positions for 16"):
    maps_of_texts(runner, ("the " * 20,))


# Mistakes.


def test_models_without_a_gate_and_unknown_tasks_are_refused(subject, runner):
  off = dataclasses.replace(MODEL, gate="off", gate_places=())
  task = subject.task.dataset.config.build_with(off, subject.task.dataset.tokenizer)
  with pytest.raises(UserError, match="has no gate"):
    Gates().measure(Subject(task, {}, "test"))
  with pytest.raises(UserError, match="task of --task is 'mc'"):
    changes.swaps(("mc=gqa",), runner.task, runner.config)
  with pytest.raises(UserError, match="give TASK=OTHER"):
    changes.swaps(("mqa",), runner.task, runner.config)
  assert changes.swaps(("mqa=gqa",), runner.task, runner.config) == {"mqa": "gqa"}
  with pytest.raises(UserError, match="--maps is -1"):
    Gates(maps=-1)
