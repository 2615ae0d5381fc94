"""Checkpoints live through damage, full disks, kills and the end of the program."""

import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.errors import UserError
from compmod_jax.training import checkpoint_files
from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.orbax_messages import quiet_orbax

ROOT = Path(__file__).parents[1]


def _state(step=0):
  return {"x": jnp.full((300, 300), step, jnp.float32), "step": jnp.int32(step)}


def _abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def _assert_same(ours, theirs):
  for name, leaf in theirs.items():
    np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(leaf))


@pytest.fixture
def saved(tmp_path):
  """A directory with checkpoints of steps 1 and 2."""
  writer = Checkpointer(tmp_path)
  for step in (1, 2):
    writer.save(step, _state(step), {"position": step})
  return tmp_path


def _state_file(path, name):
  """The named file, or the largest that holds array data."""
  if name != "data":
    return path / name
  return max((path / "state").glob("**/d/*"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("damage", ["remove", "truncate", "garbage", "flip"])
@pytest.mark.parametrize("name", ["data", "meta.json", "manifest.json", "state/_METADATA"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(saved, name, damage):
  path = _state_file(saved / "step_00000002", name)
  data = path.read_bytes()
  if damage == "remove":
    path.unlink()
  elif damage == "truncate":
    path.write_bytes(data[: len(data) // 2])
  elif damage == "garbage":
    path.write_bytes(os.urandom(len(data)))
  else:
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
  reports = []
  reader = Checkpointer(saved, keep_last=1, report=reports.append)
  state, meta, step = reader.restore(_abstract(_state()))
  assert (meta, step) == ({"position": 1}, 1)
  _assert_same(state, _state(1))
  assert len(reports) == 1
  assert "step_00000002 is damaged" in reports[0]
  # Training goes on from step 1; the damaged one neither counts as the last n nor blocks its step.
  reader.save(2, _state(2), {})
  assert reader.steps() == [2]
  _assert_same(Checkpointer(saved).restore(_abstract(_state()))[0], _state(2))


def test_a_file_too_many_is_damage_too(saved):
  (saved / "step_00000002" / "state" / "extra").write_text("")
  assert Checkpointer(saved).restore(_abstract(_state()))[2] == 1


def test_where_every_checkpoint_is_damaged_the_error_says_what_to_do(saved):
  for step in (1, 2):
    (saved / f"step_0000000{step}" / "meta.json").write_text("{}")
  with pytest.raises(UserError, match=r"step_00000002: meta.json was changed.*_00000001.*backup"):
    Checkpointer(saved).restore(_abstract(_state()))


def test_what_a_killed_write_left_is_ignored_and_then_cleared(saved):
  leftover = saved / "tmp_step_00000003" / "state"
  leftover.mkdir(parents=True)
  writer = Checkpointer(saved)
  assert writer.latest() == 2
  assert writer.restore(_abstract(_state()))[2] == 2
  assert leftover.exists()  # a reader must not disturb a writer
  writer.save(4, _state(4), {})
  assert sorted(os.listdir(saved)) == [f"step_0000000{step}" for step in (1, 2, 4)]


def test_a_full_disk_is_told_and_the_older_checkpoints_stay(saved, monkeypatch):
  monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
  with pytest.raises(UserError, match=r"step_00000003 cannot be written.*0\.0 MB left.*Free some"):
    Checkpointer(saved).save(3, _state(3), {})
  monkeypatch.undo()
  assert Checkpointer(saved).restore(_abstract(_state()))[2] == 2


def _save_and_wait(writer, state):
  writer.save(3, state, {})
  writer.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_write_that_fails_half_way_is_told_and_the_older_checkpoints_stay(
  saved, asynchronous, capfd
):
  big = {str(i): jax.random.normal(jax.random.key(i), (300, 300)) for i in range(8)}
  writer = Checkpointer(saved, asynchronous=asynchronous)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
  try:
    with pytest.raises(UserError, match=r"step_00000003 cannot be written to .*: File too large\."):
      _save_and_wait(writer, big)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert writer.restore(_abstract(_state()))[2] == 2
  _save_and_wait(writer, _state(3))
  assert writer.steps() == [1, 2, 3]
  assert "Traceback" not in capfd.readouterr().err


def test_writes_that_failed_beside_the_first_say_nothing_when_they_are_collected(caplog):
  quiet_orbax()
  logger = logging.getLogger("asyncio")
  place = os.path.join("lib", "orbax", "checkpoint", "serialization.py")
  logger.error("Task exception was never retrieved\nfuture: <Task finished defined at %s:1>", place)
  logger.error("Task exception was never retrieved\nfuture: <Task finished defined at mine.py:1>")
  assert ["mine.py" in record.getMessage() for record in caplog.records] == [True]


def test_an_unwritable_place_is_an_error_that_names_it(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"cannot be written to .*file/checkpoints: Not a directory"):
    Checkpointer(tmp_path / "file" / "checkpoints").save(1, _state(), {})


_WRITER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from compmod_jax.training.checkpoint import Checkpointer
writer = Checkpointer(Path(sys.argv[1]), keep_last=2, asynchronous=True)
restored = writer.restore({"x": jnp.zeros((300, 300)), "step": jnp.int32(0)})
step = restored[2] if restored else 0
while True:
  step += 1
  writer.save(step, {"x": jnp.full((300, 300), step, jnp.float32), "step": jnp.int32(step)}, {})
  print(step, flush=True)
"""


@pytest.mark.programs
def test_after_kills_at_random_moments_the_last_complete_checkpoint_opens(tmp_path):
  chance = random.Random(0)
  command = [sys.executable, "-W", "error", "-c", _WRITER, str(tmp_path)]
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  saved = 0
  for _ in range(3):
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
      started = int(process.stdout.readline())
      time.sleep(chance.uniform(0, 0.3))
      process.send_signal(signal.SIGKILL)
      begun = max([started, *map(int, process.stdout.read().split())])
    assert started == saved + 1  # it went on from what the one before had left
    reader = Checkpointer(tmp_path, report=pytest.fail)
    restored = reader.restore(_abstract({"x": jnp.zeros((300, 300)), "step": jnp.int32(0)}))
    saved = restored[2] if restored else 0
    assert saved >= begun - 1  # only the one being written may be missing
    if restored:
      assert int(restored[0]["step"]) == saved
      assert np.all(np.asarray(restored[0]["x"]) == saved)


def _full(path):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_and_stop(writer, error):
  writer.save(1, _state(), {})
  if error is not None:
    raise error


def test_an_error_while_saving_is_raised_late_but_hides_no_other(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint_files, "write_manifest", _full)
  writer = Checkpointer(tmp_path, asynchronous=True)
  with pytest.raises(UserError, match="No space left"), writer:
    _save_and_stop(writer, None)
  reports = []
  writer = Checkpointer(tmp_path, asynchronous=True, report=reports.append)
  with pytest.raises(KeyboardInterrupt), writer:
    _save_and_stop(writer, KeyboardInterrupt)
  assert "No space left" in reports[0]


@pytest.mark.programs
@pytest.mark.parametrize("end", ["", "sys.exit(3)", "1 / 0"])
def test_a_program_that_ends_while_saving_completes_the_checkpoint(tmp_path, end):
  code = (
    "import sys; from pathlib import Path; import jax.numpy as jnp\n"
    "from compmod_jax.training.checkpoint import Checkpointer\n"
    "with Checkpointer(Path(sys.argv[1]), asynchronous=True) as writer:\n"
    f"  writer.save(1, {{'x': jnp.ones((1000, 2000))}}, {{}}); {end}"
  )
  command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=30)
  assert done.returncode == {"": 0, "sys.exit(3)": 3, "1 / 0": 1}[end]
  assert Checkpointer(tmp_path, report=pytest.fail).read_meta() == (1, {})
