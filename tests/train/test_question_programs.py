"""Models that answer questions, and decoders on any text, through Python and the programs."""

import csv
import dataclasses
import io
import json
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import compmod_jax
from compmod_jax.analysis.report.results import csv_table, flattened
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.commands import check_data, evaluate, predict
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import FORMATS
from compmod_jax.data.qa.typed_lines import typed_question
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.models.matching_decoder import parameters
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tables.registry import table
from compmod_jax.tasks.answer_scores import scores
from compmod_jax.tasks.base import Evaluation
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training import final_evaluation, run

pytestmark = pytest.mark.usefixtures("one_device")
WORLDS = WorldsData(train=24, valid=12, test=12, shifted=12)
QUESTIONS = AnsweringConfig(data=Mixed((WORLDS,)), batch_questions=4, length=96, answer_length=4)
SIZES = {"dim": 16, "heads": 2, "ffn_dim": 16, "dropout": 0.0, "max_length": 96}
MODEL = NemotConfig(**SIZES, vanilla_layers=1, modulatory_layers=1, output_layers=1)
LINES = ["Anna is here. | Where is Anna?", "", "Who? (1) Ben (2) Anna", '{"question": 3}']


def save(folder, task, model):
  """A model folder with random parameters."""
  built = task.build(model)
  params = jax.tree.map(np.asarray, nn.unbox(jax.jit(built.model.init)(jax.random.key(0))))
  meta = {"task": to_json(task, TaskConfig), "model": to_json(model, ModelConfig)}
  save_model_folder(folder, params=params, files=built.dataset.files(), meta=meta)
  return folder


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
  model = dataclasses.replace(MODEL, tasks=("mqa", "gqa"))
  tokenizer = dataclasses.replace(QUESTIONS.tokenizer, vocab_size=160)
  task = dataclasses.replace(QUESTIONS, tokenizer=tokenizer)
  return save(tmp_path_factory.mktemp("answering") / "model", task, model)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
  data = GrammarDocuments(GrammarData(train=60, valid=10, test=10, shifted=10))
  tokenizer = dataclasses.replace(QUESTIONS.tokenizer, vocab_size=160)
  task = CausalLMConfig(data=data, tokenizer=tokenizer, length=33, batch_tokens=33 * 4)
  return save(tmp_path_factory.mktemp("language") / "model", task, MODEL)


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)


def test_every_line_has_its_answer(answering, monkeypatch, capsys):
  model = compmod_jax.load(answering)
  asked = [typed_question(LINES[0]), typed_question(LINES[2])]
  first, second = model.answer(asked)
  assert model.answer([LINES[0], asked[1]]) == [first, second]
  assert [
    best[0].text
    for best in model.task.generator(
      model.task.model, model.params, asked, model.task.generator.decode
    )
  ] == [
    first,
    second,
  ]
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode())))
  predict.main(["--workdir", str(answering), "--quiet"])
  out, err = capsys.readouterr()
  assert out.split("\n")[:-1] == [first, "", second, ""]
  assert "line 4: " in err
  assert "line 2" not in err


def test_lines_that_are_no_questions_are_refused_with_their_number(answering):
  model = compmod_jax.load(answering)
  with pytest.raises(UserError, match=r"questions\[1\], '\(1\) a': question is empty"):
    model.answer([LINES[0], "(1) a"])
  with pytest.raises(UserError, match="questions is one string, 'Anna is here"):
    model.answer(LINES[0])
  with pytest.raises(UserError, match=r"question 'Anna is here.*its answer; give a `compmod_jax"):
    model.capture([LINES[0]])


def test_bounds_of_translations_are_refused_for_answers(answering):
  with pytest.raises(UserError, match=r"--max_ratio, --max_extra: the .* answers questions"):
    predict.main(["--workdir", str(answering), "--max_extra", "3", "--max_ratio", "1"])


def test_gates_are_captured_for_questions_of_one_task(answering):
  model = compmod_jax.load(answering)
  asked = [typed_question(LINES[0]), typed_question("Who is it?")]
  gate = model.capture(asked, ["gate"])["gate"]
  assert gate.shape[0] == 2
  assert ((gate > 0) & (gate < 1)).all()
  with pytest.raises(UserError, match="2 tasks"):
    model.capture([asked[0], typed_question(LINES[2])])


def test_a_decoder_is_scored_on_any_text(language, tmp_path, capsys):
  text = "The dog sleeps ."
  (tmp_path / "short.txt").write_text(text + "\n")
  (tmp_path / "long.txt").write_text(" ".join([text] * 20) + "\n")
  scored = compmod_jax.load(language).score([text])[0]

  def found(*options):
    out = tmp_path / "out.json"
    files = [str(tmp_path / name) for name in ("short.txt", "long.txt")]
    command = ["--workdir", str(language), "--quiet", "--json", str(out)]
    evaluate.main([*command, *options, "--files", *files])
    return {row["split"]: row for row in json.loads(out.read_text())["splits"]}

  plain, sliding = found(), found("--stride", "4")
  for rows in (plain, sliding):
    assert rows["short.txt"]["tokens"] == len(scored.nll)
    assert rows["short.txt"]["loss"] == pytest.approx(scored.total / len(scored.nll), rel=1e-5)
  assert plain["long.txt"]["tokens"] == sliding["long.txt"]["tokens"]
  assert plain["long.txt"]["loss"] != pytest.approx(sliding["long.txt"]["loss"], rel=1e-4)
  assert "short.txt" in capsys.readouterr().out


def test_what_cannot_be_scored_on_files_is_told(answering, language, tmp_path):
  with pytest.raises(UserError, match="there is no file"):
    evaluate.main(["--workdir", str(language), "--files", str(tmp_path / "none.txt")])
  (tmp_path / "some.txt").write_text("text\n")
  with pytest.raises(UserError, match="something else than running"):
    evaluate.main(["--workdir", str(answering), "--files", str(tmp_path / "some.txt")])
  with pytest.raises(UserError, match="--stride is for decoders"):
    evaluate.main(["--workdir", str(answering), "--stride", "4"])
  files = ["--workdir", str(language), "--files", str(tmp_path / "some.txt")]
  with pytest.raises(UserError, match="--files is given with --split and --data_fields, but"):
    evaluate.main([*files, "--splits", "test", "--data_fields", "seed=1"])
  with pytest.raises(UserError, match=r"--lowercase is of BLEU, but the model .* has no outputs"):
    evaluate.main([*files, "--lowercase"])


def test_every_file_is_scored_whatever_its_name(language, tmp_path, monkeypatch):
  files = [tmp_path / name for name in ("a/notes.txt", "b/notes.txt", "c/notes[1].txt")]
  for file, text in zip(files, ("The dog sleeps .", "A cat", "The"), strict=True):
    file.parent.mkdir()
    file.write_text(text + "\n")

  def evaluate_splits(task, params, splits, **_):
    texts = list(task.dataset.config.data.load("valid"))
    return {split: Evaluation({"text": texts}, [], [], []) for split in splits}

  monkeypatch.setattr(final_evaluation, "evaluate_splits", evaluate_splits)
  out = tmp_path / "out.json"
  options = ["--workdir", str(language), "--quiet", "--json", str(out), "--files"]
  evaluate.main([*options, *map(str, files)])
  assert {row["split"]: row["text"] for row in json.loads(out.read_text())["splits"]} == {
    str(files[0]): ["The dog sleeps ."],
    str(files[1]): ["A cat"],
    "notes[1].txt": ["The"],
  }


STARTS = ("scratch", "general")  # of fine-tuning at the small scale


def test_questions_are_checked_by_the_program(capsys):
  sizes = {"train": 24, "valid": 12, "test": 12, "shifted": 12}
  options = [f"--config.task.data.seeds.0.{name}={size}" for name, size in sizes.items()]
  assert check_data.main(["--config", "configs/nemot_qa.py", *options]) == 0
  out = capsys.readouterr().out
  assert all(f"worlds {split}" in out for split in WORLDS.splits())


def test_tables_of_modulation_compare_what_is_scored():
  general = table("nemot-3.7", "tiny", 4)
  questions = [WORLDS.question("valid", i) for i in range(12)]
  known = scores(questions, ["worlds"] * 12, [question.answer for question in questions])
  mine = [column for column in general.columns if column.split == "test"]
  kept = final_evaluation.split_result("test", Evaluation(known, [], [], []))
  assert {column.value for column in mine} <= set(flattened(kept))
  for row in csv.DictReader(io.StringIO(csv_table({"name": "a", "splits": [kept]}))):
    assert {column.value: float(row[column.value]) for column in mine} == {
      column.value: known[column.value] for column in mine
    }
  assert len(mine) == 1 + 3 * len(FORMATS)
  assert {column.split for column in general.columns} - {"test"} == {"facts", "names", "length"}
  models = {name: row.experiment.model for name, row in general.rows.items()}
  assert models["gate off"] == dataclasses.replace(models["NeMoT"], gate="off")
  vocab = 600
  assert parameters(models["decoder"], vocab) == pytest.approx(
    parameters(models["NeMoT"], vocab), rel=0.02
  )
  strategies = table("nemot-3.10", "tiny", 4)
  changed = {
    name: (row.experiment.model.option_interaction, row.experiment.model.highlighting)
    for name, row in strategies.rows.items()
  }
  assert changed == {
    "none": (False, "off"),
    "AOI": (True, "off"),
    "highlighting": (False, "vanilla"),
    "highlighting, embedding": (False, "embedding"),
    "AOI and highlighting": (True, "vanilla"),
  }


def test_zero_shot_tables_compare_text_that_is_not_trained_on():
  tiny, small = (table("nemot-3.1", scale, 4) for scale in ("tiny", "small"))
  assert {column.split for column in small.columns} == {"valid", "ptb", "wikitext2"}
  assert {"attractor", "length"} < {column.split for column in tiny.columns}
  for name, expected in (("NeMoT", 36.24), ("decoder", 65.85), ("gate off", None)):
    assert small.rows[name].published.get("PPL ptb") == expected
  with pytest.raises(UserError, match="--scale is 'ptb'"):
    table("nemot-3.1", "ptb", 4)


def test_tables_of_single_sets_train_on_one_each():
  alone = table("nemot-3.4", "small", 4)
  assert {name.split(",")[0] for name in alone.rows} == {"race_middle", "boolq", "fairytaleqa"}
  tuned = table("nemot-3.9", "small", 4)
  assert list(tuned.rows) == [f"{s}, from {f}" for s in ("mctest", "siqa") for f in STARTS]
  for name, row in (*alone.rows.items(), *tuned.rows.items()):
    (data,) = row.experiment.task.data.seeds
    assert name.startswith(f"{data.name}, ")
    assert not row.experiment.task.data.unseen
  starts = {name: row.experiment.start for name, row in tuned.rows.items()}
  assert set(starts.values()) == {"", "runs/nemot_general"}
  assert starts["siqa, from general"] == "runs/nemot_general"
  published = table("nemot-3.9", "paper", 4).rows["mctest, from general"]
  assert published.published == {"score valid": 51.25, "score test": 56.07}
  assert table("nemot-3.4", "paper", 4).rows["race, decoder"].published["score test"] == 64.19
  for name in ("nemot-3.4", "nemot-3.9"):
    with pytest.raises(UserError, match=r"--scale tiny has none of the sets.* use --scale small"):
      table(name, "tiny", 4)
