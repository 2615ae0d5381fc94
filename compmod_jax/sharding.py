"""Mesh axes, logical axis rules, and placement of parameters and batches.

Parameters name their dimensions with logical words (`embed`, `heads`, `mlp`, `vocab`, ...); `RULES`
says which mesh axis each is split over. A dimension that its mesh axis does not divide stays whole.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from compmod_jax import errors

RULES: dict[str, str | tuple[str, ...] | None] = {
  "batch": ("data", "fsdp"),
  "time": None,
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
  "experts": "tensor",
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


def logical(initializer: Callable[..., jax.Array], *names: str) -> Callable[..., Any]:
  """An initializer whose parameter carries the logical names of its dimensions."""
  return nn.with_logical_partitioning(initializer, names)


def _spec(names: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
  axes: list[str | tuple[str, ...] | None] = []
  for name, size in zip(names, shape, strict=True):
    axis = RULES[name] if name is not None else None
    parts = np.prod([mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ())])
    axes.append(axis if axis is not None and size % int(parts) == 0 else None)
  return PartitionSpec(*axes)


def parameter_shardings(boxed: Any, mesh: Mesh) -> Any:
  """Sharding of every parameter of a tree (real or abstract) that carries logical names."""

  def one(leaf: Any) -> NamedSharding:
    if isinstance(leaf, nn.LogicallyPartitioned):
      return NamedSharding(mesh, _spec(tuple(leaf.names), leaf.value.shape, mesh))
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree.map(one, boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of what every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of arrays whose first axis is the batch."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_multiple(mesh: Mesh) -> int:
  """Rows of a batch must be a multiple of this."""
  return int(np.prod([mesh.shape[axis] for axis in RULES["batch"] or ()]))


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Global arrays from this process's rows of a batch."""
  sharding = batch_sharding(mesh)
  return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def on_parts(
  function: Callable[..., jax.Array], arguments: Sequence[Any], names: Sequence[Any]
) -> jax.Array:
  """Runs a function on every device's part of its arguments, where they lie on a mesh.

  Inside, collective operations over mesh axes join the parts. Without a mesh of several devices
  (one made by `make_mesh`) the function runs once on everything.

  Args:
    function: of the arguments' parts; the first dimension of its result is the last argument's.
    arguments: arrays, or trees of arrays.
    names: for each argument the logical names of its dimensions, in a tree of the same structure; a
      dimension that its mesh axis does not divide is handed over whole.
  """
  mesh = jax.typeof(arguments[-1]).sharding.mesh
  axes = {field.name for field in dataclasses.fields(MeshConfig)}
  ours = axes <= set(mesh.axis_names) and set(mesh.axis_types) == {AxisType.Auto}
  if not ours or mesh.size == 1:
    return function(*arguments)

  def specs(argument: Any, names: Any) -> Any:
    return jax.tree.map(lambda leaf, words: _spec(words, leaf.shape, mesh), argument, names)

  inside = tuple(map(specs, arguments, names))
  outside = PartitionSpec(inside[-1][0])
  mapped = jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
  return mapped(*arguments)
