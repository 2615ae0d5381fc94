"""Checkpoints: exact, strict, and alive after kills, damage and full disks."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from compmod_jax.errors import UserError
from train import checkpoint_files
from train.checkpoint import Checkpointer

ROOT = Path(__file__).parents[1]


class Carry(NamedTuple):
  hidden: Any
  nothing: Any


@flax.struct.dataclass
class State:
  step: Any
  params: Any
  opt_state: Any
  carry: Any
  rng: Any
  ema: Any = None


def _state(step=0, *, width=8, sharding=None):
  params = {
    "encoder": {"kernel": jnp.arange(8.0 * width).reshape(8, width) + step},
    "embedding": jnp.full((8, 4), step, jnp.bfloat16),
  }
  if sharding is not None:
    params = jax.device_put(params, sharding)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  return State(
    step=jnp.asarray(step, jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    carry=Carry(hidden=jnp.zeros((0, 3)), nothing=()),
    rng=jax.random.key_data(jax.random.key(step)),
  )


def _abstract(state, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state
  )


def _assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for ours_leaf, theirs_leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert ours_leaf.dtype == theirs_leaf.dtype
    np.testing.assert_array_equal(np.asarray(ours_leaf), np.asarray(theirs_leaf))


@pytest.fixture
def saved(tmp_path):
  """A directory with checkpoints of steps 1 and 2."""
  writer = Checkpointer(tmp_path)
  for step in (1, 2):
    writer.save(step, _state(step), {"position": step})
  writer.wait()
  return tmp_path


def test_a_state_of_any_containers_comes_back_exactly(tmp_path):
  meta = {"iterator": {"next": 5}, "best": float("-inf"), "name": "ä"}
  writer = Checkpointer(tmp_path)
  assert writer.latest() is None
  assert writer.restore(_abstract(_state())) is None
  assert writer.read_meta() is None
  assert writer.save(7, _state(7), meta)
  writer.wait()
  reader = Checkpointer(tmp_path)
  assert reader.latest() == 7
  assert reader.read_meta() == (7, meta)
  state, read, step = reader.restore(_abstract(_state()))
  _assert_same(state, _state(7))
  assert (read, step) == (meta, 7)


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
  advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  state = advance({str(i): jnp.zeros((500, 500)) for i in range(8)})
  writer = Checkpointer(tmp_path, keep_last=9)
  wanted = {}
  for step in range(3):
    wanted[step] = float(state["0"][0, 0])
    writer.save(step, state, {})
    for _ in range(20):
      state = advance(state)
    jax.block_until_ready(state)
  writer.wait()
  for step, value in wanted.items():
    restored, _, _ = writer.restore(_abstract(state), step=step)
    assert all(np.all(np.asarray(leaf) == value) for leaf in restored.values())


@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8), (8, 4)])
def test_a_checkpoint_opens_on_another_number_of_devices(tmp_path, before, after):
  def sharding(count):
    mesh = jax.make_mesh(
      (count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
    )
    return NamedSharding(mesh, PartitionSpec("data"))

  assert len(jax.devices()) == 8
  state = _state(3, sharding=sharding(before))
  writer = Checkpointer(tmp_path, asynchronous=False)
  writer.save(3, state, {})
  restored, _, _ = Checkpointer(tmp_path).restore(
    _abstract(_state()).replace(params=_abstract(_state().params, sharding(after)))
  )
  _assert_same(restored, state)
  kernel = restored.params["encoder"]["kernel"]
  assert kernel.sharding.is_equivalent_to(sharding(after), 2)
  assert len(kernel.sharding.device_set) == after


def test_only_the_last_n_stay(tmp_path):
  writer = Checkpointer(tmp_path, keep_last=2)
  for step in (10, 20, 30, 40):
    writer.save(step, _state(step), {})
  writer.wait()
  assert writer.steps() == [30, 40]
  state, _, step = writer.restore(_abstract(_state()), step=30)
  assert step == 30
  _assert_same(state, _state(30))


def test_a_step_already_saved_is_saved_again_only_by_force(saved):
  writer = Checkpointer(saved)
  assert writer.restore(_abstract(_state()))[2] == 2
  assert not writer.save(2, _state(5), {})
  assert writer.save(2, _state(5), {}, force=True)
  state, _, step = writer.restore(_abstract(_state()))
  assert step == 2
  _assert_same(state, _state(5))
  assert writer.steps() == [1, 2]
  assert len(os.listdir(saved)) == 2


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
  reader.wait()
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


def test_a_state_that_differs_is_refused_with_the_list_of_differences(saved):
  other = _state(width=6)
  other.params["extra"] = other.params.pop("embedding")
  with pytest.raises(UserError) as caught:
    Checkpointer(saved).restore(_abstract(other.replace(step=jnp.float32(0))))
  message = str(caught.value)
  assert "params/encoder/kernel is float32[8, 8], wanted float32[8, 6]" in message
  assert "params/extra missing from the checkpoint" in message
  assert "params/embedding unexpected (bfloat16[8, 4] in the checkpoint)" in message
  assert "step is int32[], wanted float32[]" in message


def test_the_list_of_differences_ends_after_ten(saved):
  with pytest.raises(UserError, match=r"and \d+ more\. Run with") as caught:
    Checkpointer(saved).restore(_abstract({str(i): jnp.ones(1) for i in range(30)}))
  assert str(caught.value).count("missing from") == 10


def test_a_newer_schema_is_refused_and_not_taken_for_damage(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint_files, "SCHEMA_VERSION", 2)
  Checkpointer(tmp_path, asynchronous=False).save(1, _state(), {})
  monkeypatch.undo()
  with pytest.raises(UserError, match="schema version 2"):
    Checkpointer(tmp_path).restore(_abstract(_state()))


def test_an_older_schema_is_brought_up_to_date(saved, monkeypatch):
  def migrate(record):
    return record | {"schema": 2, "meta": {"position": [record["meta"]["position"]]}}

  monkeypatch.setattr(checkpoint_files, "SCHEMA_VERSION", 2)
  monkeypatch.setitem(checkpoint_files.MIGRATIONS, 1, migrate)
  assert Checkpointer(saved).restore(_abstract(_state()))[1] == {"position": [2]}


def test_what_a_killed_write_left_is_ignored_and_then_cleared(saved):
  leftover = saved / "tmp_step_00000003" / "state"
  leftover.mkdir(parents=True)
  writer = Checkpointer(saved)
  assert writer.latest() == 2
  assert writer.restore(_abstract(_state()))[2] == 2
  assert leftover.exists()  # a reader must not disturb a writer
  writer.save(4, _state(4), {})
  writer.wait()
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
  assert writer.save(3, _state(3), {})
  writer.wait()
  assert writer.steps() == [1, 2, 3]
  assert "Traceback" not in capfd.readouterr().err


def test_an_unwritable_place_is_an_error_that_names_it(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=r"cannot be written to .*file/checkpoints: Not a directory"):
    Checkpointer(tmp_path / "file" / "checkpoints").save(1, _state(), {})


def test_only_plain_arrays_and_json_are_saved(tmp_path):
  writer = Checkpointer(tmp_path)
  with pytest.raises(TypeError, match="rng"):
    writer.save(1, {"rng": jax.random.key(0)}, {})
  with pytest.raises(TypeError, match="not JSON"):
    writer.save(1, _state(), {"iterator": b"bytes"})
  assert writer.latest() is None
  with pytest.raises(UserError, match="keep_last is 0"):
    Checkpointer(tmp_path, keep_last=0)


def test_no_file_of_a_checkpoint_is_a_pickle(saved):
  files = [path for path in saved.rglob("*") if path.is_file()]
  names = {path.name for path in files if path.parent.name != "d"}
  assert names == {
    "meta.json", "manifest.json", "manifest.ocdbt", "process_0", "commit_success.txt",
    "_METADATA", "_CHECKPOINT_METADATA", "_sharding",
  }  # fmt: skip
  for path in files:
    data = path.read_bytes()
    if path.name.startswith("_") or path.suffix == ".json":
      json.loads(data)
    assert not data.startswith(b"\x80")


_WRITER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from train.checkpoint import Checkpointer
writer = Checkpointer(Path(sys.argv[1]), keep_last=2)
restored = writer.restore({"x": jnp.zeros((300, 300)), "step": jnp.int32(0)})
step = restored[2] if restored else 0
while True:
  step += 1
  writer.save(step, {"x": jnp.full((300, 300), step, jnp.float32), "step": jnp.int32(step)}, {})
  print(step, flush=True)
"""


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


def test_importing_orbax_here_warns_of_nothing():
  code = "from train.checkpoint import Checkpointer; Checkpointer('x')"
  command = [sys.executable, "-W", "error", "-c", code]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
