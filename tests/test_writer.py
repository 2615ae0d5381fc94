"""Metrics and progress: valid lines, whatever interrupts, and nothing twice after a resume."""

import contextlib
import io
import json
import os
import pty
import struct
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.core.metric_lines import read_records
from compmod_jax.training import progress
from compmod_jax.training.provenance import git_revision, provenance
from compmod_jax.training.writer import Writer

ROOT = Path(__file__).parents[1]


def _lines(workdir):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  text = (workdir / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _events(workdir):
  """(tag, step, value) of every scalar in the event files."""
  from tensorboardX.proto.event_pb2 import Event

  found = []
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    while data:
      length = struct.unpack("<Q", data[:8])[0]
      event = Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
  return found


@pytest.fixture
def clock(monkeypatch):
  """The seconds that `time.monotonic` shows, in a list of one."""
  now = [100.0]
  monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
  return now


@pytest.fixture
def shown(tmp_path):
  """Makes a writer and returns it with the stream that it shows progress on."""
  with contextlib.ExitStack() as stack:

    def make(**options):
      stream = io.StringIO()
      return stack.enter_context(_writer(tmp_path, stream=stream, **options)), stream

    yield make


def _writer(workdir, **options):
  options = {"total_steps": 100, "stream": io.StringIO(), "tensorboard": False} | options
  return Writer(workdir, **options)


def test_every_line_is_valid_json_whatever_the_values(tmp_path):
  with _writer(tmp_path / "new") as writer:
    writer.write("start", None, {"config": {"heads": (1, 2), "path": Path("/x")}})
    writer.write(
      "train",
      1,
      {
        "loss": jnp.float32(2.5),
        "nan": float("nan"),
        "list": np.array([1.0, np.inf]),
        "count": np.int64(3),
        "bool": np.bool_(True),
        "half": jnp.bfloat16(0.5),
      },
    )
    assert len(_lines(tmp_path / "new")) == 2  # before it is closed: a kill would lose nothing
  assert _lines(tmp_path / "new") == [
    {"kind": "start", "config": {"heads": [1, 2], "path": "/x"}},
    {
      "kind": "train", "step": 1, "loss": 2.5, "nan": None, "list": [1.0, None], "count": 3,
      "bool": True, "half": 0.5,
    },
  ]  # fmt: skip


def test_rewinding_drops_what_comes_after_the_step_and_a_torn_line(tmp_path):
  with _writer(tmp_path) as writer:
    writer.write("start", None, {"a": 1})
    for step in (10, 20, 30):
      writer.write("train", step, {"loss": 1.0})
      writer.write("eval", step, {"split": "valid", "bleu": 1.0})
    writer.write("final", 30, {"split": "test", "bleu": 1.0})
  with open(tmp_path / "metrics.jsonl", "a") as file:
    file.write('{"kind": "train", "step": 5')
  with _writer(tmp_path) as writer:
    writer.rewind(20)
    writer.write("train", 21, {"loss": 1.0})
  kinds = [(line["kind"], line.get("step")) for line in _lines(tmp_path)]
  assert kinds == [
    ("start", None), ("train", 10), ("eval", 10), ("train", 20), ("eval", 20), ("train", 21)
  ]  # fmt: skip
  assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"kind": "tr', b'{"kind": 1}', b"\xff\n", b"\x00\x00\n3\n"])
def test_a_line_torn_by_a_kill_does_not_spoil_the_next(tmp_path, torn):
  (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "start"}\n' + torn)
  with _writer(tmp_path) as writer:
    writer.write("train", 1, {})
  assert [line["kind"] for line in _lines(tmp_path)] == ["start", "train"]


DAMAGED = {
  "torn": b'{"kind": "train", "st',
  "NULs": b"\x00" * 64,
  "no UTF-8": b'{"kind": "train", "step": 2, "text": "\xff"}',
  "a number": b"3",
  "a list": b"[1, 2]",
  "UTF-16": '{"kind": "train", "step": 2}'.encode("utf-16-le"),
  "a step that is none": b'{"kind": "train", "step": "2"}',
  "a kind that is none": b'{"kind": ["train"], "step": 2}',
  "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_of_the_log_costs_that_line_alone(tmp_path, damage):
  path, stream = tmp_path / "metrics.jsonl", io.StringIO()
  good = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3, 4)]
  lines = [json.dumps(record).encode() for record in good]
  lines.insert(1, DAMAGED[damage])
  path.write_bytes(b"".join(line + b"\n" for line in lines))
  assert read_records(path) == good  # reports, curves
  with _writer(tmp_path, stream=stream) as writer:
    writer.rewind(3)
    writer.write("train", 4, {"loss": 1.0})
  assert _lines(tmp_path) == good
  assert f"damaged lines of {path} were left out: 2 (of 5)" in stream.getvalue()


def test_a_writer_that_goes_on_keeps_what_follows_a_damaged_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"kind": "a"}\n\x00\x00\n{"kind": "b"}\n{"kind": "c"}')
  with _writer(tmp_path) as writer:
    writer.write("d", 1, {})
  assert [line["kind"] for line in _lines(tmp_path)] == ["a", "b", "c", "d"]


def test_a_writer_goes_on_where_another_stopped(tmp_path):
  for step in (1, 2):
    with _writer(tmp_path) as writer:
      writer.write("train", step, {})
  assert [line["step"] for line in _lines(tmp_path)] == [1, 2]


def test_tensorboard_gets_the_finite_floats(tmp_path):
  with _writer(tmp_path, tensorboard=True) as writer:
    writer.write("train", 3, {"loss": 2.5, "bad": float("nan"), "count": 3, "text": "x"})
    writer.write("eval", 3, {"split": "valid", "loss": jnp.float32(1.5)})
    writer.rewind(1)
    writer.write("train", 2, {"loss": 3.5})
  assert sorted(_events(tmp_path)) == [
    ("eval/valid/loss", 3, 1.5),
    ("train/loss", 2, 3.5),
    ("train/loss", 3, 2.5),
  ]


def test_tensorboard_needs_no_tensorflow_and_warns_of_nothing(tmp_path):
  code = (
    "import sys; from pathlib import Path; from compmod_jax.training.writer import Writer\n"
    "assert 'tensorboardX' not in sys.modules and 'rich' not in sys.modules\n"
    "with Writer(Path(sys.argv[1]), total_steps=3, quiet=True) as w: w.write('a', 1, {'b': 1.0})\n"
    "assert 'tensorboardX' in sys.modules and 'tensorflow' not in sys.modules"
  )
  command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  full = pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left")
  with _writer(tmp_path) as writer, full:
    writer.write("train", 1, {"loss": 1.0})


def test_without_a_workdir_nothing_is_written_or_shown(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  stream = io.StringIO()
  with _writer(None, stream=stream, tensorboard=True) as writer:
    writer.write("train", 1, {"loss": 1.0})
    writer.rewind(0)
    writer.say("hello")
  assert stream.getvalue() == ""
  assert os.listdir(tmp_path) == []


def test_plain_lines_tell_the_numbers_and_the_time_left(shown, clock):
  writer, stream = shown(total_steps=1500)
  values = {"loss": 2.312, "perplexity": 10.09, "tokens_per_second": 1234.4}
  values |= {"gradient_norm": 0.9, "learning_rate": 5e-4, "router/x/entropy": 1.0}
  writer.write("train", 100, values)
  clock[0] += 20
  writer.write("train", 300, values)
  clock[0] += 1  # too soon for another
  writer.write("train", 310, values)
  clock[0] += 1
  writer.write("train", 1500, values | {"loss": float("nan")})  # the last is always shown
  numbers = "ppl 10.1  1,234 tok/s  gnorm 0.9  lr 5.0e-04"
  assert stream.getvalue().splitlines() == [
    f"step 100/1500  loss 2.31  {numbers}",
    f"step 300/1500  loss 2.31  {numbers}  eta 02:00",
    f"step 1500/1500  loss nan  {numbers}  eta 00:00",
  ]


def test_the_estimate_counts_only_the_steps_of_this_run(shown, clock):
  writer, stream = shown(total_steps=10_000)
  writer.rewind(900)
  for step in (910, 920):
    clock[0] += 10
    writer.write("train", step, {})
  assert "eta 2:31:20" in stream.getvalue()


def test_phases_are_shown_with_an_estimate_but_not_too_often(shown, clock):
  writer, stream = shown()
  writer.status("compiling bucket 24")
  for done in range(1001):
    writer.status("translating test", done, 1000)
    clock[0] += 0.01
  writer.write("eval", 50, {"split": "valid", "loss": 1.25, "bleu": 31.234, "samples": "x"})
  writer.write("final", 50, {"split": "test", "sentences": 12, "router/a": 1.0})
  lines = stream.getvalue().splitlines()
  assert lines[:2] == ["compiling bucket 24", "translating test 0/1000"]
  assert lines[2].startswith("translating test 50")
  assert lines[2].endswith("eta 00:05")
  assert lines[3:] == [
    "translating test 1000/1000  eta 00:00",
    "valid at step 50:  loss 1.25  bleu 31.23",
    "test at step 50:  sentences 12",
  ]


def test_a_quiet_writer_shows_nothing(shown):
  writer, stream = shown(quiet=True)
  writer.write("train", 1, {"loss": 1.0})
  writer.status("evaluating")
  writer.say("hello")
  assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_and_its_cursor_back(tmp_path, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "140")
  controller, terminal = pty.openpty()
  read = []

  def drain():
    with contextlib.suppress(OSError):  # raised once the other side is closed
      while data := os.read(controller, 4096):
        read.append(data)

  reader = threading.Thread(target=drain)
  reader.start()
  with os.fdopen(terminal, "w") as stream, _writer(tmp_path, stream=stream) as writer:
    writer.write("train", 50, {"loss": 2.5})
    writer.status("evaluating valid", 3, 12)
    writer.say("[resumed] from step 40")
    writer.write("eval", 50, {"split": "valid", "bleu": 31.5})
    writer.write("train", 60, {"loss": 2.25})
  reader.join()
  os.close(controller)
  shown = b"".join(read).decode()
  for text in ("training  loss 2.25", "60/100", "[resumed] from step 40", "bleu 31.5"):
    assert text in shown
  assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_provenance_names_the_code_the_packages_and_the_machine():
  found = provenance()
  assert json.loads(json.dumps(found)) == found
  assert found["packages"]["jax"]
  assert found["devices"]["platform"] == "cpu"
  assert found["host"]["cpu"]
  assert found["date"].endswith("+00:00")


def test_provenance_tells_clean_from_changed_and_does_without_git(tmp_path, monkeypatch):
  assert git_revision(tmp_path) is None

  def git(*arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(
      ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
    )

  git("init")
  assert git_revision(tmp_path) is None  # no commit yet
  (tmp_path / "file").write_text("a")
  git("add", "file")
  git("commit", "-m", "first")
  found = git_revision(tmp_path)
  assert len(found["revision"]) == 40
  assert not found["dirty"]
  (tmp_path / "file").write_text("b")
  assert git_revision(tmp_path)["dirty"]
  (tmp_path / "environment").mkdir()  # with installed packages, which no commit describes
  assert git_revision(tmp_path / "environment") is None
  monkeypatch.setenv("PATH", "")
  assert git_revision(tmp_path) is None
  assert provenance()["git"] is None
