"""Rows of data files, whose fields are checked as they are read."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compmod_jax.core.errors import short, short_list
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data.base import DataError
from compmod_jax.data.qa.files import beside, read_text

_REQUIRED = object()


class Row:
  """An object of a data file and where it stands.

  The methods return a field; one that is missing or null is `default`, or a `DataError` where there
  is none. So is a value of another kind: the message names file, place, field, value, rule and
  remedy.
  """

  def __init__(self, source: Path | str, at: str, fields: object):
    self.source, self.at = source, at
    if not isinstance(fields, dict):
      raise self.error(f"there is {short(fields)}; it must be an object with fields")
    self.fields: dict[str, Any] = fields

  @property
  def place(self) -> str:
    """Such as `dev.jsonl:17`, or `dev.json:data[0].paragraphs[3]`; the path is whole."""
    return f"{self.source}:{self.at}" if self.at else str(self.source)

  def error(self, what: str) -> DataError:
    """An exception about this row that ends with the remedy."""
    return DataError(f"{self.place}: {what}; mend the file, or choose the reader of its format.")

  def has(self, name: str) -> bool:
    """Whether there is a field of this name that is not null."""
    return self.fields.get(name) is not None

  def get(
    self, name: str, rule: str, kinds: type | tuple[type, ...], default: object = _REQUIRED
  ) -> Any:
    """A field of one of the types `kinds`; `rule` says what it must be."""
    value = self.fields.get(name)
    if value is None:
      if default is not _REQUIRED:
        return default
      raise self.error(
        f"field {name!r} is missing; the fields are: {short_list(self.fields)}; it must be {rule}"
      )
    if not isinstance(value, kinds) or (kinds is int and isinstance(value, bool)):
      raise self.error(f"field {name!r} is {short(value)}; it must be {rule}")
    return value

  def text(self, name: str, default: object = _REQUIRED) -> str:
    """A field that holds text."""
    return self.get(name, "text", str, default)

  def number(self, name: str, default: object = _REQUIRED) -> int:
    """A field that holds a whole number."""
    return self.get(name, "a whole number", int, default)

  def flag(self, name: str, default: object = _REQUIRED) -> bool:
    """A field that holds true or false."""
    return self.get(name, "true or false", bool, default)

  def texts(self, name: str, default: object = _REQUIRED) -> tuple[str, ...]:
    """A field that holds a list of texts."""
    values = self.get(name, "a list of texts", (list, tuple), default)
    if not all(isinstance(value, str) for value in values):
      raise self.error(f"field {name!r} is {short(values)}; it must be a list of texts")
    return tuple(values)

  def row(self, name: str) -> "Row":
    """A field that holds an object."""
    return Row(self.source, self._below(name), self.get(name, "an object with fields", dict))

  def rows(self, name: str, default: object = _REQUIRED) -> list["Row"]:
    """A field that holds a list of objects."""
    values = self.get(name, "a list of objects", list, default)
    at = self._below(name)
    return [Row(self.source, f"{at}[{n}]", value) for n, value in enumerate(values)]

  def info(self, *names: str) -> dict[str, Any]:
    """Those of the named fields that are there and not blank."""
    return {name: self.fields[name] for name in names if self.fields.get(name) not in (None, "")}

  def _below(self, name: str) -> str:
    return f"{self.at}.{name}" if self.at else name


def json_lines(path: Path) -> Iterator[Row]:
  """The objects of a file of JSON lines; blank lines are left out.

  Raises:
    DataError: a line is no JSON object.
  """
  for number, line in enumerate(read_text(path), start=1):
    if line.strip():
      try:
        fields = parse_json(line)
      except ValueError as error:
        raise DataError(f"{path}:{number} is no JSON ({error}); mend the line.") from error
      yield Row(path, str(number), fields)


def json_file(path: Path) -> Row:
  """The object that a JSON file holds.

  Raises:
    DataError: it holds none.
  """
  text = "\n".join(read_text(path))
  try:
    fields = parse_json(text)
  except json.JSONDecodeError as error:
    raise DataError(f"{path}:{error.lineno} is no JSON ({error.msg}); fetch it again.") from error
  except ValueError as error:
    raise DataError(f"{path} is no JSON of this format ({error}); fetch it again.") from error
  return Row(path, "", fields)


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
  """The rows of a comma-separated file with headings; a place is the line where a row starts.

  Args:
    path: of the file.
    columns: headings that it must have.

  Raises:
    DataError: a heading is missing, or a row has more or fewer fields than there are headings.
  """
  table = csv.reader(io.StringIO("\n".join(read_text(path)), newline=""), strict=True)
  line = 1
  try:
    heads = next(table)
    missing = [name for name in columns if name not in heads]
    if missing:
      raise DataError(
        f"{path}:1 has no column {', '.join(missing)}, only {short_list(heads)}; choose the reader"
        " of its format."
      )
    line = table.line_num + 1
    for fields in table:
      if fields and len(fields) != len(heads):
        raise DataError(
          f"{path}:{line} has {len(fields)} fields for {len(heads)} columns; mend the row."
        )
      if fields:
        yield Row(path, str(line), dict(zip(heads, fields, strict=True)))
      line = table.line_num + 1
  except csv.Error as error:
    # A quote that is not closed is found at the end of the file; it stands where the row starts.
    raise DataError(f"{path}:{line} is no CSV ({error}); mend the row.") from error


def labels_of(path: Path, count: int) -> list[str]:
  """The lines of the file of labels that belongs to `NAME.jsonl`: `NAME-labels.lst` beside it.

  Raises:
    UserError: it is not there.
    DataError: it has not `count` lines.
  """
  name = path.name.removesuffix(".gz").removesuffix(".jsonl")
  labels = beside(path, f"{name}-labels.lst")
  lines = [line.strip() for line in read_text(labels)]
  if len(lines) != count:
    raise DataError(
      f"{labels} has {len(lines)} lines for the {count} questions of {path.name}; line n of one"
      " must belong to line n of the other: fetch both again."
    )
  return lines
