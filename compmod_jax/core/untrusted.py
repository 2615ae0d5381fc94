"""Reading of bytes that others wrote, within limits: JSON, gzip, archives, plain files.

A file of a few kilobytes can hold JSON that is nested a million levels deep, or expand to more than
the memory holds. Every reader of such bytes goes through the functions here. What they raise is a
`ValueError` whose message is a predicate, to be put behind the name of the file (and the line):

    try:
      fields = parse_json(line)
    except ValueError as error:
      raise DataError(f"{path}:{number} is no JSON ({error}); mend the line.") from error
"""

import io
import json
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import IO, Any

MIB = 1 << 20
JSON_DEPTH = 100
"""Most levels of nesting of JSON; data sets and configurations have at most about ten."""
JSON_SIZE = 1024 * MIB
"""Most characters of one JSON text."""
FREE = 256 * MIB
"""Bytes that compressed data may always expand to, however small they are."""
EXPANSION = 100
"""Beyond `FREE`: most bytes for each compressed byte. Text of people gives 3 to 6."""
LARGEST = 16 * 1024 * MIB
"""Most bytes that compressed data may expand to, however large they are."""
MEMBERS = 1_000_000
"""Most files of an archive."""

_CHUNK = MIB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class OverLimit(ValueError):
  """What bytes hold, or expand to, is over a limit; the message names the value and the limit."""


def parse_json(
  text: str | bytes, *, depth: int = JSON_DEPTH, size: int = JSON_SIZE, surrogates: bool = True
) -> Any:
  """The value of a JSON text; never raises RecursionError.

  Args:
    text: the JSON text; bytes are UTF-8 (or UTF-16 or UTF-32, as JSON allows).
    depth: most levels of nesting; `1` has none, `[[1]]` two.
    size: most characters or bytes.
    surrogates: whether strings may hold unpaired surrogates such as `"\\ud800"`, which no encoding
      can write.

  Raises:
    OverLimit: longer than `size`, nested deeper than `depth`, or a number of over 4,300 digits.
    UnicodeDecodeError, JSONDecodeError: it is no JSON (both are `ValueError`).
    ValueError: a string holds an unpaired surrogate.
  """
  if len(text) > size:
    raise OverLimit(f"it is {len(text):,} characters long, and at most {size:,} are read")
  if isinstance(text, bytes):
    text = text.decode(json.detect_encoding(text))
  try:
    value = json.loads(text)
  except RecursionError:
    raise _too_deep(depth) from None
  except json.JSONDecodeError:
    raise
  except ValueError as error:  # Python's limit on the digits of an integer
    raise OverLimit("a number in it has over 4,300 digits") from error
  if text.count("[") + text.count("{") > depth and _deeper(value, depth):
    raise _too_deep(depth)
  if not surrogates and _SURROGATE.search(text):
    try:
      json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      half = f"\\u{ord(error.object[error.start]):04x}"
      raise ValueError(f"a string in it holds {half}, half of a character") from error
  return value


def _too_deep(depth: int) -> OverLimit:
  return OverLimit(f"it is nested deeper than {depth} levels")


def _deeper(value: object, depth: int) -> bool:
  """Whether a value has more than `depth` levels of lists and dictionaries."""
  level = [value]
  for _ in range(depth + 1):
    level = [one for one in level if isinstance(one, dict | list)]
    if not level:
      return False
    level = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
  return True


def read_bounded(path: Path, limit: int) -> bytes:
  """The bytes of a plain file.

  Raises:
    OverLimit: it is larger than `limit` bytes.
    ValueError: it is no plain file but a folder, a pipe or a device, which may have no end.
    OSError: it cannot be read.
  """
  with open_plain(path) as file:
    size = os.fstat(file.fileno()).st_size
    data = file.read(size + 1) if size <= limit else b""
  if max(size, len(data)) > limit:
    raise OverLimit(f"has {size:,} bytes, and at most {limit:,} are read of such a file")
  return data


def memory() -> int:
  """Bytes of this machine's memory."""
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_plain_name(name: object) -> bool:
  """Whether this is the name of a file in a folder, which leads nowhere else."""
  return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def open_plain(path: Path) -> IO[bytes]:
  """Opens a plain file to be read.

  Raises:
    ValueError: it is no plain file but a folder, a pipe or a device, which may have no end.
    OSError: it cannot be read.
  """
  if not stat.S_ISREG(path.stat().st_mode):  # asked before: opening a pipe would wait for ever
    raise ValueError("is no plain file")
  return path.open("rb")


def gunzip(data: bytes) -> bytes:
  """What gzipped bytes hold.

  Raises:
    OverLimit: that is more than `expansion_limit` allows.
    ValueError: the bytes are damaged or cut off.
  """
  limit = expansion_limit(len(data))
  chunks, total = [], 0
  try:
    with GzipFile(fileobj=io.BytesIO(data)) as file:
      while chunk := file.read(_CHUNK):
        total += len(chunk)
        if total > limit:
          raise _expands(len(data), limit, "unpack it with gzip -d and give the unpacked file")
        chunks.append(chunk)
  except (BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f"is not a complete gzip file ({error})") from error
  return b"".join(chunks)


def expansion_limit(size: int) -> int:
  """Most bytes that `size` compressed bytes may expand to."""
  return min(max(FREE, EXPANSION * size), LARGEST)


def archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
  """(name, content) of every file in a zip or tar archive; tar may be gzipped.

  Raises:
    OverLimit: together they are larger than `expansion_limit` allows, or over `MEMBERS`.
    ValueError: the archive is damaged, cut off or encrypted, or no plain file.
    OSError: it cannot be read.
  """
  with open_plain(path) as file:
    size = path.stat().st_size
    try:
      yield from (_zipped if path.suffix == ".zip" else _tarred)(file, size)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
      raise _no_archive(error) from error
    except (EOFError, RuntimeError) as error:  # cut off; encrypted, or compressed in another way
      raise _no_archive(error) from error
    except OSError as error:
      if error.errno is None:  # of gzip, not of the disk
        raise _no_archive(error) from error
      raise
    # Sizes, names and fields in headers that cannot be; zipfile trips over a name without letters.
    except (ValueError, OverflowError, MemoryError, IndexError, struct.error) as error:
      if isinstance(error, OverLimit):
        raise
      raise _no_archive(error) from error


def _zipped(file: IO[bytes], size: int) -> Iterator[tuple[str, bytes]]:
  with zipfile.ZipFile(file) as zipped:
    infos = [info for info in zipped.infolist() if not info.is_dir()]
    _check_members(size, len(infos), sum(info.file_size for info in infos))
    # No more is unpacked of a member than the size that is given for it here.
    yield from ((info.filename, zipped.read(info)) for info in infos)


def _tarred(file: IO[bytes], size: int) -> Iterator[tuple[str, bytes]]:
  zipped = file.read(2) == b"\x1f\x8b"
  file.seek(0)
  with tarfile.open(fileobj=file, mode="r:gz" if zipped else "r:") as tar:
    total = 0
    for count, member in enumerate(tar, start=1):
      if member.size < 0:
        raise ValueError(f"it has a file of {member.size} bytes")
      total += member.size
      _check_members(size, count, total)
      content = tar.extractfile(member) if member.isfile() else None
      if content is not None:
        yield member.name, content.read()


def _check_members(size: int, count: int, total: int) -> None:
  if count > MEMBERS:
    raise OverLimit(f"holds over {MEMBERS:,} files, the most that are read")
  if total > expansion_limit(size):
    raise _expands(size, expansion_limit(size), "unpack it and name the unpacked files")


def _expands(size: int, limit: int, remedy: str) -> OverLimit:
  return OverLimit(
    f"has {size:,} bytes and expands to over {limit:,}, the most that is unpacked of so few; if you"
    f" trust it, {remedy}"
  )


def _no_archive(error: Exception) -> ValueError:
  return ValueError(f"is not a complete archive that can be read ({error})")
