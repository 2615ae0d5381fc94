"""Methods of few-shot classification, as a configuration chooses them.

The functions are those of `mechanisms.few_shot`. A method says how many outputs the model has, what
is learned besides the model's parameters, and how the logits of a query follow from a support.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.losses import token_nll
from compmod_jax.core.parameters import chosen, matches, names
from compmod_jax.mechanisms.few_shot import (
  Embed,
  adapt,
  conditioned_logits,
  descend,
  init_perceptron,
  leopard_adapted,
  matching_logits,
  perceptron,
  prototype_logits,
  read_logits,
  set_context,
)
from compmod_jax.tasks.base import Batch, Params


def _without(params: Params, *left_out: str) -> dict[str, Any]:
  """The parameters of the model alone."""
  return {name: part for name, part in params.items() if name not in left_out}


def _mean_nll(embed: Embed, params: Params, rows: Batch) -> jax.Array:
  """Cross-entropy where the model gives logits."""
  return jnp.mean(token_nll(embed(params, rows["inputs"]), rows["labels"]))


@dataclasses.dataclass(frozen=True)
class Maml:
  """Steps of gradient descent from learned parameters; see `adapt`."""

  steps: int = 1
  """Steps on the support in training."""
  evaluate_steps: int = 0
  """Steps in evaluation; 0 for as many as in training."""
  rate: float = 0.4
  """Their size; the first one, where it is learned."""
  learned: Literal["no", "parameter", "element"] = "no"
  """Sizes that are learned, too: one for every parameter, or for every number in it (Meta-SGD)."""
  parameters: tuple[str, ...] = ("*",)
  """Names of what adapts: of parameters, or of modules for all in them; `head` alone is ANIL."""
  first_order: bool = False
  """Takes the gradient at the adapted parameters for that of the parameters before."""

  own: ClassVar[tuple[str, ...]] = ("step_sizes",)

  def __post_init__(self):
    check_least(self, "method.", steps=1, evaluate_steps=0)
    errors.check(self.rate > 0, f"method.rate is {self.rate}; it must be positive.")
    errors.check_choice("method.learned", self.learned, ("no", "parameter", "element"))
    errors.check(
      bool(self.parameters), "method.parameters is empty; name what adapts, such as '*' for all."
    )

  def outputs(self, ways: int) -> int:
    """A logit for every class of an episode."""
    return ways

  def more_parameters(self, params: Params, dim: int, rng: jax.Array) -> dict[str, Any]:
    """What is learned besides the model's parameters: `step_sizes`."""
    mask = chosen(params, self.parameters, "method.parameters")
    if self.learned == "no":
      return {}
    flat: dict[str, Any] = flatten_dict(dict(params), sep="/")
    adapts: dict[str, Any] = flatten_dict(dict(mask), sep="/")
    element = self.learned == "element"
    sizes = {
      name: jnp.full(leaf.shape if element else (), self.rate, leaf.dtype)
      for name, leaf in flat.items()
      if adapts[name]
    }
    return {"step_sizes": unflatten_dict(sizes, sep="/")}

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query after adaptation, [query, ways]."""
    adapted = adapt(
      functools.partial(_mean_nll, embed),
      _without(params, "step_sizes"),
      support,
      steps=self.steps if train else self.evaluate_steps or self.steps,
      rate=self.rate if self.learned == "no" else params["step_sizes"],
      parameters=self.parameters,
      first_order=self.first_order or not train,
    )
    return embed(adapted, query["inputs"])

  def describe(self) -> str:
    """The method, in a few words."""
    adapting = "" if self.parameters == ("*",) else f" of {', '.join(self.parameters)}"
    order = "first-order MAML" if self.first_order else "MAML"
    sizes = "" if self.learned == "no" else f", step sizes learned by {self.learned}"
    return f"{order}, {self.steps} step{'s' if self.steps > 1 else ''}{adapting}{sizes}"


class _OnFeatures:
  """The part of a method that takes features, of any number of classes."""

  own: ClassVar[tuple[str, ...]] = ()

  def outputs(self, ways: int) -> int:
    """None: the model gives features."""
    return 0

  def more_parameters(self, params: Params, dim: int, rng: jax.Array) -> dict[str, Any]:
    """Nothing."""
    return {}


def _both(
  embed: Embed, params: Params, support: Batch, query: Batch
) -> tuple[jax.Array, jax.Array]:
  """Features of support and query, computed as one batch."""
  rows = jnp.concatenate([support["inputs"], query["inputs"]])
  found, count = embed(params, rows), len(support["inputs"])
  return found[:count], found[count:]


@dataclasses.dataclass(frozen=True)
class Prototypes(_OnFeatures):
  """Prototypical networks; see `prototype_logits`."""

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query, [query, ways]."""
    known, asked = _both(embed, params, support, query)
    return prototype_logits(known, support["labels"], asked, ways)

  def describe(self) -> str:
    """The method, in a few words."""
    return "prototypes"


@dataclasses.dataclass(frozen=True)
class Matching(_OnFeatures):
  """Matching networks; see `matching_logits`."""

  scale: float = 10.0
  """What cosines are multiplied with; 1 as published."""

  def __post_init__(self):
    errors.check(self.scale > 0, f"method.scale is {self.scale}; it must be positive.")

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Log-probabilities of a query, [query, ways]."""
    known, asked = _both(embed, params, support, query)
    return matching_logits(known, support["labels"], asked, ways, self.scale)

  def describe(self) -> str:
    """The method, in a few words."""
    return "matching by the cosine"


@dataclasses.dataclass(frozen=True)
class FineTune(_OnFeatures):
  """Gradient descent from the model's parameters and a fresh softmax layer.

  Nothing is meta-learned. Step size and number of steps are those of `rates` and `steps` that are
  best on episodes of validation classes, chosen anew at every evaluation.
  """

  rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
  """Sizes of the steps that are tried."""
  steps: tuple[int, ...] = (5, 10, 20, 40)
  """Numbers of steps on the whole support that are tried."""
  optimizer: Literal["adam", "sgd"] = "adam"
  """How parameters move."""
  parameters: tuple[str, ...] = ("*",)
  """Names of what moves of the model besides the softmax layer; none: that layer alone."""
  choose_on: int = 100
  """Episodes of validation classes on which both are chosen."""

  def __post_init__(self):
    errors.check(
      bool(self.rates) and min(self.rates) > 0,
      f"method.rates is {self.rates}; give one step size at least, all positive.",
    )
    errors.check(
      bool(self.steps) and self.steps[0] >= 1 and list(self.steps) == sorted({*self.steps}),
      f"method.steps is {self.steps}; give ascending numbers of steps, each 1 at least.",
    )
    errors.check_choice("method.optimizer", self.optimizer, ("adam", "sgd"))
    check_least(self, "method.", choose_on=1)

  def more_parameters(self, params: Params, dim: int, rng: jax.Array) -> dict[str, Any]:
    """Nothing."""
    chosen(params, self.parameters, "method.parameters")
    return {}

  def trajectory(
    self,
    embed: Embed,
    params: Params,
    support: Batch,
    query: Batch,
    ways: int,
    rate: float | jax.Array,
  ) -> jax.Array:
    """Logits of a query after each number of `steps`, [steps, query, ways]."""

    def logits(params: Params, inputs: jax.Array) -> jax.Array:
      found = embed(params["model"], inputs)
      return found @ params["softmax"]["weights"].T + params["softmax"]["bias"][None]

    dim = jax.eval_shape(embed, params, support["inputs"]).shape[1]
    fresh = {"weights": jnp.zeros((ways, dim)), "bias": jnp.zeros(ways)}
    moving = ("softmax", *(f"model/{name}" for name in self.parameters))
    start = {"model": params, "softmax": fresh}
    return self.descended(logits, start, support, query, rate, moving)

  def descended(
    self,
    logits: Embed,
    start: Params,
    support: Batch,
    query: Batch,
    rate: float | jax.Array,
    parameters: tuple[str, ...],
  ) -> jax.Array:
    """Logits of a query after each number of `steps` from any start, [steps, query, ways].

    Args:
      logits: from parameters like `start` and inputs.
      start: the parameters before.
      support: what is learned.
      query: what is classified.
      rate: size of the steps.
      parameters: names in `start` of what moves.
    """
    found = descend(
      functools.partial(_mean_nll, logits),
      start,
      support,
      at=self.steps,
      rate=rate,
      adam=self.optimizer == "adam",
      parameters=parameters,
    )
    return jnp.stack([logits(after, query["inputs"]) for after in found])

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query after the most steps of the first size, [query, ways]."""
    return self.trajectory(embed, params, support, query, ways, self.rates[0])[-1]

  def describe(self) -> str:
    """The method, in a few words."""
    adapting = (
      "" if self.parameters == ("*",) else f" of {', '.join(self.parameters) or 'no layer'}"
    )
    return f"fine-tuning by {self.optimizer}{adapting}"


@dataclasses.dataclass(frozen=True)
class Leopard(_OnFeatures):
  """A softmax layer generated from one part of the support, adapted on others.

  See `leopard_adapted`. Parameters of its own: `leopard` (the generator psi and the reader phi) and
  `step_sizes`, one for every layer that adapts.
  """

  dim: int = 64
  """Width of the generated softmax layer's input."""
  hidden: int = 64
  """Hidden units of the generator and of the reader."""
  subsets: int = 2
  """G: parts of the support, with as many examples of every class. The first one generates, each
  other one is adapted to; 1 generates from the whole support and adapts to it, too."""
  steps: int = 1
  """Steps of gradient descent on every further part."""
  rate: float = 0.1
  """Size of the steps at first; it is learned, by layer."""
  parameters: tuple[str, ...] = ("*",)
  """Names of what adapts of the model, such as the layers above one; none: the softmax layer and
  its reader alone."""
  first_order: bool = False
  """Takes the gradient at the adapted parameters for that of the parameters before."""
  tuned: FineTune | None = None
  """Evaluation goes on with these steps on the whole support, of the generated layer, the reader
  and what is named there; none: it ends where training does."""

  own: ClassVar[tuple[str, ...]] = ("leopard", "step_sizes")

  def __post_init__(self):
    check_least(self, "method.", dim=1, hidden=1, subsets=1, steps=1)
    errors.check(self.rate > 0, f"method.rate is {self.rate}; it must be positive.")

  def more_parameters(self, params: Params, dim: int, rng: jax.Array) -> dict[str, Any]:
    """`leopard` and `step_sizes`."""
    chosen(params, self.parameters, "method.parameters")
    if self.tuned:
      chosen(params, self.tuned.parameters, "method.tuned.parameters")
    moving = [name for name in names(params) if matches(name, self.parameters)]
    layers = sorted({name.partition("/")[0] for name in moving})
    generator, reader = (jax.random.fold_in(rng, number) for number in range(2))
    return {
      "leopard": {
        "generator": init_perceptron(generator, dim, self.hidden, self.dim + 1),
        "reader": init_perceptron(reader, dim, self.hidden, self.dim),
      },
      "step_sizes": {
        **({"layers": {layer: jnp.full((), self.rate) for layer in layers}} if layers else {}),
        "reader": jnp.full((), self.rate),
        "softmax": jnp.full((), self.rate),
      },
    }

  def adapted(self, embed: Embed, params: Params, support: Batch, ways: int, train: bool) -> Params:
    """What predicts after generation and adaptation; see `leopard_adapted`."""
    return leopard_adapted(
      embed,
      _without(params, *self.own),
      parts(support, ways, self.subsets),
      ways,
      generator=params["leopard"]["generator"],
      reader=params["leopard"]["reader"],
      sizes={"layers": {}, **params["step_sizes"]},
      parameters=self.parameters,
      steps=self.steps,
      first_order=self.first_order or not train,
    )

  def trajectory(
    self,
    embed: Embed,
    params: Params,
    support: Batch,
    query: Batch,
    ways: int,
    rate: float | jax.Array,
  ) -> jax.Array:
    """Logits of a query after each number of steps of `tuned`, [steps, query, ways]."""
    assert self.tuned
    start = self.adapted(embed, params, support, ways, train=False)
    moving = ("softmax", "reader", *(f"layers/{name}" for name in self.tuned.parameters))
    logits = functools.partial(read_logits, embed)
    return self.tuned.descended(logits, start, support, query, rate, moving)

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query, [query, ways]: of evaluation after the most steps of the first size."""
    if self.tuned and not train:
      return self.trajectory(embed, params, support, query, ways, self.tuned.rates[0])[-1]
    adapted = self.adapted(embed, params, support, ways, train)
    return read_logits(embed, adapted, query["inputs"])

  def describe(self) -> str:
    """The method, in a few words."""
    adapting = (
      "" if self.parameters == ("*",) else f" of {', '.join(self.parameters) or 'no layer'}"
    )
    further = f", then {self.tuned.describe()}" if self.tuned else ""
    part = "parts" if self.subsets > 1 else "part"
    return f"LEOPARD, {self.subsets} {part} of a support{adapting}{further}"


def tuned(method: "Method") -> FineTune | None:
  """How a method is fine-tuned in evaluation, if it is."""
  return method if isinstance(method, FineTune) else getattr(method, "tuned", None)


def check_shots(method: "Method", shots: int) -> None:
  """Raises a `UserError` where a method cannot learn from this number of examples of a class."""
  subsets = method.subsets if isinstance(method, Leopard) else 1
  errors.check(
    shots % subsets == 0,
    f"method.subsets is {subsets}, but a support has {shots} examples of a class; each part gets as"
    " many. Let the number of examples be a multiple of it, or set method.subsets to 1.",
  )


def by_class(method: "Method", labels: np.ndarray) -> np.ndarray:
  """The order in which a method takes examples with these labels: class by class.

  Raises:
    UserError: a class has no example, or the method needs as many of every class.
  """
  counts = np.bincount(labels)
  errors.check(
    bool(counts.all()),
    f"labels has no example of class {int(np.argmin(counts))}, but of class {len(counts) - 1}."
    " Number classes 0, 1, ... without a gap.",
  )
  if isinstance(method, Leopard) and method.subsets > 1:
    errors.check(
      len({*counts.tolist()}) == 1,
      f"labels has {counts.tolist()} examples of the classes, but {method.describe()} parts a"
      " support into equal ones. Give as many of every class.",
    )
    check_shots(method, int(counts[0]))
  return np.argsort(labels, kind="stable")


def parts(support: Batch, ways: int, count: int) -> list[Batch]:
  """A support, class by class, as parts with as many examples of every class; see `check_shots`.

  A single part is the support, whose classes may have other numbers of examples.
  """
  if count == 1:
    return [support]
  shots = len(support["labels"]) // ways

  def cut(column: jax.Array, number: int) -> jax.Array:
    by_class = column.reshape(ways, count, shots // count, *column.shape[1:])
    return by_class[:, number].reshape(-1, *column.shape[1:])

  return [{name: cut(x, number) for name, x in support.items()} for number in range(count)]


@dataclasses.dataclass(frozen=True)
class BlackBox(_OnFeatures):
  """A network reads the support as a set; what it says conditions the predictor.

  For every class a vector of few numbers follows from the means over examples (`set_context`); it
  scales and shifts the units of one predictor (`conditioned_logits`). Nothing descends within an
  episode. Parameters of its own: `black_box`.
  """

  context: int = 16
  """Numbers that say what the support says of a class."""
  hidden: int = 64
  """Hidden units of the set encoder, and units of the predictor."""

  own: ClassVar[tuple[str, ...]] = ("black_box",)

  def __post_init__(self):
    check_least(self, "method.", context=1, hidden=1)

  def more_parameters(self, params: Params, dim: int, rng: jax.Array) -> dict[str, Any]:
    """`black_box`."""
    keys, hidden = jax.random.split(rng, 5), self.hidden
    return {
      "black_box": {
        "element": init_perceptron(keys[0], dim, hidden, hidden),
        "context": init_perceptron(keys[1], 2 * hidden, hidden, self.context),
        "film": init_perceptron(keys[2], self.context, 2 * hidden),
        "units": init_perceptron(keys[3], dim, hidden, hidden),
        "readout": jax.random.normal(keys[4], (hidden,)) * hidden**-0.5,
      }
    }

  def logits(
    self, embed: Embed, params: Params, support: Batch, query: Batch, ways: int, train: bool
  ) -> jax.Array:
    """Logits of a query, [query, ways]."""
    mine = params["black_box"]
    known, asked = _both(embed, params, support, query)
    found = set_context(perceptron(mine["element"], known), support["labels"], ways)
    context = jnp.tanh(perceptron(mine["context"], found))
    scale, shift = jnp.split(perceptron(mine["film"], context), 2, axis=1)
    return conditioned_logits(perceptron(mine["units"], asked), scale, shift, mine["readout"])

  def describe(self) -> str:
    """The method, in a few words."""
    return f"black-box adaptation by {self.context} numbers a class"


Method = Maml | Prototypes | Matching | Leopard | BlackBox | FineTune
