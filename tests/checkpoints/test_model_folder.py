"""Model folders: what is read is what was written, whatever happens in between."""

import errno
import hashlib
import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from compmod_jax.checkpoints.model_folder import (
  check_sizes,
  load_model_folder,
  read_tensors,
  save_model_folder,
)
from compmod_jax.core.errors import UserError


class Killed(BaseException):
  """Stands for the end of the process: nothing may catch it."""


class _FileOperations:
  """Counts file-system operations and ends the process, as it were, before the n-th."""

  names = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

  def __init__(self):
    self.left = None
    sys.addaudithook(self._hook)

  def _hook(self, event, arguments):
    if self.left is None or event not in self.names:
      return
    self.left -= 1
    if self.left < 0:
      self.left = None
      raise Killed


_OPERATIONS = _FileOperations()  # an audit hook cannot be removed: one for the whole process


def _save(folder, value, **extra):
  params = {"layer": {"kernel": np.full((2, 3), value, np.float32)}}
  save_model_folder(
    folder, params=params, files={"a.model": b"\x00\xff"}, meta={"v": value, **extra}
  )


def _value(folder):
  params, files, meta = load_model_folder(folder)
  assert files == {"a.model": b"\x00\xff"}
  assert np.all(params["layer"]["kernel"] == meta["v"])
  return meta["v"]


def test_parameters_files_and_meta_come_back_as_they_were(tmp_path):
  params = {
    "encoder": {
      "kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not row-major in memory
      "half": jnp.asarray([1.5, -2.0], jnp.bfloat16),
      "empty": np.zeros((0, 4), np.float32),
    },
    "scale": jnp.float32(3.0),
    "count": np.array([1, -1], np.int32),
    "mask": np.array([True, False]),
  }
  meta = {"config": {"layers": [1, 2], "name": "ä"}, "best": 0.1}
  save_model_folder(tmp_path / "m", params=params, files={"t.model": b"abc"}, meta=meta)
  loaded, files, loaded_meta = load_model_folder(tmp_path / "m")
  assert files == {"t.model": b"abc"}
  assert loaded_meta == meta
  assert loaded["encoder"]["half"].dtype == ml_dtypes.bfloat16
  assert loaded["scale"].shape == ()
  for ours, theirs in (
    (loaded["encoder"], params["encoder"]),
    (loaded, {k: params[k] for k in ("scale", "count", "mask")}),
  ):
    for name, want in theirs.items():
      assert ours[name].dtype == np.asarray(want).dtype
      np.testing.assert_array_equal(ours[name], np.asarray(want))


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_model(tmp_path):
  folder = tmp_path / "best"
  _save(folder, 0)
  seen, before = set(), 0
  for operation in range(200):
    value = operation + 1
    _OPERATIONS.left = operation
    try:
      _save(folder, value)
    except Killed:
      found = _value(folder)
      assert found in (before, value)
      seen.add(found == value)
      before = found
    else:
      break
    finally:
      _OPERATIONS.left = None
  assert operation > 8
  assert seen == {True, False}
  assert _value(folder) == value
  assert os.listdir(tmp_path) == ["best"]


def test_the_next_save_clears_what_a_kill_left_behind(tmp_path):
  folder = tmp_path / "best"
  _save(folder, 1)
  leftover = tmp_path / ".best.new"
  leftover.mkdir()
  (leftover / "params.safetensors").write_bytes(b"half")
  folder.rename(tmp_path / ".best.previous")
  assert _value(folder) == 1
  _save(folder, 2)
  assert _value(folder) == 2
  assert os.listdir(tmp_path) == ["best"]


def test_a_full_disk_keeps_the_old_model_and_says_what_to_do(tmp_path, monkeypatch):
  folder = tmp_path / "best"
  _save(folder, 1)

  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(UserError, match=r"best: cannot be written \(No space left.*free some space"):
    _save(folder, 2)
  monkeypatch.undo()
  assert _value(folder) == 1
  assert os.listdir(tmp_path) == ["best"]


def test_a_failed_last_rename_puts_the_old_model_back(tmp_path, monkeypatch):
  folder = tmp_path / "best"
  _save(folder, 1)
  rename = Path.rename

  def failing(self, target):
    if self.name == ".best.new":
      raise OSError(errno.EIO, os.strerror(errno.EIO))
    return rename(self, target)

  monkeypatch.setattr(Path, "rename", failing)
  with pytest.raises(UserError, match="cannot be written"):
    _save(folder, 2)
  monkeypatch.undo()
  assert os.listdir(tmp_path) == ["best"]
  assert _value(folder) == 1


@pytest.mark.parametrize("name", ["params.safetensors", "model.json", "a.model"])
@pytest.mark.parametrize("damage", ["remove", "truncate", "garbage", "flip"])
def test_damage_to_any_file_is_an_error_that_names_it(tmp_path, name, damage):
  _save(tmp_path / "m", 1)
  path = tmp_path / "m" / name
  data = path.read_bytes()
  if damage == "remove":
    path.unlink()
  elif damage == "truncate":
    path.write_bytes(data[: len(data) // 2])
  elif damage == "garbage":
    path.write_bytes(os.urandom(len(data)))
  else:
    at = data.index(b'"v": 1') + 5 if name == "model.json" else len(data) - 1
    path.write_bytes(data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
  with pytest.raises(UserError, match=name):
    load_model_folder(tmp_path / "m")


def test_a_missing_folder_and_a_newer_schema_are_errors_that_say_so(tmp_path):
  with pytest.raises(UserError, match=r"nowhere: there is none"):
    load_model_folder(tmp_path / "nowhere")
  _save(tmp_path / "m", 1)
  path = tmp_path / "m" / "model.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
  with pytest.raises(UserError, match="schema version 99"):
    load_model_folder(tmp_path / "m")


def test_a_description_cannot_point_outside_of_its_folder(tmp_path):
  _save(tmp_path / "m", 1)
  path = tmp_path / "m" / "model.json"
  record = json.loads(path.read_text())
  record["sha256"]["../secret"] = "0" * 64
  path.write_text(json.dumps(record))
  with pytest.raises(UserError, match="no file of the folder"):
    load_model_folder(tmp_path / "m")


@pytest.mark.parametrize("name", ["model.json", "../x", "a/b", ".hidden", ""])
def test_file_names_that_could_do_harm_are_refused(tmp_path, name):
  with pytest.raises(ValueError, match="cannot be the name"):
    save_model_folder(tmp_path / "m", params={}, files={name: b""}, meta={})


def test_a_parameter_name_with_a_slash_is_refused(tmp_path):
  with pytest.raises(ValueError, match="a/b"):
    save_model_folder(tmp_path / "m", params={"a/b": np.ones(1)}, files={}, meta={})


def _tensors(header, data=b"", *, length=None):
  """The bytes of a safetensors file with this header."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  size = len(text) if length is None else length
  return size.to_bytes(8, "little") + text + data


def _one(dtype, shape, start, stop):
  return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}}


def test_tensors_are_those_that_the_package_reads():
  given = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(2.5),
    "empty": np.zeros((0, 7), np.int8),
    "c": np.array([True, False]),
  }
  found = read_tensors(safetensors.numpy.save(given, metadata={"format": "pt"}))
  assert set(found) == set(given)
  for name, value in given.items():
    assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found[name], value)
    assert found[name].flags.writeable
  assert read_tensors(safetensors.numpy.save({})) == {}


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (b"", "the header has"),
    (_tensors({}, length=1 << 62), "the header has 4,611,686,018,427,387,904 bytes"),
    (_tensors(b"[" * 100_000), "nested deeper"),
    (_tensors(b"[1]"), "is no object"),
    (_tensors(_one("F32", [1 << 40], 0, 1 << 42)), "ends at byte .* the file is cut"),
    (_tensors(_one("F32", [1 << 62, 4], 0, 0)), "has 0 bytes, but its shape needs"),
    (_tensors(_one("F32", [2], 0, 4), bytes(4)), "has 4 bytes, but its shape needs 8"),
    (_tensors(_one("F32", [-1], 0, 4), bytes(4)), "has the shape"),
    (_tensors(_one("F32", [1] * 100, 0, 4), bytes(4)), "has the shape"),
    (_tensors(_one("F32", [1.0], 0, 4), bytes(4)), "has the shape"),
    (_tensors(_one("F32", [1], 4, 8), bytes(8)), "begins at byte 4, not 0"),
    (_tensors(_one("F32", [1], 0, 4), bytes(8)), "the tensors end at"),
    (_tensors(_one("F3", [1], 0, 4), bytes(4)), "of the type 'F3'"),
    (_tensors({"x": {}}), "says too little"),
    (_tensors({"x": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}), "of the type"),
  ],
)
def test_tensors_that_do_not_fit_their_file_are_refused_before_they_are_allocated(data, message):
  with pytest.raises(ValueError, match=message):
    read_tensors(data)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("/".join("x" * 1000),)])
def test_parameters_inside_of_parameters_are_refused(tmp_path, names):
  _save(tmp_path / "m", 1.0)
  data = safetensors.numpy.save({name: np.zeros(1, np.float32) for name in names})
  (tmp_path / "m/params.safetensors").write_bytes(data)
  _describe(tmp_path / "m", lambda record: None)
  with pytest.raises(UserError, match=r"its tensors cannot be read: parameter"):
    load_model_folder(tmp_path / "m")


def _describe(folder, change):
  """Writes a description that has the right checksums after a change."""
  record = json.loads((folder / "model.json").read_text())
  for name in record["sha256"]:
    record["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
  change(record)
  record["meta_sha256"] = hashlib.sha256(json.dumps(record["meta"]).encode()).hexdigest()
  (folder / "model.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", ["..", "/dev/zero", "a\0b", "a/b", "zero"])
def test_a_description_cannot_name_devices_or_paths(tmp_path, name):
  folder = tmp_path / "m"
  _save(folder, 1.0)
  (folder / "zero").symlink_to("/dev/zero")
  _describe(folder, lambda record: record["sha256"].update({name: "0"}))
  message = "is no plain file" if name == "zero" else "which is no file of the folder"
  with pytest.raises(UserError, match=message):
    load_model_folder(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema": 1e999, "meta": {}, "sha256": {}}'])
def test_a_description_beyond_reason_is_damaged(tmp_path, text):
  _save(tmp_path / "m", 1.0)
  (tmp_path / "m/model.json").write_text(text)
  with pytest.raises(UserError, match="it is no model description"):
    load_model_folder(tmp_path / "m")


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("dim", 10**9),
    ("ffn_dim", 10**9),
    ("heads", 10**12),
    ("encoder_layers", 10**12),
    ("layers", 1e12),
    ("convolution", 10**9),
    ("max_length", 10**9),
    ("random_positions", 10**9),
  ],
)
def test_sizes_that_the_parameters_do_not_allow_are_refused_before_a_model_is_made(field, value):
  params = {"a": {"kernel": np.zeros((3, 4))}, "b": np.zeros(5)}
  model = {"dim": 4, "max_length": 100, "heads": 2, "encoder_layers": 1, "norm": "pre"}
  check_sizes(Path("m"), params, model)
  check_sizes(Path("m"), params, [1])
  with pytest.raises(UserError, match=rf"m/model\.json says model\.{field} = .*Restore the folder"):
    check_sizes(Path("m"), params, {**model, field: value})
