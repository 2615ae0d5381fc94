"""The programs that continue and score lines: one line for every line of any bytes, and options."""

import functools
import io
import sys

import jax
import pytest
import tiny_masked
import tiny_model
import tiny_recurrent
from test_predict_any_line import BAD, save

import compmod_jax
from compmod_jax.commands import generate, predict, score
from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.training import run

GOOD = b"bat 0 cow"
_load = functools.cache(compmod_jax.load)  # keeps what was compiled


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
  root = tmp_path_factory.mktemp("generate")
  text = tiny_masked.write_text(root / "text", {"train": 40, "valid": 6, "test": 6})
  model = tiny_recurrent.make_model("surprisal", dropout=0.0)
  return {
    "translation": tiny_model.make_workdir(root / "translation"),
    "masked": save(root / "masked", tiny_masked.make_task(text), tiny_masked.make_model()),
    "recurrent": save(root / "recurrent", tiny_recurrent.make_task(text), model),
  }


@pytest.fixture
def program(monkeypatch, capsys):
  """Runs a program on bytes; returns its output lines and what it wrote to standard error."""
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)
  monkeypatch.setattr("compmod_jax.api.load", _load)
  one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])  # compiles fastest
  monkeypatch.setattr(sharding, "make_mesh", lambda config: one)

  def call(main, workdir, data, *options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    main(["--workdir", str(workdir), "--quiet", *options])
    out, err = capsys.readouterr()
    assert not out or out.endswith("\n")
    return out.split("\n")[:-1], err

  return call


def test_every_line_goes_on_whatever_it_holds_and_the_good_ones_as_alone(program, workdirs):
  ((alone,), _) = program(generate.main, workdirs["recurrent"], GOOD, "--length", "4")
  assert alone.startswith("bat 0 cow")
  some = [bad for bad in BAD if len(bad) < 100]
  lines = [line for bad in some for line in (bad, GOOD)]
  out, _ = program(generate.main, workdirs["recurrent"], b"\n".join(lines), "--length", "4")
  assert len(out) == len(lines)
  assert set(out[1::2]) == {alone}
  assert all(len(line.splitlines()) <= 1 for line in out)


def test_scores_columns_and_what_is_generated_are_those_of_python(program, workdirs):
  model = _load(workdirs["recurrent"], model=None)
  options = {"length": 4, "temperature": 2.0, "n_best": 2, "seed": 3}
  found = model.generations(["bat 0", ""], **options)
  out, _ = program(
    generate.main, workdirs["recurrent"], b"bat 0\n\n", "--length", "4", "--temperature", "2",
    "--nbest", "2", "--seed", "3", "--continuation",
  )  # fmt: skip
  rows = [line.split("\t") for line in out]
  assert [row[0] for row in rows] == ["1", "1", "2", "2"]
  flat = [one for some in found for one in some]
  assert [row[2] for row in rows] == [one.text.removeprefix(" ") for one in flat]
  assert [float(row[1]) for row in rows] == pytest.approx([one.score for one in flat], abs=1e-3)
  stop = model.generate(["bat 0"], length=4)[0].split()[2]
  out, _ = program(
    generate.main, workdirs["recurrent"], b"bat 0", "--length", "4", "--stop", stop, "--scores"
  )
  assert out[0].split("\t")[1].split() == ["bat", "0"]


def test_lines_are_scored_and_those_that_cannot_be_are_named(program, workdirs):
  model = _load(workdirs["recurrent"], model=None)
  (one,) = model.score(["bat 0 cow"])
  out, _ = program(score.main, workdirs["recurrent"], GOOD + b"\n\n", "--tokens")
  total, count, *tokens = out[0].split("\t")
  assert float(total) == pytest.approx(one.log_probability, abs=1e-3)
  assert int(count) == 4
  assert [token.split()[0] for token in tokens] == ["bat", "0", "cow", "</s>"]
  assert out[1].split("\t")[1] == "1"

  pairs = b"der hund\tthe dog\nder hund\n\na\tb\tc\n" + b"der " * 60 + b"\tthe\n"
  pairs += b"der hund\t\r\n \tder hund\tthe dog\t \n"
  out, err = program(score.main, workdirs["translation"], pairs)
  whole, empty = _load(workdirs["translation"], model=None).score(
    [("der hund", "the dog"), ("der hund", "")]
  )
  assert out[1:5] == [""] * 4
  assert out[6] == out[0]
  for line, expected in ((out[0], whole), (out[5], empty)):
    total, count = line.split("\t")
    assert float(total) == pytest.approx(expected.log_probability, abs=1e-3)
    assert int(count) == len(expected.tokens)
  assert all(f"line {number} has" in err.replace(":", "") for number in (2, 3, 4, 5))
  assert "line 6" not in err

  out, err = program(score.main, workdirs["masked"], b"bat 0\n\n" + b"bat 0 " * 20)
  (expected,) = _load(workdirs["masked"], model=None).score(["bat 0"])
  assert float(out[0].split("\t")[0]) == pytest.approx(expected.log_probability, abs=1e-3)
  assert out[1:] == ["0.0000\t0", ""]
  assert "line 3: has 42 tokens" in err


def test_wrong_options_are_told_before_anything_is_read(program, workdirs):
  recurrent = workdirs["recurrent"]
  for options, message in (
    (("--length", "0"), "length is 0"),
    (("--beams", "2", "--top_k", "3"), "Choose one of the two"),
    (("--nbest", "3"), "n_best is 3"),
    (("--nbest", "0"), "--nbest is 0"),
    (("--max_ratio", "2"), "bounded by length"),
    (("--lenght", "3"), "Did you mean --length"),
  ):
    with pytest.raises(UserError, match=message):
      program(generate.main, recurrent, b"bat\n", *options)
    assert sys.stdin.buffer.tell() == 0
  with pytest.raises(UserError, match="is no language model"):
    program(generate.main, workdirs["masked"], b"bat\n")
  with pytest.raises(
    UserError, match=r"train\.generate`, or score them with `python -m train\.score"
  ):
    program(predict.main, recurrent, b"bat\n")
