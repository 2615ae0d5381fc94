"""The table of baselines: what a trained model must be better than."""

import json
from pathlib import Path

import numpy as np
import pytest

from compmod_jax.analysis.nearest_examples import nearest_means
from compmod_jax.commands import baselines
from compmod_jax.core.errors import UserError
from compmod_jax.data.class_episodes import ClassEpisodeConfig
from compmod_jax.data.qa.question import FORMATS
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.synthetic.grammar import GrammarData

CONFIG = """
import dataclasses
from configs.nmt_cah import get_config as original
from compmod_jax.data.sources.text import TextData

def get_config(variant):
  experiment = original("")
  task = dataclasses.replace(experiment.task, data=TextData(folder={folder!r}))
  return dataclasses.replace(experiment, task=task)
"""


QUESTIONS = """
import dataclasses
from configs.nemot_qa import get_config as original
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.synthetic.worlds import WorldsData

def get_config(variant):
  experiment = original("")
  worlds = WorldsData(train=600, valid=12, test=120, shifted=24)
  task = dataclasses.replace(experiment.task, data=Mixed(seeds=(worlds,)))
  return dataclasses.replace(experiment, task=task)
"""


@pytest.fixture
def data(tmp_path) -> TextData:
  train = [
    ("der hund sieht die katze", "the dog sees the cat"),
    ("die katze sieht den hund", "the cat sees the dog"),
    ("der vogel singt ein altes lied", "the bird sings an old song"),
  ]
  for split, pairs in (("train", train), ("valid", train[:1]), ("test", [train[2], train[0]])):
    for side, language in enumerate(("de", "en")):
      lines = [pair[side] for pair in pairs]
      (tmp_path / f"{split}.{language}").write_text("\n".join(lines) + "\n")
  return TextData(folder=str(tmp_path))


def test_the_program_prints_and_writes_both_baselines(data, tmp_path, capsys):
  config, path = tmp_path / "config.py", tmp_path / "scores.json"
  config.write_text(CONFIG.format(folder=data.folder))
  baselines.main(["--config", str(config), "--split", "test", "--json", str(path)])
  printed = capsys.readouterr().out
  rows = json.loads(path.read_text())["rows"]
  assert [row["baseline"] for row in rows] == [
    "word by word, learnt dictionary",
    "nearest training sentence",
  ]
  assert {row["split"] for row in rows} == {"test"}
  assert rows[1]["exact_match"] == 100  # every test sentence is a training sentence here
  assert rows[1]["bleu"] == pytest.approx(100)
  lines = printed.splitlines()
  assert lines[0].split()[:3] == ["baseline", "split", "sentences"]
  assert lines[3].startswith("nearest training sentence        test")
  assert "100.00 %" in lines[3]
  assert "tok:13a" in printed


FEW_SHOT = """
import dataclasses
from configs.few_shot_prototypes import get_config as original
from compmod_jax.data.synthetic.glyphs import GlyphData

def get_config(variant):
  experiment = original("5shot")
  task = dataclasses.replace(
    experiment.task, data=GlyphData(examples=10), also_ways=(3,), evaluate_episodes=20
  )
  return dataclasses.replace(experiment, task=task)
"""


def test_raw_examples_are_a_baseline_of_few_shot_classification(tmp_path, capsys):
  config, path = tmp_path / "config.py", tmp_path / "scores.json"
  config.write_text(FEW_SHOT)
  baselines.main(["--config", str(config), "--json", str(path)])
  rows = json.loads(path.read_text())["rows"]
  assert [(row["split"], row["ways"]) for row in rows] == [
    ("valid", 5), ("valid", 3), ("test", 5), ("test", 3),
  ]  # fmt: skip
  assert {row["episodes"] for row in rows} == {20}
  for row in rows:
    assert 1 / row["ways"] < row["accuracy_low"] < row["accuracy"] < row["accuracy_high"]
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[:5] == ["baseline", "split", "ways", "episodes", "accuracy"]
  assert f"{100 * rows[0]['accuracy']:.1f}" in lines[2]


def test_a_query_is_of_the_class_whose_mean_is_nearest():
  episodes = ClassEpisodeConfig(ways=3, shots=2, queries=4)
  random = np.random.default_rng(0)
  inputs = random.normal(size=(episodes.rows, 2, 3)) + 100
  means = [inputs[2 * n : 2 * n + 2].mean(axis=0) for n in range(3)]
  expected = [min(range(3), key=lambda n: np.linalg.norm(query - means[n])) for query in inputs[6:]]
  assert nearest_means(inputs, episodes).tolist() == expected
  assert len(set(expected)) == 3


def test_the_grammar_brings_its_own_dictionary():
  rows = baselines.score(GrammarData(train=200, valid=5, test=20, shifted=5), ["test"])
  assert rows[0]["baseline"] == "word by word, the grammar's dictionary"
  assert all(0 < row["bleu"] < 50 for row in rows)
  assert all(row["bleu_low"] <= row["bleu"] <= row["bleu_high"] for row in rows)


def test_all_splits_but_training_are_scored_unless_some_are_named(data):
  assert {row["split"] for row in baselines.score(data)} == {"valid", "test"}
  with pytest.raises(UserError, match="Did you mean 'test'"):
    baselines.score(data, ["tset"])


def test_missing_data_are_a_user_error():
  with pytest.raises(UserError, match="no folder"):
    baselines.score(TextData(folder=str(Path("/nowhere/at/all"))))


def test_tricks_on_questions_stand_beside_chance_by_format_and_facts(tmp_path, capsys):
  config, path = tmp_path / "config.py", tmp_path / "scores.json"
  config.write_text(QUESTIONS)
  args = ["--config", str(config), "--split", "test", "facts", "--questions", "300"]
  baselines.main([*args, "--json", str(path)])
  rows = json.loads(path.read_text())["rows"]
  found = {(row["baseline"], row["split"]): row for row in rows}
  for split, facts in (("test", "123"), ("facts", "4")):
    chance = found["chance", split]
    assert [chance[f"exact_match/yes_no/{n}"] for n in facts] == [50] * len(facts)
    assert {"majority", "question only", "last sentence"} <= {name for name, _ in found}
    cells = {f"exact_match/{format}/{n}" for format in FORMATS for n in facts}
    window = {cell for cell in cells if "multiple_choice" in cell}
    regression = {cell for cell in cells if "abstractive" not in cell}
    lacking = {"sliding window": cells - window, "logistic regression": cells - regression}
    lacking["window and distance"] = lacking["sliding window"]
    for (name, where), row in found.items():
      if where == split:
        assert {cell for cell in row if "/" in cell} == cells - lacking.get(name, set()), name
    assert {("sliding window", split), ("logistic regression", split)} <= set(found)
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[:3] == ["baseline", "split", "questions"]
  assert lines[2].split()[:3] == ["chance", "test", "120"]
  assert lines[2].split()[-1] == "-"  # no test question needs four facts
