"""Checkpoints: exact, strict, and alive after kills, damage and full disks."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from compmod_jax.core.errors import UserError
from compmod_jax.training import checkpoint_files
from compmod_jax.training.checkpoint import Checkpointer

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
  return tmp_path


def test_a_state_of_any_containers_comes_back_exactly(tmp_path):
  meta = {"iterator": {"next": 5}, "best": float("-inf"), "name": "ä"}
  writer = Checkpointer(tmp_path)
  assert writer.latest() is None
  assert writer.restore(_abstract(_state())) is None
  assert writer.read_meta() is None
  assert writer.save(7, _state(7), meta)
  reader = Checkpointer(tmp_path)
  assert reader.latest() == 7
  assert reader.read_meta() == (7, meta)
  state, read, step = reader.restore(_abstract(_state()))
  _assert_same(state, _state(7))
  assert (read, step) == (meta, 7)


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path):
  advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  state = advance({str(i): jnp.zeros((500, 500)) for i in range(8)})
  writer = Checkpointer(tmp_path, keep_last=9, asynchronous=True)
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
  writer = Checkpointer(tmp_path)
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
  Checkpointer(tmp_path).save(1, _state(), {})
  monkeypatch.undo()
  with pytest.raises(UserError, match="schema version 2"):
    Checkpointer(tmp_path).restore(_abstract(_state()))


def test_an_older_schema_is_brought_up_to_date(saved, monkeypatch):
  def migrate(record):
    return record | {"schema": 2, "meta": {"position": [record["meta"]["position"]]}}

  monkeypatch.setattr(checkpoint_files, "SCHEMA_VERSION", 2)
  monkeypatch.setitem(checkpoint_files.MIGRATIONS, 1, migrate)
  assert Checkpointer(saved).restore(_abstract(_state()))[1] == {"position": [2]}


def test_only_plain_arrays_and_json_are_saved(tmp_path):
  writer = Checkpointer(tmp_path)
  with pytest.raises(TypeError, match="rng"):
    writer.save(1, {"rng": jax.random.key(0)}, {})
  with pytest.raises(TypeError, match="not JSON"):
    writer.save(1, _state(), {"iterator": b"bytes"})
  assert writer.latest() is None
  with pytest.raises(UserError, match="keep_last is 0"):
    Checkpointer(tmp_path, keep_last=0)


def test_no_file_of_a_checkpoint_is_a_pickle_and_none_is_unpickled(saved, monkeypatch):
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
  for name in ("load", "loads", "Unpickler"):
    monkeypatch.setattr(pickle, name, None)
  assert Checkpointer(saved).restore(_abstract(_state()))[2] == 2


def test_importing_orbax_here_warns_of_nothing():
  code = "from compmod_jax.training.checkpoint import Checkpointer; Checkpointer('x')"
  command = [sys.executable, "-W", "error", "-c", code]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
