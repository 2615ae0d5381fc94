"""Names for what passes through many hands: parameters, JSON, configurations.

JAX takes a nested container wherever it takes an array, and no type says what its structure is:
`jaxtyping.PyTree` stands where any may be given. The names here are for those that have more to
them, so that a checker sees one given in place of another.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

Params: TypeAlias = Mapping[str, Any]
"""Parameters of a module by name: nested mappings. Their leaves are arrays, or what stands for them
before there are any: shapes, shardings, arrays boxed with the logical names of their dimensions."""

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
"""What `json.dumps` writes; tuples come back as lists."""


class Dataclass(Protocol):
  """An instance of any dataclass, as configurations are."""

  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
