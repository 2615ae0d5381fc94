"""Options of Transformers that are to generalise systematically: to new compositions and lengths.

Which positions a model knows is another one; see `layers.positions`.
"""

import dataclasses
from typing import Any

from compmod_jax.core import errors
from compmod_jax.layers.block import StackConfig


@dataclasses.dataclass(frozen=True)
class SystematicConfig(StackConfig):
  """Fields of the models that have these options; others have the values of `StackConfig`."""

  random_positions: int = 0
  """In training the tokens of every sequence have sorted random labels from a range of this size in
  place of the numbers of their positions, and else fixed ones, evenly spread over the range (Ruoss
  et al. 2023); at least max_length. 0: off."""

  def __post_init__(self):
    super().__post_init__()
    labels = self.random_positions
    errors.check(
      labels == 0 or labels >= self.max_length,
      f"model.random_positions is {labels} and model.max_length {self.max_length}; every position"
      " needs a label of its own. Choose at least max_length, or 0 for none.",
    )
    errors.check(
      labels == 0 or self.positions != "none",
      f"model.random_positions is {labels}, but model.positions is 'none', and nothing reads"
      " labels. Leave it out, or choose other positions.",
    )

  def systematic_options(self) -> dict[str, Any]:
    """The options of this class that are not as they are by default, and their values."""
    others = {field.name for field in dataclasses.fields(StackConfig)}
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(SystematicConfig)
      if field.name not in others and getattr(self, field.name) != field.default
    }

  def check_layout(self, layout: str) -> None:
    """Raises a `UserError` if any of these options is on, none of which a layout can hold."""
    given = ", ".join(f"{name} = {value!r}" for name, value in self.systematic_options().items())
    errors.check(
      not given, f"model has {given}; {layout} has nothing like that. Export a model without these."
    )
