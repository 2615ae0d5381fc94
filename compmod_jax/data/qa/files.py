"""Finds and reads data files, inside archives too, without unpacking them to disk.

An archive (`.zip`, `.tar`, `.tar.gz`, `.tgz`) stands in a path where a folder would:
`train_val.tgz/questions/train/moti.csv` is a file inside `train_val.tgz`.
"""

import fnmatch
import functools
from collections.abc import Mapping
from pathlib import Path

from compmod_jax.core.errors import UserError, check
from compmod_jax.core.untrusted import OverLimit, archive_files, gunzip
from compmod_jax.data.base import DataError
from compmod_jax.data.sources.text import matching_files, read_lines

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
_LISTED = 12


def find_files(folder: Path, pattern: str) -> list[Path]:
  """The files that a pattern names, in the order of their paths.

  Args:
    folder: where to look.
    pattern: a path under it, with `*` and `?` in any of its parts; an archive counts as a folder.
      `**` stands for any folders, but not inside archives.

  Raises:
    UserError: there is no such file; lists those that are there.
    DataError: a damaged archive.
  """
  parts = Path(pattern).parts
  check(
    parts and not Path(pattern).is_absolute() and ".." not in parts,
    f"pattern is {pattern!r}; it must name files under {folder}: leave out '/' at its start and"
    " '..'.",
  )
  cut = next((n for n, part in enumerate(parts, 1) if part.endswith(ARCHIVES)), len(parts))
  found = matching_files(folder, str(Path(*parts[:cut])))
  present = [path for path in folder.rglob("*") if path.is_file()] if not found else []
  if parts[cut - 1].endswith(ARCHIVES):
    present += [path / name for path in found for name in sorted(_members(path, _state(path)))]
    found = [path for path in present if _matches(path, parts[cut:])]
  if not found:
    names = sorted(str(path.relative_to(folder)) for path in present)
    listing = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    raise UserError(
      f"No file in {folder} is named {pattern}; there are: {listing or 'none'}. Set folder and"
      " patterns so that they name existing files."
    )
  return found


def _matches(path: Path, wanted: tuple[str, ...]) -> bool:
  archive = _archive(path)
  parts = path.relative_to(archive).parts if archive else ()
  return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def beside(path: Path, *names: str) -> Path:
  """The first of `names`, plain or with `.gz`, that is a file in the folder of `path`.

  Raises:
    UserError: none of them is there.
  """
  for name in names:
    for candidate in (path.parent / name, path.parent / f"{name}.gz"):
      if is_file(candidate):
        return candidate
  raise UserError(
    f"{path} needs {' or '.join(names)} beside it, and there is none; put it there, or leave"
    f" {path.name} out."
  )


def is_file(path: Path) -> bool:
  """Whether `path` is a file, on disk or inside an archive."""
  archive = _archive(path)
  if archive is None:
    return path.is_file()
  return str(path.relative_to(archive)) in _members(archive, _state(archive))


def read_text(path: Path) -> list[str]:
  """The lines of a UTF-8 file on disk or inside an archive, gunzipped if its name ends in `.gz`.

  Raises:
    DataError: the file is empty, not UTF-8 or damaged.
    UserError: there is no such file.
  """
  archive = _archive(path)
  if archive is None:
    return read_lines(path)
  members = _members(archive, _state(archive))
  name = str(path.relative_to(archive))
  check(name in members, f"{path} cannot be read: {archive.name} holds no file of this name.")
  data = members[name]
  try:
    text = (gunzip(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = bytes(error.object).count(b"\n", 0, error.start) + 1
    raise DataError(
      f"{path}:{line} is not UTF-8 ({error.reason}); convert the file, for example with iconv."
    ) from error
  except OverLimit as error:
    raise DataError(f"{path} {error}.") from error
  except ValueError as error:
    raise DataError(f"{path} {error}; fetch it again.") from error
  if not text.strip():
    raise DataError(f"{path} is empty; it must hold questions, or what belongs to them.")
  return text.removesuffix("\n").split("\n")


def forget() -> None:
  """Frees the archive that was read last; it is kept in memory until then."""
  _members.cache_clear()


def _archive(path: Path) -> Path | None:
  """The archive that `path` points into."""
  return next((p for p in path.parents if p.name.endswith(ARCHIVES) and p.is_file()), None)


def _state(path: Path) -> tuple[int, int]:
  stat = path.stat()
  return stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=1)
def _members(archive: Path, state: tuple[int, int]) -> Mapping[str, bytes]:
  """Name -> content of every file of an archive; `state` is its size and time of change."""
  # All at once: a compressed tar can only be read from its start, and sets may have 28,000 members.
  del state
  try:
    # A member may have a name that begins with "/": it stays below its archive all the same.
    return {str(Path(name.lstrip("/"))): data for name, data in archive_files(archive)}
  except OverLimit as error:
    raise DataError(f"{archive} {error}.") from error
  except ValueError as error:
    raise DataError(f"{archive} {error}; fetch it again.") from error
  except OSError as error:
    raise UserError(f"{archive} cannot be read: {error.strerror}.") from error
