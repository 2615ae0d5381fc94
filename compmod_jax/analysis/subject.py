"""What an analysis looks at: a trained model, the sentences that it reads, its competing units."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from compmod_jax.analysis.report.style import site_order, site_title
from compmod_jax.core.errors import check
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.types import Params
from compmod_jax.data.pipeline import filler
from compmod_jax.tasks.base import Sharing, Status, Task, silent

Batch = dict[str, np.ndarray]

_UNITS = {"heads": "head", "experts": "expert"}


class Module(NamedTuple):
  """Units that work side by side: the heads of an attention module, or the experts of a layer.

  Attributes:
    name: path of the module, such as `encoder/layer_0/self`.
    kind: `heads` or `experts`: the site of the units' outputs, below `name`.
    units: how many.
    dim: width of a unit's output; 0 where the model does not show it.
    routed: whether they compete.
  """

  name: str
  kind: str
  units: int
  dim: int
  routed: bool

  @property
  def outputs(self) -> str:
    """Site of the units' outputs, [batch, time, units, dim]."""
    return f"{self.name}/{self.kind}"

  @property
  def scaled(self) -> str:
    """Site of the same after the competition."""
    return f"{self.name}/{self.kind}_scaled"

  @property
  def weights(self) -> str:
    """Site of the router's weights, [batch, time, units]."""
    return f"{self.name}/router/weights"

  @property
  def signatures(self) -> str:
    """Site of the units' signatures, [units, key_dim]."""
    return f"{self.name}/router/signatures"

  @property
  def unit(self) -> str:
    """What one of them is called: head or expert."""
    return _UNITS[self.kind]

  @property
  def title(self) -> str:
    """For example "encoder self, layer 0"."""
    return site_title(self.name)


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model on the devices, and the sentences of a split that it is to read.

  Attributes:
    task: the task.
    params: the model's parameters, placed.
    split: name of the split.
    sentences: how many of its examples are read, drawn by `seed`; 0 for all.
    chosen: the numbers of the examples that are read, in place of that draw.
    seed: of everything that is drawn.
    sharing: how batches are laid over devices.
    records: the parsed lines of the run's log; empty if there is none.
    status: shows progress.
  """

  task: Task
  params: Params = dataclasses.field(repr=False)
  split: str
  sentences: int = 0
  chosen: Sequence[int] | None = dataclasses.field(default=None, repr=False)
  seed: int = 0
  sharing: Sharing = Sharing()
  records: Sequence[Mapping[str, Any]] = dataclasses.field(default=(), repr=False)
  status: Status = silent

  @functools.cached_property
  def batches(self) -> list[Batch]:
    """Token numbers of the chosen examples, in batches of the task's own shapes.

    Raises:
      UserError: the split has no example that the model can read.
    """
    whole = [
      {name: np.asarray(value) for name, value in batch.items()}
      for batch in self.task.dataset.eval_batches(self.split, multiple=self.sharing.multiple)
    ]
    numbers = _numbers(whole)
    check(
      len(numbers) > 0,
      f"--split {self.split} has no example that the model can read; all are empty or longer than"
      " the model's batches. Choose another split.",
    )
    chosen = drawn(numbers, self.sentences, self.seed) if self.chosen is None else self.chosen
    return whole if len(chosen) == len(numbers) else list(_thin(whole, np.asarray(chosen)))

  @property
  def numbers(self) -> np.ndarray:
    """Numbers of the chosen examples in the split, ascending."""
    return _numbers(self.batches)

  @functools.cached_property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shapes of all activations on the smallest batch, by the names of their sites."""
    shapes: dict[str, tuple[int, ...]] = {}

    def trace(params: Params, batch: Mapping[str, jax.Array]) -> None:
      intermediates = Intermediates(capture=None)
      self.task.model.forward(params, batch, intermediates=intermediates)
      shapes.update({name: value.shape for name, value in intermediates.captured.items()})

    jax.eval_shape(trace, self.params, self.task.dataset.example())
    return shapes

  @functools.cached_property
  def modules(self) -> list[Module]:
    """All modules with units side by side, routed or not, in the order of the model."""
    return modules_of(self.shapes)

  def of_training(self, sentences: int) -> "Subject":
    """The same model on so many sentences of the training split, none of which is its own.

    Raises:
      UserError: it reads all of them itself.
    """
    train = dataclasses.replace(self, split="train", sentences=sentences, chosen=None)
    if self.split != train.split:
      return train
    left = others(dataclasses.replace(train, sentences=0).numbers, self.numbers)
    return dataclasses.replace(train, chosen=drawn(left, sentences, self.seed))

  def place(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch on the devices."""
    return self.sharing.place(batch)


def called(modules: Iterable[Module]) -> str:
  """What the units of all these modules are called together: head, expert or unit."""
  names = {module.unit for module in modules}
  return names.pop() if len(names) == 1 else "unit"


def drawn(numbers: np.ndarray, sentences: int, seed: int) -> np.ndarray:
  """`sentences` of the numbers, drawn at random, ascending; all of them for 0."""
  if not 0 < sentences < len(numbers):
    return numbers
  return np.sort(np.random.default_rng(seed).choice(numbers, size=sentences, replace=False))


def others(training: np.ndarray, read: np.ndarray) -> np.ndarray:
  """Numbers of training sentences without those that are read, on which nothing may be trained.

  Raises:
    UserError: there are no others.
  """
  found = np.setdiff1d(training, read)
  check(
    len(found) > 0,
    f"--split is train, and all of its {len(training)} sentences are read, so that none is left to"
    " train on. Read fewer (--sentences), or choose another split.",
  )
  return found


def modules_of(shapes: Mapping[str, tuple[int, ...]]) -> list[Module]:
  """The modules of a model whose sites have these shapes; see `Module`."""
  found: dict[str, Module] = {}
  for site, shape in shapes.items():
    match = re.fullmatch(r"(.+)/(heads|experts)", site)
    if match and len(shape) == 4:
      routed = f"{match[1]}/router/weights" in shapes
      found[match[1]] = Module(match[1], match[2], shape[2], shape[3], routed)
  for site, shape in shapes.items():
    name = site.removesuffix("/router/weights")
    if name != site and name not in found:
      found[name] = Module(name, "experts", shape[-1], 0, True)
  return sorted(found.values(), key=lambda module: site_order(module.name))


def _numbers(batches: Iterable[Batch]) -> np.ndarray:
  every = np.concatenate([np.zeros(0, np.int64), *(batch["index"] for batch in batches)])
  return np.sort(every[every >= 0]).astype(np.int64)


def _thin(batches: Iterable[Batch], chosen: np.ndarray) -> Iterator[Batch]:
  """The chosen examples in batches of the same shapes; rows left over are filler (0, index -1)."""
  held: dict[tuple, Batch] = {}
  sizes: dict[tuple, int] = {}
  for batch in batches:
    shape = tuple((name, value.shape) for name, value in batch.items())
    rows = np.flatnonzero(np.isin(batch["index"], chosen))
    sizes[shape] = size = len(batch["index"])
    part = {name: value[rows] for name, value in batch.items()}
    if shape in held:
      part = {name: np.concatenate([held[shape][name], value]) for name, value in part.items()}
    if len(part["index"]) >= size:
      yield {name: value[:size] for name, value in part.items()}
      part = {name: value[size:] for name, value in part.items()}
    held[shape] = part
  for shape, part in held.items():
    if len(part["index"]):
      yield {name: _filled(name, value, sizes[shape]) for name, value in part.items()}


def _filled(name: str, value: np.ndarray, rows: int) -> np.ndarray:
  full = np.full((rows, *value.shape[1:]), filler(name), value.dtype)
  full[: len(value)] = value
  return full
