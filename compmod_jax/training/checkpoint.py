"""Checkpoints of a training state that survive kills, full disks and damage. Only here: orbax.

    checkpoints/step_00000300/
      state/           the arrays, written by orbax (ocdbt: chunks with JSON descriptions)
      meta.json        schema version, step, path, shape and dtype of every leaf, the caller's meta
      manifest.json    sha256 of every other file: written last

A checkpoint is written under a temporary name, hashed, brought to the disk, and only then renamed;
what a kill leaves behind never has a checkpoint's name. Restoring verifies every hash before
anything is interpreted, and nothing is unpickled.
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from compmod_jax.core import durable, extras
from compmod_jax.core.errors import UserError
from compmod_jax.training import checkpoint_files as files
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.orbax_messages import quiet_orbax


class Checkpointer:
  """Writes and reads the checkpoints of one directory. Safe to call from several threads.

  Args:
    directory: where the checkpoints lie; made by the first save.
    keep_last: how many of the newest checkpoints stay, >= 1.
    asynchronous: `save` returns once the state is copied off the devices; the rest happens in
      threads, and the next `save` or `wait` waits for it and raises its error. Only inside of
      `with Checkpointer(...)`: at the end of a program Python starts no more threads, so that a
      save under way could not end, nor could the program.
    report: is called with a sentence on each damaged checkpoint that restoring skips.
    group: the processes that train together. All save and restore together, onto storage that they
      share; process 0 verifies, and writes all but the arrays of the others.
  """

  def __init__(
    self,
    directory: Path,
    keep_last: int = 3,
    *,
    asynchronous: bool = False,
    report: Callable[[str], None] = lambda text: None,
    group: Group = Group(),
  ):
    with extras.needed():
      import orbax.checkpoint as ocp

    if keep_last < 1:
      raise UserError(f"keep_last is {keep_last}; it must be at least 1. Leave it out for 3.")
    quiet_orbax()
    self._ocp = ocp
    self._group = group
    # Naming the processes makes orbax wait for them without the devices, which threads must not.
    active = set(range(jax.process_count())) if group.links else None
    several = ocp.options.MultiprocessingOptions(active_processes=active)
    self._orbax = ocp.AsyncCheckpointer(
      ocp.StandardCheckpointHandler(multiprocessing_options=several),
      multiprocessing_options=several,
    )
    self._directory = Path(directory).absolute()
    self._keep_last = keep_last
    self._asynchronous = asynchronous
    self._report = report
    self._lock = threading.RLock()
    self._commit: threading.Thread | None = None
    self._error: BaseException | None = None
    self._good: set[Path] = set()  # written or verified by this process
    self._damaged: set[Path] = set()

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    try:
      self.wait()
    except Exception as late:
      if error is None:
        raise
      self._report(str(late))  # the error that ends the program is the one to show

  def steps(self) -> list[int]:
    """The steps of which there is a checkpoint, oldest first, damaged ones included."""
    return sorted({files.order(path)[0] for path in files.newest_first(self._directory)})

  def latest(self) -> int | None:
    """The newest step of which there is a checkpoint, or None; says nothing of damage."""
    return max(self.steps(), default=None)

  def save(self, step: int, state: PyTree, meta: Mapping[str, Any], force: bool = False) -> bool:
    """Writes a checkpoint and then removes those beyond `keep_last`.

    Args:
      step: number of completed steps, >= 0.
      state: pytree of jax or numpy arrays of any shapes. Its buffers may be donated as soon as
        this returns. No typed PRNG keys: keep their raw uint32 data.
      meta: anything that JSON can hold.
      force: writes even though this process already wrote or restored this very step.

    Returns:
      False if there was nothing to do.

    Raises:
      UserError: the disk is full or cannot be written, now or during the asynchronous save
        before; older checkpoints are untouched.
    """
    with self._lock:
      self.wait()
      if not force and any(files.order(path)[0] == step for path in self._good):
        return False
      leaves = files.leaves_by_path(state)
      record = {
        "schema": files.SCHEMA_VERSION,
        "step": step,
        "leaves": files.layout(leaves),
        "meta": meta,
      }
      self._begin(step, leaves, json.dumps(record))
      if not self._asynchronous:
        self.wait()
      return True

  def wait(self) -> None:
    """Returns when the checkpoint being written is complete; raises the error of its writing."""
    with self._lock:
      if self._commit is not None:
        self._commit.join()
        self._commit = None
      error, self._error = self._error, None
      if error is not None:
        raise error

  def read_meta(self) -> tuple[int, dict[str, Any]] | None:
    """(step, meta) of the checkpoint that `restore` would take, without its arrays.

    Raises:
      UserError: as `restore`.
    """
    with self._lock:
      self.wait()
      path = self._newest_good(None)
      if path is None:
        return None
      record = files.read_record(path)
      return record["step"], record["meta"]

  def restore(
    self, abstract_state: PyTree, *, step: int | None = None
  ) -> tuple[PyTree, dict[str, Any], int] | None:
    """Restores the newest good checkpoint, or that of `step`, onto any number of devices.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct`, whose shardings the result gets; leaves
        without a sharding go to the first local device.
      step: a step of `steps()`; None takes the newest.

    Returns:
      (state, meta, step), or None where there is no checkpoint at all.

    Raises:
      UserError: every checkpoint is damaged, or the one found has another structure, other shapes
        or dtypes (they are listed), or a newer version of this program wrote it.
    """
    with self._lock:
      self.wait()
      path = self._newest_good(step)
      if path is None:
        return None
      record = files.read_record(path)
      wanted = files.leaves_by_path(abstract_state)
      files.compare(path, record["leaves"], files.layout(wanted))
      shardings = {name: _sharding(leaf) for name, leaf in wanted.items()}
      abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in wanted.items()
        if leaf.size
      }
      arrays = self._orbax.restore(path / "state", args=self._ocp.args.StandardRestore(abstract))
      for name, leaf in wanted.items():
        if not leaf.size:
          arrays[name] = jax.device_put(np.zeros(leaf.shape, leaf.dtype), shardings[name])
      leaves = [arrays[name] for name in wanted]
      state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
      return state, record["meta"], record["step"]

  def _newest_good(self, step: int | None) -> Path | None:
    name = self._group.decide("checkpoint", lambda: self._choose(step))
    if name is None:
      return None
    self._good.add(self._directory / name)
    return self._directory / name

  def _choose(self, step: int | None) -> str | None:
    """Name of the newest checkpoint that is whole."""
    found = files.newest_first(self._directory)
    candidates = [path for path in found if step is None or files.order(path)[0] == step]
    problems = []
    for path in candidates:
      problem = None if path in self._good else files.damage(path)
      if problem is None:
        return path.name
      problems.append(f"{path.name}: {problem}")
      if path not in self._damaged:
        self._damaged.add(path)
        self._report(f"checkpoint {path} is damaged ({problem}); trying the one before it")
    if not candidates and step is None:
      return None
    raise UserError(
      f"no checkpoint in {self._directory} can be used"
      + (f" for step {step}" if step is not None else "")
      + (f" ({'; '.join(problems)})" if problems else "")
      + ". Copy one back from a backup, or move the directory away to start from the beginning."
    )

  def _begin(self, step: int, leaves: Mapping[str, Any], record: str) -> None:
    """Copies the state off the devices and leaves the rest to threads."""
    target = self._directory / files.free_name(self._directory, step)
    temporary = self._directory / f"tmp_{target.name}"
    try:
      if self._group.primary:
        self._prepare(temporary, sum(leaf.nbytes for leaf in leaves.values()) + len(record))
        (temporary / "meta.json").write_text(record)
      # orbax cannot write empty arrays; the record is enough to make them again.
      arrays = {path: leaf for path, leaf in leaves.items() if leaf.size}
      self._orbax.save(temporary / "state", args=self._ocp.args.StandardSave(arrays))
    except (OSError, ValueError) as error:
      raise self._write_error(temporary, error) from error
    self._commit = threading.Thread(target=self._finish, args=(temporary, target))
    self._commit.start()

  def _prepare(self, temporary: Path, size: int) -> None:
    durable.make_folder(self._directory)
    for path in self._directory.glob("tmp_step_*"):  # left by kills
      shutil.rmtree(path)
    # Asked beforehand, as this is the usual failure and orbax takes long and many words over it.
    free, needed = shutil.disk_usage(self._directory).free, int(1.02 * size) + 2**20
    if free < needed:
      raise OSError(f"it needs {needed / 1e6:.1f} MB and the disk has {free / 1e6:.1f} MB left")
    temporary.mkdir()

  def _finish(self, temporary: Path, target: Path) -> None:
    """Makes a checkpoint of what orbax is writing. Runs in a thread of its own."""
    try:
      self._orbax.wait_until_finished()
      if self._group.primary:
        files.write_manifest(temporary)
        temporary.rename(target)
        durable.sync(self._directory)
      self._good.add(target)
      if self._group.primary:
        self._remove_old(target)
    except (OSError, ValueError) as error:
      self._error = self._write_error(temporary, error)
    except BaseException as error:
      self._error = error

  def _remove_old(self, written: Path) -> None:
    newest = files.newest_first(self._directory)
    step = files.order(written)[0]
    replaced = {path for path in newest if path != written and files.order(path)[0] == step}
    useful = [path for path in newest if path not in replaced | self._damaged]
    for path in set(newest) - set(useful[: self._keep_last]):
      # Renamed first: half removed under its own name it would pass for a damaged one.
      shutil.rmtree(path.rename(path.with_name(f"tmp_{path.name}")))
      self._good.discard(path)
      self._damaged.discard(path)

  def _write_error(self, temporary: Path, error: Exception) -> Exception:
    """What to raise for a failed write: a `UserError` where the disk, not the program, is wrong."""
    # tensorstore raises ValueError for everything and puts the system's error into the text.
    if not isinstance(error, OSError) and "os_error_code" not in str(error):
      return error
    shutil.rmtree(temporary, ignore_errors=True)
    reason = getattr(error, "strerror", None) or str(error).split(" [")[0].split(": ")[-1]
    found = UserError(
      f"checkpoint {temporary.name.removeprefix('tmp_')} cannot be written to {self._directory}: "
      f"{reason}. Free some space there (fewer checkpoints: keep_last is "
      f"{self._keep_last}) or make the place writable, and run the same command again; it "
      "continues from the checkpoint before, which is untouched."
    )
    found.__cause__ = error  # which also tells a full disk from a failing one
    return found


def _sharding(leaf: object) -> jax.sharding.Sharding:
  sharding = getattr(leaf, "sharding", None)
  return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
