"""Mesh axes, logical axis rules, and placement of parameters and batches.

Parameters name their dimensions with logical words (`embed`, `heads`, `mlp`, `vocab`, ...); `RULES`
says which mesh axis each is split over, or which axes together. A dimension that its mesh axes do
not divide stays whole. XLA derives the rest, so that a layout changes where numbers are computed
and never which; only `on_parts` says more.

With several processes every array here is global. A process holds the rows of a batch that its
devices need (`part_of`); `fetch` gives every process the whole of an array.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  get_abstract_mesh,
  use_abstract_mesh,
)
from jaxtyping import PyTree

from compmod_jax.core import errors
from compmod_jax.core.types import Params

RULES: dict[str, str | tuple[str, ...] | None] = {
  "batch": ("data", "fsdp", "expert"),
  "tokens": ("data", "fsdp"),  # rows that experts share: every expert sees those of its group
  "time": "sequence",
  "expert_time": ("sequence", "tensor"),  # of rows that are sent to experts, each by one device
  "embed": "fsdp",
  "heads": "tensor",
  "head_dim": None,
  "mlp": "tensor",
  "vocab": "tensor",
  "position": None,
  "projections": None,
  "router": None,
  "key": None,
  "units": None,
  "experts": ("expert", "tensor"),
  "expert_mlp": None,
  "norm": None,
  "members": None,
  "layers": None,
  "kinds": None,
}


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each mesh axis; -1 (one axis at most) takes what is left."""

  data: int = -1
  """Copies of the model, each with its own part of the batch."""
  fsdp: int = 1
  """Parts that parameters and the batch are split into."""
  tensor: int = 1
  """Parts that heads, feed-forward units, experts and the vocabulary are split into."""
  expert: int = 1
  """Parts that experts are split into, besides those of `tensor`; other layers split the batch."""
  sequence: int = 1
  """Parts that the time axis of batches is split into; attention gathers keys and values, other
  layers that mix times what they read."""

  def __post_init__(self):
    sizes = dataclasses.asdict(self)
    for name, size in sizes.items():
      errors.check(
        size == -1 or size >= 1,
        f"mesh.{name} is {size}; it must be a positive number of devices, or -1 for the rest.",
      )
    errors.check(
      list(sizes.values()).count(-1) <= 1, f"mesh is {sizes}; only one axis may be -1, the rest."
    )


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh of a configuration over all devices.

  Raises:
    UserError: the axes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dataclasses.asdict(config)
  fixed = int(np.prod([size for size in sizes.values() if size != -1]))
  rest = len(devices) // fixed
  shape = {name: rest if size == -1 else size for name, size in sizes.items()}
  total = int(np.prod(list(shape.values())))
  errors.check(
    total == len(devices),
    f"mesh is {sizes}, which needs {max(total, fixed)} devices or a multiple, but there are"
    f" {len(devices)}; its axes must multiply to the number of devices. Change --config.mesh.*.",
  )
  automatic = (AxisType.Auto,) * len(shape)
  return jax.make_mesh(
    tuple(shape.values()), tuple(shape), axis_types=automatic, devices=tuple(devices)
  )


def logical(initializer: Callable[..., jax.Array], *names: str | None) -> Callable[..., Any]:
  """An initializer whose parameter carries the logical names of its dimensions."""
  return nn.with_logical_partitioning(initializer, names)


def _spec(
  names: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
  axes: list[str | tuple[str, ...] | None] = []
  for name, size in zip(names, shape, strict=True):
    axis = RULES[name] if name is not None else None
    parts = np.prod([mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ())])
    axes.append(axis if axis is not None and size % int(parts) == 0 else None)
  return PartitionSpec(*axes)


def parameter_shardings(boxed: Params, mesh: Mesh) -> Params:
  """Sharding of every parameter of a tree (real or abstract) that carries logical names."""

  def one(leaf: object) -> NamedSharding:
    if isinstance(leaf, nn.LogicallyPartitioned):
      return NamedSharding(mesh, _spec(tuple(leaf.names), leaf.value.shape, mesh))
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree.map(one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def divided_over(axis: str, shardings: PyTree, shapes: PyTree) -> PyTree:
  """Shardings that divide arrays further: each in the first whole dimension that an axis divides.

  Args:
    axis: of the mesh; no array is divided over it yet.
    shardings: a tree of `NamedSharding`.
    shapes: of the arrays, a tree of `jax.ShapeDtypeStruct`.
  """

  def one(place: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    parts, held = place.mesh.shape[axis], place.shard_shape(leaf.shape)
    axes = [*place.spec, *(None,) * (leaf.ndim - len(place.spec))]
    for dimension, size in enumerate(leaf.shape):
      if held[dimension] == size and size % parts == 0:
        axes[dimension] = axis
        break
    return NamedSharding(place.mesh, PartitionSpec(*axes))

  return jax.tree.map(one, shardings, shapes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of what every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of arrays whose first axis is the batch."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_multiple(mesh: Mesh) -> int:
  """Rows of a batch must be a multiple of this."""
  return int(np.prod([mesh.shape[axis] for axis in RULES["batch"] or ()]))


def part_of(mesh: Mesh) -> tuple[int, int]:
  """(number, count) of the equal parts of a batch's rows, of which this process holds one.

  Processes whose devices hold the same rows (of a model split over processes) share a part.

  Raises:
    UserError: the rows that this process's devices hold do not lie together.
  """
  rows = batch_multiple(mesh)
  held = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
  mine = sorted({row for index in held if index for row in range(*index[0].indices(rows))})
  number, rest = divmod(mine[0], len(mine))
  errors.check(
    rest == 0 and mine[-1] - mine[0] + 1 == len(mine),
    f"mesh is {dict(mesh.shape)}, under which process {jax.process_index()} would hold rows {mine}"
    f" of {rows}; they must lie together. Let mesh.data or mesh.fsdp be a multiple of the number of"
    " processes, or the product of the other axes.",
  )
  return number, rows // len(mine)


def column_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
  """The sharding of a column of a batch, rows first and then times."""
  names = ("batch", "time", *(None for _ in shape[2:]))[: len(shape)]
  return NamedSharding(mesh, _spec(names, shape, mesh))


def place_batch(
  batch: Mapping[str, np.ndarray], mesh: Mesh, part: tuple[int, int] = (0, 1)
) -> dict[str, jax.Array]:
  """Global arrays from rows of a batch; the columns of matrices are times.

  Args:
    batch: all rows, the same in every process; or those of one part.
    mesh: the devices.
    part: which of how many parts of the rows these are; see `part_of`.
  """
  number, parts = part

  def one(value: np.ndarray) -> jax.Array:
    shape, before = (len(value) * parts, *value.shape[1:]), len(value) * number

    def held(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      start, stop, _ = index[0].indices(shape[0])
      return value[(slice(start - before, stop - before), *index[1:])]

    return jax.make_array_from_callback(shape, column_sharding(shape, mesh), held)

  return {name: one(np.asarray(value)) for name, value in batch.items()}


def fetch(tree: PyTree) -> PyTree:
  """The values of arrays, whole, on the host of every process; all processes must call it."""

  def whole(leaf: object) -> object:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
      return leaf
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.jit(lambda x: x, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(
      leaf
    )

  return jax.device_get(jax.tree.map(whole, tree))


def platform_of(array: jax.Array) -> str:
  """What a program that is being traced is for: what its mesh says, else the default backend."""
  device = jax.typeof(array).sharding.mesh.abstract_device or get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def tracing_for(device: AbstractDevice) -> AbstractContextManager[object]:
  """A context in which programs are traced for a device that need not be here (`platform_of`).

  Nothing can run in it: arrays with values are made outside.
  """
  # Devices are given by meshes; an axis of type `Auto` leaves shardings out of the program's types.
  return use_abstract_mesh(AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=device))


def parts_of(array: jax.Array, name: str) -> int:
  """Into how many parts a mesh splits dimensions of this logical name, where an array is on one."""
  sizes = jax.typeof(array).sharding.mesh.shape
  axes = RULES[name] or ()
  return int(np.prod([sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes)]))


def part_number(name: str) -> jax.Array:
  """Inside `on_parts`, which part of dimensions of this logical name a device has."""
  axis = RULES[name]
  assert isinstance(axis, str), f"{name} is split over {axis}"
  return jax.lax.axis_index(axis)


def on_parts(
  function: Callable[..., PyTree],
  arguments: Sequence[PyTree],
  names: Sequence[PyTree],
  *,
  result: Sequence[str | None] | None = None,
) -> PyTree:
  """Runs a function on every device's part of its arguments, where they lie on a mesh.

  Inside, collective operations over mesh axes join the parts. Without a mesh of several devices
  (one made by `make_mesh`) the function runs once on everything.

  Args:
    function: of the arguments' parts.
    arguments: arrays, or trees of arrays.
    names: for each argument the logical names of its dimensions, in a tree of the same structure; a
      dimension that its mesh axis does not divide is handed over whole.
    result: those of the result's dimensions (of a tree's arrays: their first), each split where one
      of the last argument is, or not at all; as the last argument if not given.
  """
  mesh: Any = jax.typeof(arguments[-1]).sharding.mesh
  axes = {field.name for field in dataclasses.fields(MeshConfig)}
  ours = axes <= set(mesh.axis_names) and set(mesh.axis_types) == {AxisType.Auto}
  if not ours or mesh.size == 1:
    return function(*arguments)

  def specs(argument: PyTree, names: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, words: _spec(words, leaf.shape, mesh), argument, names)

  inside = tuple(map(specs, arguments, names))
  outside = inside[-1]
  if result is not None:
    placed = dict(zip(names[-1], outside, strict=True))
    outside = PartitionSpec(*(placed.get(word) if word else None for word in result))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
  return mapped(*arguments)
