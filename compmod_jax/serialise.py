"""Configurations to plain JSON and back, strictly: unknown fields and wrong types are errors."""

import types
import typing
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.strategies import configure_tagged_union

from compmod_jax import errors

T = TypeVar("T")


def _converter() -> cattrs.Converter:
  converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)

  def literal_union(kind: Any) -> bool:
    members = typing.get_args(kind)
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return is_union and sum(attrs.has(m) or hasattr(m, "__dataclass_fields__") for m in members) > 1

  def hook(kind: Any) -> Any:
    configure_tagged_union(kind, converter, tag_name="kind")
    return converter.get_structure_hook(kind, cache_result=False)

  def unhook(kind: Any) -> Any:
    configure_tagged_union(kind, converter, tag_name="kind")
    return converter.get_unstructure_hook(kind, cache_result=False)

  converter.register_structure_hook_factory(literal_union, hook)
  converter.register_unstructure_hook_factory(literal_union, unhook)
  return converter


def to_json(config: Any) -> dict[str, Any]:
  """A configuration as nested dictionaries, lists, strings and numbers."""
  return _converter().unstructure(config)


def from_json(kind: type[T], data: Any) -> T:
  """The configuration of class `kind` that `to_json` made `data` from.

  Raises:
    UserError: a field that the class does not have, a missing one, or a bad value.
  """
  try:
    return _converter().structure(data, kind)
  except errors.UserError:
    raise
  except Exception as error:
    reasons = "; ".join(cattrs.transform_error(error))
    raise errors.UserError(f"The saved {kind.__name__} cannot be read: {reasons}.") from error
