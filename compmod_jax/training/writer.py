"""What a run leaves to read: metrics.jsonl, TensorBoard, progress, and where it all came from.

`metrics.jsonl` is the truth: one JSON object a line, written line by line, with `kind`, mostly
`step`, and values. TensorBoard shows the same scalars.
"""

import io
import json
import math
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from compmod_jax.core import durable, extras
from compmod_jax.core.errors import UserError
from compmod_jax.core.metric_lines import METRICS, parse_records
from compmod_jax.training.progress import Progress
from compmod_jax.training.provenance import provenance

__all__ = ["Writer", "provenance"]


class Writer:
  """Writes a run's metrics and shows its progress.

  Args:
    workdir: where metrics.jsonl and the folder tensorboard go; made when first needed. None keeps
      nothing, as processes other than the first want it.
    total_steps: steps of the whole run, for the estimate of the time left.
    quiet: shows nothing.
    stream: where progress goes, stderr by default.
    tensorboard: whether to write event files.

  Raises:
    UserError: from any method that writes: metrics.jsonl cannot be written.
  """

  def __init__(
    self,
    workdir: Path | None,
    *,
    total_steps: int,
    quiet: bool = False,
    stream: TextIO | None = None,
    tensorboard: bool = True,
  ):
    self._workdir = None if workdir is None else Path(workdir)
    self._progress = Progress(total_steps, quiet=quiet or workdir is None, stream=stream)
    self._file: io.FileIO | None = None
    self._use_tensorboard = tensorboard
    self._events: _Events | None = None
    self._purge_step: int | None = None

  def write(self, kind: str, step: int | None, values: Mapping[str, Any]) -> None:
    """Appends a line to metrics.jsonl and shows it.

    Args:
      kind: "start", "train", "eval", "final" or whatever a reader will look for.
      step: completed steps, or None where the line belongs to none.
      values: by name: numbers, strings, arrays (lists in the file), nested dictionaries. NaN and
        infinities become null. Floats also go to TensorBoard, under kind/split/name.
    """
    head = {"kind": kind} | ({} if step is None else {"step": int(step)})
    values = {name: _plain(value) for name, value in values.items()}
    if self._workdir is not None:
      with _told(self._workdir / METRICS):
        self._append(json.dumps(head | values, allow_nan=False) + "\n")
      if step is not None:
        self._write_events(kind, int(step), values)
    self._progress.show(kind, step, values)

  def status(self, text: str, done: int | None = None, total: int | None = None) -> None:
    """Shows what goes on besides training steps, such as ("evaluating valid", 3, 12)."""
    self._progress.status(text, done, total)

  def say(self, text: str) -> None:
    """Shows a line that stays."""
    self._progress.say(text)

  def rewind(self, step: int, ends: Mapping[str, int] = MappingProxyType({})) -> None:
    """Drops what was written beyond a step, as a run that resumes there writes it again.

    Args:
      step: the last step that stays.
      ends: other last steps for lines of some kinds, -1 for none.
    """
    self._progress.rewind()
    self._purge_step = step + 1
    if self._workdir is None or not (self._workdir / METRICS).exists():
      return
    self.close_files()
    self._keep(lambda record: _stays(record, step, ends))

  def _keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Leaves out the records of metrics.jsonl that are not wanted, and lines that are none."""
    assert self._workdir is not None
    path = self._workdir / METRICS
    with _told(path):
      lines = list(parse_records(path.read_bytes()))
      damaged = [number for number, (_, record) in enumerate(lines, start=1) if record is None]
      if damaged and damaged != [len(lines)]:  # the last one may be torn by a kill: no news
        places = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        self.say(f"note: damaged lines of {path} were left out: {places} (of {len(lines)})")
      whole = (line for line, record in lines if record is not None and wanted(record))
      durable.write(path, (line + b"\n" for line in whole))

  def close_files(self) -> None:
    """Flushes and closes the files; the next `write` opens them again."""
    if self._file is not None:
      self._file.close()
      self._file = None
    if self._events is not None:
      self._events.close()
      self._events = None

  def close(self) -> None:
    """Closes the files and takes the progress display off the terminal."""
    self.close_files()
    self._progress.close()

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _append(self, line: str) -> None:
    # Unbuffered: the line is out at once, and after an error none is left to be tried again.
    data, file = line.encode(), self._open()
    while data:
      data = data[file.write(data) :]

  def _open(self) -> io.FileIO:
    if self._file is None:
      assert self._workdir is not None
      self._workdir.mkdir(parents=True, exist_ok=True)
      path = self._workdir / METRICS
      if path.is_file() and _damaged(path.read_bytes()):
        self._keep(lambda record: True)  # a kill may have torn a line; nothing may be glued to it
      self._file = open(path, "ab", buffering=0)  # noqa: SIM115
    return self._file

  def _write_events(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    floats = {name: value for name, value in values.items() if isinstance(value, float)}
    if not self._use_tensorboard or not floats:
      return
    assert self._workdir is not None
    prefix = "/".join([kind, *(str(values[key]) for key in ("split",) if key in values)])
    with _told(self._workdir / "tensorboard"):
      if self._events is None:
        self._events = _Events(self._workdir / "tensorboard", self._purge_step)
      self._events.write(step, {f"{prefix}/{name}": value for name, value in floats.items()})


class _Events:
  """An event file, written at once.

  tensorboardX's own writer has a queue and a thread, which a signal's end would not wait for, and
  which print tracebacks when the disk is full.
  """

  def __init__(self, folder: Path, purge_step: int | None):
    with extras.needed():
      from tensorboardX.proto import event_pb2, summary_pb2
      from tensorboardX.record_writer import masked_crc32c

    # Classes that protobuf makes at run time, so that no checker knows them.
    self._event: Any = event_pb2
    self._summary: Any = summary_pb2
    self._checksum = masked_crc32c
    folder.mkdir(parents=True, exist_ok=True)
    # Nanoseconds, as two files within a second would share a name.
    path = folder / f"events.out.tfevents.{int(time.time())}.{time.time_ns()}"
    self._file = open(path, "xb", buffering=0)  # noqa: SIM115
    self._append(file_version="brain.Event:2")
    if purge_step is not None:
      # Makes TensorBoard forget what was written before a resume and undone by it.
      log = self._event.SessionLog
      self._append(step=purge_step, session_log=log(status=log.START))

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends scalars of a step."""
    make = self._summary.Summary
    parts = [make.Value(tag=name, simple_value=value) for name, value in values.items()]
    self._append(step=step, summary=make(value=parts))

  def _append(self, **fields: object) -> None:
    def checked(data: bytes) -> bytes:
      return data + struct.pack("<I", self._checksum(data))

    content = self._event.Event(wall_time=time.time(), **fields).SerializeToString()
    data = checked(struct.pack("<Q", len(content))) + checked(content)
    while data:
      data = data[self._file.write(data) :]

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class _told:
  """Turns an `OSError` about a file into a `UserError`."""

  def __init__(self, path: Path):
    self._path = path

  def __enter__(self) -> None: ...

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    if isinstance(error, OSError):
      raise UserError(
        f"{self._path}: cannot be written ({error.strerror or error}). Free some space or make "
        "the place writable, and run the same command again; it continues from the last checkpoint."
      ) from error


def _plain(value: object) -> Any:
  """A value as JSON can hold it."""
  if isinstance(value, Mapping):
    return {str(key): _plain(inner) for key, inner in value.items()}
  if isinstance(value, str | bool | int) or value is None:
    return value
  if to_list := getattr(value, "tolist", None):  # numpy and jax, scalars too
    value = to_list()
  if isinstance(value, list | tuple):
    return [_plain(inner) for inner in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return value if isinstance(value, str | bool | int) else str(value)


def _damaged(data: bytes) -> bool:
  """Whether a line is torn, or none."""
  torn = not data.endswith(b"\n") and data != b""
  return torn or any(record is None for _, record in parse_records(data))


def _stays(line: Mapping[str, Any], step: int, ends: Mapping[str, int]) -> bool:
  """Whether a line is kept; one without a step always is."""
  return line.get("step", -1) <= ends.get(line.get("kind", ""), step)
