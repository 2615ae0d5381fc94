"""What a table is: rows that are trained, columns that are compared, published figures."""

import dataclasses
from collections.abc import Callable, Mapping

from compmod_jax.tables.grid import Column
from compmod_jax.training.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Row:
  """One setting of a table.

  Attributes:
    experiment: what is trained, but for its seed.
    published: column -> published figure.
    seeded: from the experiment and a seed to that seed's run, where more follows from the seed.
    in_use: fields of the model that have other values once it is trained, as `--model_fields`.
    starts_from: name of the row whose run of the same seed gives it its first parameters.
  """

  experiment: Experiment
  published: Mapping[str, float] = dataclasses.field(default_factory=dict)
  seeded: Callable[[Experiment, int], Experiment] | None = None
  in_use: Mapping[str, object] = dataclasses.field(default_factory=dict)
  starts_from: str = ""

  def of_seed(self, seed: int) -> Experiment:
    """What is trained with a seed."""
    if self.seeded is not None:
      return self.seeded(self.experiment, seed)
    return dataclasses.replace(self.experiment, seed=seed)


@dataclasses.dataclass(frozen=True)
class Spec:
  """A table: its rows and what they are compared on.

  Attributes:
    title: what it shows and where it was published.
    data: what it is made on here, in a few words.
    rows: name -> row, in order.
    reference: the row that all others are tested against, or row -> the row that it is tested
      against, of those that are tested.
    columns: what is compared.
    factors: name -> rows in which it is on, where rows are all settings of several factors.
  """

  title: str
  data: str
  rows: Mapping[str, Row]
  reference: str | Mapping[str, str]
  columns: tuple[Column, ...]
  factors: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def with_model(experiment: Experiment, **changes: object) -> Experiment:
  """The experiment with changes of its model."""
  return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))
