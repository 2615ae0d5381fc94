"""The lines of `metrics.jsonl`: one JSON object each, with `kind` and mostly `step`.

A line that is none (torn by a kill, damaged on the disk) costs that line and no other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compmod_jax.core.untrusted import parse_json

METRICS = "metrics.jsonl"


def parse_records(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
  """Every line (between line feeds, none of them included) and its record; None where it is none.

  A record is a JSON object in UTF-8 whose `kind`, if it has one, is a string, and whose `step`, if
  it has one, is a whole number.
  """
  lines = data.split(b"\n")
  for line in lines[:-1] if not lines[-1] else lines:
    yield line, _record(line)


def read_records(path: str | Path) -> list[dict[str, Any]]:
  """The records of a file in their order; none if there is no such file."""
  path = Path(path)
  data = path.read_bytes() if path.exists() else b""
  return [record for _, record in parse_records(data) if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
  try:
    value = parse_json(line.decode())  # of UTF-8 alone: bytes with NULs might pass for UTF-16
  except ValueError:
    return None
  if not isinstance(value, dict) or not isinstance(value.get("kind", ""), str):
    return None
  step = value.get("step", 0)
  return value if isinstance(step, int) and not isinstance(step, bool) else None
