"""Configurations to plain JSON and back, strictly: unknown fields and wrong types are errors."""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from compmod_jax.core import errors
from compmod_jax.core.types import Dataclass

T = TypeVar("T")

Hint: TypeAlias = object
"""The type of a field as annotations write it: a class, a union, `tuple[X, ...]`, `Literal[...]`.
Python has no class of them all."""

# Names the class of a field that may hold one of several; the other one where the class has a field
# of this name itself.
TAG, OTHER_TAG = "kind", "class"
_UNTAGGED = "untagged"
_ABSENT = "absent"
_RENAMED = "renamed"
_COMPLETED = "completed"


def once(kind: type) -> dict[str, Any]:
  """Metadata of a field that had this one class before it could hold several.

  What was saved then has no tag, and is of this class.
  """
  return {_UNTAGGED: kind}


def absent(value: object) -> dict[str, Any]:
  """Metadata of a field that is newer than saved configurations, for which its default is wrong.

  What was saved without the field has this value instead.
  """
  return {_ABSENT: value}


def renamed(names: Mapping[str, str]) -> dict[str, Any]:
  """Metadata of a field some of whose values have new names: saved ones -> new."""
  return {_RENAMED: names}


def completed(complete: Callable[[Any, Mapping[str, Any]], Any]) -> dict[str, Any]:
  """Metadata of a field of which more has to be given now than when configurations were saved.

  Args:
    complete: from the saved value of the field, and those of all fields of its class, to the value
      that says the same.
  """
  return {_COMPLETED: complete}


def to_json(config: Dataclass, kind: Hint = None) -> dict[str, Any]:
  """A configuration as nested dictionaries, lists, strings and numbers.

  Args:
    config: the configuration.
    kind: the union that it is one class of; it is tagged then.
  """
  return _write(kind or type(config), config)


def from_json(kind: type[T] | Hint, data: object, *, untagged: type | None = None) -> T:
  """The configuration of class `kind` that `to_json` made `data` from; defaults fill what is left.

  Args:
    kind: a class or a union of classes.
    data: what `to_json` returned.
    untagged: the class of a union's data without a tag.

  Raises:
    UserError: a field that the class does not have, a missing one, or a bad value.
  """
  try:
    return _read(kind, data, "", untagged)
  except errors.UserError as error:
    name = getattr(kind, "__name__", "configuration")
    raise errors.UserError(f"The saved {name} cannot be read: {error}") from error


def _members(kind: Hint) -> tuple[Hint, ...]:
  """The types of a union; of any other type, itself."""
  union = typing.get_origin(kind) in (typing.Union, types.UnionType)
  return typing.get_args(kind) if union else (kind,)


def _classes(kind: Hint) -> dict[str, type]:
  """The dataclasses of a union, by name."""
  return {
    m.__name__: m for m in _members(kind) if isinstance(m, type) and dataclasses.is_dataclass(m)
  }


def _with_subclasses(classes: Iterable[type]) -> dict[str, type]:
  """These dataclasses and all that are made of them, as far as their files were run, by name."""
  found: dict[str, type] = {}
  for one in classes:
    found |= {one.__name__: one, **_with_subclasses(one.__subclasses__())}
  return {name: one for name, one in found.items() if dataclasses.is_dataclass(one)}


def _write(kind: Hint, value: object) -> Any:
  if dataclasses.is_dataclass(value):
    hints = typing.get_type_hints(type(value))
    fields = dataclasses.fields(value)
    written = {f.name: _write(hints[f.name], getattr(value, f.name)) for f in fields}
    tag = OTHER_TAG if TAG in written else TAG
    return written | ({tag: type(value).__name__} if len(_classes(kind)) > 1 else {})
  if isinstance(value, tuple | list):
    return [_write(inner, item) for inner, item in zip(_items(kind, value), value, strict=True)]
  return value


def _items(kind: Hint, values: Sequence[object]) -> list[Hint]:
  """The type of every item of a tuple: `tuple[X, ...]` or `tuple[X, Y]`, `None` allowed beside."""
  for member in _members(kind):
    inner = typing.get_args(member)
    if typing.get_origin(member) is tuple:
      return [inner[0]] * len(values) if inner[-1] is ... else list(inner)
  return [object] * len(values)


def _read(kind: Hint, data: object, path: str, untagged: type | None = None) -> Any:
  members, classes = _members(kind), _classes(kind)
  if data is None and type(None) in members:
    return None
  if classes:
    return _read_class(classes, data, path, untagged)
  literals = [member for member in members if typing.get_origin(member) is typing.Literal]
  if literals:
    choices = [choice for member in literals for choice in typing.get_args(member)]
    errors.check(data in choices, f"{path} is {data!r}; it must be one of: {_words(choices)}.")
    return data
  if any(typing.get_origin(member) is tuple for member in members):
    return _read_tuple(kind, data, path)
  return _read_scalar(members, data, path)


def _read_tuple(kind: Hint, data: object, path: str) -> tuple[Any, ...]:
  if not isinstance(data, list | tuple):
    raise errors.UserError(f"{path} is {data!r}; it must be a list.")
  inner = _items(kind, data)
  errors.check(len(inner) == len(data), f"{path} is {data!r}; it must have {len(inner)} items.")
  pairs = enumerate(zip(inner, data, strict=True))
  return tuple(_read(kind, item, f"{path}.{i}") for i, (kind, item) in pairs)


def _read_scalar(members: tuple[Hint, ...], data: object, path: str) -> Any:
  if type(data) in members:
    return data
  if float in members and type(data) is int:
    return float(data)
  names = _words("none" if m is type(None) else getattr(m, "__name__", m) for m in members)
  raise errors.UserError(f"{path} is {data!r}; it must be of type {names}.")


def _read_class(
  classes: dict[str, type], data: object, path: str, untagged: type | None
) -> Dataclass:
  where = path or "the configuration"
  if not isinstance(data, Mapping):
    raise errors.UserError(f"{where} is {data!r}; it must be a table of fields.")
  data = dict(data)
  default = untagged.__name__ if untagged else None
  tag = OTHER_TAG if OTHER_TAG in data else TAG
  name = data.pop(tag, default) if len(classes) > 1 else next(iter(classes))
  errors.check(
    isinstance(name, str), f"{where} has no {TAG!r}; it must be one of: {_words(classes)}."
  )
  if len(classes) > 1 and name not in classes:
    classes = _with_subclasses(classes.values())
    errors.check(
      name in classes,
      f"{path}.{tag} is {errors.short(name)}, which is no class of the package."
      f"{errors.near(str(name), classes, 0.8)} The file of a class of your own has to be run first:"
      " give it to a program as --code FILE, or import it. The package has"
      f" {_words(sorted(classes))}.",
    )
  chosen = classes[str(name)]
  fields = {field.name: field for field in dataclasses.fields(chosen)}
  prefix = f"{path}." if path else ""
  for field in data:
    errors.check_choice(f"a field of {where}", field, fields)
  for field in fields.values():
    needed = field.default is field.default_factory is dataclasses.MISSING
    errors.check(
      field.name in data or not needed, f"{prefix}{field.name} is missing and has no default."
    )
  hints = typing.get_type_hints(chosen)
  for name, field in fields.items():
    names = field.metadata.get(_RENAMED, {})
    if isinstance(data.get(name), str):
      data[name] = names.get(data[name], data[name])
    if name in data and _COMPLETED in field.metadata:
      data[name] = field.metadata[_COMPLETED](data[name], data)
  values = {
    name: _read(hints[name], value, f"{prefix}{name}", fields[name].metadata.get(_UNTAGGED))
    for name, value in data.items()
  }
  for field in fields.values():
    if _ABSENT in field.metadata:
      values.setdefault(field.name, field.metadata[_ABSENT])
  return chosen(**values)


def _words(names: Iterable[object]) -> str:
  return ", ".join(str(name) for name in names)
