"""`predict` gives one line for every line of any bytes, for every kind of model."""

import dataclasses
import functools
import io
import json
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny_masked
import tiny_model

import compmod_jax
from benchmarks import fuzz
from benchmarks.fuzz_models import Predictor
from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.commands import predict
from compmod_jax.core import sharding
from compmod_jax.core.config import to_json
from compmod_jax.core.errors import UserError
from compmod_jax.data.qa.mixed import Mixed
from compmod_jax.data.qa.question import Question
from compmod_jax.data.sources.documents import GrammarDocuments
from compmod_jax.data.synthetic.grammar import GrammarData
from compmod_jax.data.synthetic.worlds import WorldsData
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.nemot import NemotConfig
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training import run

SIZES = {"dim": 16, "heads": 2, "ffn_dim": 16, "dropout": 0.0, "max_length": 96}
NEMOT = NemotConfig(**SIZES, vanilla_layers=1, modulatory_layers=1, output_layers=1)
WORLDS = WorldsData(train=24, valid=12, test=12, shifted=12)

# Good lines among bad ones: the former must have what they have alone.
GOOD = {
  "translation": b"der hund schl\xc3\xa4ft",
  "masked": b"bat 0 <mask> 1",
  "answering": b"Anna is here. | Where is Anna?",
}
BAD = [
  b"",
  b" \t ",
  b"\x00",
  b"der\x00hund <mask>\x00?",
  b"a\rb <mask>",
  b"\r",
  "a\u2028b\u2029c\x85d <mask>".encode(),
  b"\xff\xfe\x00<mask>",
  b"\xed\xa0\x80 <mask>",  # half a surrogate pair, as UTF-8 may not have it
  b"\xef\xbb\xbf\xef\xbb\xbf<mask>",
  b"9" * 5000,
  b"(" + b"9" * 5000 + b") a",
  b"[" * 100_000,
  b'{"a":' * 100_000,
  b'{"question": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
  b'{"question": ' + b"9" * 5000 + b"}",
  b'{"question": "Who?", "options": 5}',
  b'{"question": "Who?", "options": "ab"}',
  b'{"question": "Who?", "options": {"a": 1, "b": 2}}',
  b'{"question": "Who?", "options": ["a"]}',
  json.dumps({"question": "Who?", "options": list("abcdefghi")}).encode(),
  b"Who? (1) a (2) b (3) c (4) d (5) e (6) f (7) g (8) h (9) i",
  b"Who? (1) (2) ",
  rb'{"question": "Who is \ud800?", "passage": "\udfff"}',
  rb'{"question": "\ud800", "options": ["\udc00", "\ud800"]}',
  b'{"question": null}',
  b'{"question": "?", "format": ["yes_no"]}',
  b'{"question": "?", "format": "extractive", "passage": 1e999}',
  b"{}",
  b"{",
  b"|",
  b"||||?",
  b"<mask>" * 300,
  b"x" * 1_000_000,
  b"x y? " * 100_000 + b" | who?",
  b"\xcc\x81" * 5000,  # accents that combine with nothing
]

_load = functools.cache(compmod_jax.load)  # keeps what was compiled


def save(folder, task, model, *, change=lambda params: params):
  """A model folder with random parameters."""
  built = task.build(model)
  shapes = jax.eval_shape(lambda: nn.unbox(built.model.init(jax.random.key(0))))
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(x.dtype), shapes)
  meta = {"task": to_json(task, TaskConfig), "model": to_json(model, ModelConfig)}
  save_model_folder(folder, params=change(params), files=built.dataset.files(), meta=meta)
  return folder


def answering_task():
  task = AnsweringConfig(data=Mixed((WORLDS,)), batch_questions=8, length=96, answer_length=4)
  task = dataclasses.replace(task, decode=DecodeConfig(beams=2))
  return dataclasses.replace(task, tokenizer=dataclasses.replace(task.tokenizer, vocab_size=160))


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
  root = tmp_path_factory.mktemp("any_line")
  text = tiny_masked.write_text(root / "text", {"train": 40, "valid": 6, "test": 6})
  return {
    "translation": tiny_model.make_workdir(root / "translation"),
    "masked": save(root / "masked", tiny_masked.make_task(text), tiny_masked.make_model()),
    "answering": save(
      root / "answering", answering_task(), dataclasses.replace(NEMOT, tasks=("mqa", "gqa"))
    ),
    "general": save(root / "general", answering_task(), dataclasses.replace(NEMOT, tasks=("gqa",))),
  }


@pytest.fixture
def program(monkeypatch, capsys):
  """Runs the program on bytes; returns its output lines and what it wrote to standard error."""
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)
  monkeypatch.setattr("compmod_jax.api.load", _load)
  one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])  # compiles fastest
  monkeypatch.setattr(sharding, "make_mesh", lambda config: one)

  def call(workdir, data, *options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    predict.main(["--workdir", str(workdir), "--quiet", *options])
    out, err = capsys.readouterr()
    assert not out or out.endswith("\n")
    return out.split("\n")[:-1], err

  return call


@pytest.mark.parametrize("kind", ["translation", "masked", "answering"])
def test_every_line_has_one_line_and_the_good_ones_their_own(program, workdirs, kind):
  good = GOOD[kind]
  ((alone,), _) = program(workdirs[kind], good + b"\n")
  lines = [line for bad in BAD for line in (bad, good)]
  out, err = program(workdirs[kind], b"\n".join(lines))
  assert len(out) == len(lines)
  assert set(out[1::2]) == {alone}
  # Nothing in a line breaks it apart for readers that know other line ends.
  assert all(len(line.splitlines()) <= 1 for line in out)
  assert all(len(line) < 500 for line in err.splitlines())


@pytest.mark.parametrize("kind", ["translation", "masked"])  # others compile too many shapes
def test_of_hostile_lines_none_is_lost_nor_has_another_s_output(program, workdirs, kind):
  count = fuzz.Count()
  turn = fuzz.predict_turn(kind, lambda: Predictor(kind, workdirs[kind]), 1, lines=40)
  turn(count)
  assert (count.lines, count.inputs) == (40, 1)
  assert not count.failed, count.kept


def test_a_model_without_an_output_for_options_answers_the_other_lines(program, workdirs):
  lines = [b"Who? (1) a (2) b", GOOD["answering"], b"Who? (1) a (2) b"]
  out, err = program(workdirs["general"], b"\n".join(lines))
  assert len(out) == 3
  assert out[0] == out[2] == ""
  assert "line 1: " in err
  assert "mqa" in err


def test_of_endless_lines_a_mebibyte_is_read_and_the_next_line_is_safe(program, workdirs):
  good = GOOD["masked"]
  ((alone,), _) = program(workdirs["masked"], good)
  # The cut falls into a character of three bytes.
  data = b"\n".join([good, b"a" + "\u20ac".encode() * 700_000, b"b" * (1 << 20), good])
  out, err = program(workdirs["masked"], data)
  assert [len(line) for line in out[1:3]] == [1 + (1 << 20) // 3, 1 << 20]
  assert out[0] == out[3] == alone
  assert "line 2 has more than 1,048,576 bytes" in err
  assert "line 3" not in err.replace("line 3 has more than 16 tokens", "")
  assert "UTF-8" not in err


def test_parameters_that_are_not_finite_are_named_before_anything_is_read(program, workdirs):
  def broken(params):
    leaves, tree = jax.tree.flatten(params)
    leaves[0] = np.array(leaves[0])
    leaves[0].flat[:2] = np.nan
    leaves[0].flat[2] = -np.inf
    return jax.tree.unflatten(tree, leaves)

  text = workdirs["masked"].parent / "text"
  folder = workdirs["masked"].parent / "broken"
  save(folder, tiny_masked.make_task(text), tiny_masked.make_model(), change=broken)
  with pytest.raises(UserError, match=r"1 of the \d+ parameter .* 2 NaN and 1 infinite .*--model"):
    program(folder, b"bat <mask>\n")
  assert sys.stdin.buffer.tell() == 0


@pytest.mark.parametrize("kind", ["translation", "masked"])
def test_outputs_without_a_finite_score_are_named(program, workdirs, kind, tmp_path):
  def huge(params):
    return jax.tree.map(lambda leaf: np.full_like(leaf, 3e38), params)

  model = _load(workdirs[kind])
  folder = save(tmp_path / "huge", model.task.dataset.config, model.model.config, change=huge)
  out, err = program(folder, b"\n" + GOOD[kind] + b"\n")
  assert len(out) == 2
  assert "line 2 has an output without a finite score" in err
  assert "line 1" not in err


def test_questions_that_the_model_cannot_be_asked_are_named(workdirs):
  model = _load(workdirs["general"])
  with pytest.raises(UserError, match=r"'Which\?' is of the task 'mqa'"):
    model.answer([Question("multiple_choice", "Which?", options=("a", "b"), label=1)])
  with pytest.raises(UserError, match="options has 9 entries"):
    model.answer([Question("multiple_choice", "Which?", options=tuple("abcdefghi"), label=1)])


def test_every_text_within_the_positions_has_its_score_and_one_beyond_is_named(tmp_path):
  data = GrammarDocuments(GrammarData(train=60, valid=10, test=10, shifted=10))
  tokenizer = dataclasses.replace(answering_task().tokenizer, vocab_size=160)
  task = CausalLMConfig(data=data, tokenizer=tokenizer, length=33, batch_tokens=33 * 4)
  model = compmod_jax.load(save(tmp_path / "model", task, NEMOT))
  hostile = [bad.decode(errors="replace") for bad in BAD if len(bad) <= 40]
  # More than a power of two, and no more than the 96 positions.
  long = " ".join(["a"] * 80)
  assert 64 < len(model.tokenizer.encode(long)) < 96
  found = model.score([*hostile, "\ud800", long])
  assert len(found) == len(hostile) + 2
  assert all(np.isfinite(one.nll).all() for one in found)
  with pytest.raises(UserError, match=r"texts\[1\], 'a a .* has 161 tokens .* for 96"):
    model.score(["a", long * 2])
