"""Every input line gets its output line, whatever the lines hold."""

import functools
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny_model

import compmod_jax
from compmod_jax.commands import predict
from compmod_jax.core import sharding
from compmod_jax.core.errors import UserError
from compmod_jax.training import run

LINES = ["der hund schläft", "", "die katze sieht einen vogel", "  \t ", "vogel und fisch"]
ROOT = Path(__file__).parents[2]

_load = functools.cache(compmod_jax.load)  # keeps what was compiled


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
  return tiny_model.make_workdir(tmp_path_factory.mktemp("predict") / "run")


@pytest.fixture(scope="module")
def translations(workdir) -> list[str]:
  return _load(workdir, model=None).translate(LINES)


@pytest.fixture
def program(workdir, monkeypatch, capsys):
  """Runs the program on bytes, and returns its output lines and what it said."""
  monkeypatch.setattr(run, "use_compile_cache", lambda: None)
  monkeypatch.setattr("compmod_jax.api.load", _load)
  one = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])  # compiles fastest
  monkeypatch.setattr(sharding, "make_mesh", lambda config: one)

  def call(data: bytes, *options: str) -> tuple[list[str], str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    predict.main(["--workdir", str(workdir), "--quiet", *options])
    out, err = capsys.readouterr()
    assert not out or out.endswith("\n")
    return out.split("\n")[:-1], err

  return call


def test_every_line_has_its_translation_blank_lines_and_an_unended_one_too(program, translations):
  data = "\n".join(LINES).encode()
  assert program(data) == (translations, "")
  assert program(data + b"\n\n", "--chunk", "2") == ([*translations, ""], "")
  assert program(b"") == ([], "")


def test_lines_end_at_line_feeds_only_and_marks_of_order_are_no_text(program, translations):
  data = "\ufeffder\u2028hund schläft\r\n\r\ndie katze\x0bsieht einen\x85vogel\n".encode()
  assert program(data) == (translations[:3], "")


def test_a_line_that_is_no_utf8_or_too_long_is_told_and_the_others_are_safe(program, translations):
  data = "\n".join([LINES[0], "x" + "hund " * 30, LINES[2]]).encode().replace(b"x", b"\xff")
  out, err = program(data)
  assert [out[0], out[2]] == [translations[0], translations[2]]
  assert re.search(r"warning: line 2 is not UTF-8", err)
  assert re.search(r"warning: line 2 has more than 11 tokens", err)
  assert "line 1" not in err


def test_n_best_gives_n_lines_with_number_score_and_text_best_first(program, translations):
  out, _ = program("\n".join(LINES).encode(), "--nbest", "3")
  rows = [line.split("\t") for line in out]
  assert [int(row[0]) for row in rows] == [n for n in range(1, 6) for _ in range(3)]
  assert [row[2] for row in rows[::3]] == translations
  scores = [float(row[1]) for row in rows]
  assert all(scores[i] >= scores[i + 1] >= scores[i + 2] for i in range(0, 15, 3))
  assert scores[3:6] == [0, float("-inf"), float("-inf")]


def test_scores_stand_before_the_translations(program, translations):
  rows = [line.split("\t") for line in program("\n".join(LINES).encode(), "--scores")[0]]
  assert [text for _, text in rows] == translations
  assert [float(score) < 0 for score, _ in rows] == [bool(line.strip()) for line in LINES]


def test_samples_depend_on_the_seed_alone(program):
  data = "\n".join(LINES).encode()
  one = program(data, "--method", "sample", "--seed", "1", "--temperature", "3")
  assert program(data, "--method", "sample", "--seed", "1", "--temperature", "3") == one
  assert program(data, "--method", "sample", "--seed", "2", "--temperature", "3") != one


def _environment(workdir: Path) -> dict[str, str]:
  """The environment of one plain CPU device and a compile cache of its own."""
  kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  return {**kept, "JAX_PLATFORMS": "cpu", "COMPMOD_CACHE": str(workdir.parent / "cache")}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("--model", "averge"), "model is 'averge'"),
    (("--beams", "0"), "beams is 0"),
    (("--temperature", "2"), "temperature is given.*--method sample"),
    (("--nbest", "9"), "n_best is 9.*raise beams"),
    (("--beems", "4"), "--beems is not an option. Did you mean --beams"),
  ],
)
def test_wrong_options_are_told_before_anything_is_read(program, options, message):
  with pytest.raises(UserError, match=message):
    program(b"der hund\n", *options)
  assert sys.stdin.buffer.tell() == 0


@pytest.mark.programs
def test_in_a_pipe_output_comes_early_and_a_reader_that_leaves_is_no_error(workdir, translations):
  command = [sys.executable, "-m", "train.predict", "--workdir", str(workdir), "--chunk", "2"]
  with subprocess.Popen(
    command,
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=_environment(workdir),
  ) as process:
    process.stdin.write(f"{LINES[2]}\n{LINES[4]}\n".encode())
    process.stdin.flush()
    early = [process.stdout.readline().decode().strip() for _ in range(2)]
    assert early == [translations[2], translations[4]]
    process.stdout.close()
    process.stdin.write("\n".join(LINES * 4).encode())
    process.stdin.close()
    said = process.stderr.read().decode()
    assert process.wait(timeout=100) == 0, said
  assert "finished lines" in said
  assert "Traceback" not in said
  assert "Broken" not in said


@pytest.mark.programs
def test_a_workdir_without_a_model_is_one_paragraph_and_exit_status_2(tmp_path):
  result = subprocess.run(
    [sys.executable, "-m", "train.predict", "--workdir", str(tmp_path)],
    cwd=ROOT,
    input=b"der hund\n",
    capture_output=True,
    timeout=100,
    env=_environment(tmp_path),
  )
  assert result.returncode == 2
  assert result.stdout == b""
  assert re.fullmatch(rb"error: [^\n]*holds no trained model[^\n]*\n", result.stderr)
