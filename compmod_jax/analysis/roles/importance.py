r"""How much attention heads matter, by four ways that need not agree.

All of a head's output z, [batch, time, head_dim] after the competition, as the mean over tokens
that are predicted:

- ablation: the rise of the loss L where z is zero (`train.analyse ablate` without its intervals);
- gradient times activation, :math:`\sum_s |z_s \cdot \partial L / \partial z_s|` over
  sentences s (Michel et al. 2019, equation 2);
- attribution by integrated gradients (Sundararajan et al. 2017, equation 1), where the outputs of
  all heads of a module go from zero to z together, by the midpoint rule:

  .. math:: a_i = -\int_0^1 z_i \cdot \frac{\partial L(\alpha z)}{\partial z_i} \, d\alpha,
     \qquad \sum_i a_i = L(0) - L(z);

- layer-wise relevance propagation of the largest logits f to z,
  :math:`\sum_s |z_s \cdot \partial f / \partial z_s|` in a model in which attention
  weights, routers' weights, gates and the deviations of norms are constants. For linear
  layers and ReLU this is the rule :math:`R_i = \sum_j \frac{z_i w_{ij}}{\sum_k z_k w_{kj}} R_j`
  (the epsilon rule with epsilon 0; Bach et al. 2015, equation 56), for attention and layer norms
  those of Ali et al. 2022, equations 8 and 10. A GELU passes its derivative times its input, where
  the rule would pass its output.

A head alone cannot be attributed by integrated gradients along its own path: that integral is the
effect of its ablation.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.ablation.measure import keeping
from compmod_jax.analysis.heads.specialisation import spearman
from compmod_jax.analysis.reading import Reader
from compmod_jax.analysis.scoring import sentence_losses
from compmod_jax.analysis.subject import Module, Subject
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.losses import cross_entropy
from compmod_jax.layers.mechanisms import GroupNorm
from compmod_jax.tasks.base import Batch

WAYS = ("ablation", "gradient", "attribution", "relevance")
"""The four ways, in the order of the page; see the head of this file."""

Gates = Mapping[str, jax.Array]
"""Name of a module -> what its heads' outputs are multiplied with, [rows, heads]."""


class Importance(NamedTuple):
  """How much heads matter.

  Attributes:
    values: way -> name of a module -> [heads], per predicted token; nats but for the relevance,
      which is in units of logits.
    loss: of the whole model, nats per token.
    attributed: module -> rise of the loss without all its heads, which the attributions of its
      heads add up to but for the steps of the integral.
  """

  values: dict[str, dict[str, np.ndarray]]
  loss: float
  attributed: dict[str, float]

  def over_heads(self, way: str) -> np.ndarray:
    """The values of all heads of the model, modules one after the other."""
    return np.concatenate(list(self.values[way].values()))


def correlations(found: Importance) -> np.ndarray:
  """Spearman's correlations of the four ways over all heads of a model, [ways, ways]."""
  columns = [found.over_heads(way) for way in WAYS]
  return np.array([[spearman(one, other) for other in columns] for one in columns])


class Ways:
  """The four ways, on parts of a split's sentences that are read together.

  Args:
    subject: the model and its split.
    read: says what is to be predicted.
    modules: whose heads, with outputs.
    parts: numbers of the sentences of each part; none is in two of them.
    steps: of the integral.
  """

  def __init__(
    self,
    subject: Subject,
    read: Reader,
    modules: Sequence[Module],
    parts: Sequence[np.ndarray],
    steps: int,
  ):
    every = np.sort(np.concatenate(parts))
    self.subject = dataclasses.replace(subject, chosen=every)
    self.read, self.modules, self.steps = read, modules, steps
    self.members = [np.isin(every, part) for part in parts]
    self._losses = sentence_losses(self.subject, read)
    self._slopes = jax.jit(jax.grad(self._loss))
    self._relevance = jax.jit(self._relevances)
    self._placed = [subject.place(batch) for batch in self.subject.batches]

  def __call__(self, params: PyTree) -> list[Importance]:
    """How much the heads of a model with these parameters matter in each part."""
    zeros = {module.scaled: np.zeros((module.units, module.dim)) for module in self.modules}
    nats, counts = self._losses(params, keeping(self.modules, zeros, ()))
    found: dict[str, dict[str, np.ndarray]] = {way: {} for way in WAYS}
    slopes, relevance = self.loss_gradients(params), self.relevance(params)
    attributed = {}
    for number, module in enumerate(self.modules):
      self.subject.status("importance of heads", number + 1, len(self.modules))
      name = module.name
      every = [(name, unit) for unit in range(module.units)]
      rises = [
        self._losses(params, keeping(self.modules, zeros, units))[0] - nats
        for units in (*([unit] for unit in every), every)
      ]
      found["ablation"][name] = np.stack(rises[:-1], axis=1)
      found["gradient"][name] = np.abs(slopes[name])
      found["attribution"][name] = -self.integrated_gradients(params, module)
      found["relevance"][name] = np.abs(relevance[name])
      attributed[name] = rises[-1]
    made = []
    for rows in self.members:
      tokens = max(float(counts[rows].sum()), 1.0)
      values = {
        way: {name: value[rows].sum(0) / tokens for name, value in of.items()}
        for way, of in found.items()
      }
      together = {name: float(rise[rows].sum() / tokens) for name, rise in attributed.items()}
      made.append(Importance(values, float(nats[rows].sum() / tokens), together))
    return made

  def loss_gradients(
    self, params: PyTree, factors: Mapping[str, float] | None = None
  ) -> dict[str, np.ndarray]:
    """Module -> <z, dL/dz> of every sentence and head, [sentences, heads].

    Args:
      params: of the model.
      factors: name of a module -> what all its heads are multiplied with; 1 for the others.
    """
    return self._joined(self._slopes, params, factors or {})

  def integrated_gradients(self, params: PyTree, module: Module) -> np.ndarray:
    """The integral of a module's gradients from zero to its outputs, [sentences, heads]."""
    points = (np.arange(self.steps) + 0.5) / self.steps
    parts = [self.loss_gradients(params, {module.name: at})[module.name] for at in points]
    return np.mean(parts, axis=0)

  def relevance(self, params: PyTree) -> dict[str, np.ndarray]:
    """Module -> relevance of every sentence's heads for its largest logits, [sentences, heads]."""
    return self._joined(self._relevance, params, {})

  def _joined(
    self, function: Callable[..., Gates], params: PyTree, factors: Mapping[str, float]
  ) -> dict[str, np.ndarray]:
    """Values of all batches, in the order of `subject.numbers`."""
    found = []
    for batch in self._placed:
      rows = len(batch["index"])
      gates = {
        m.name: jnp.full((rows, m.units), factors.get(m.name, 1.0), jnp.float32)
        for m in self.modules
      }
      found.append(jax.device_get(function(gates, params, batch)))
    index = np.concatenate([batch["index"] for batch in self.subject.batches])
    order = np.argsort(index, kind="stable")
    order = order[index[order] >= 0]
    return {
      m.name: np.concatenate([np.asarray(part[m.name], np.float64) for part in found])[order]
      for m in self.modules
    }

  def _edits(self, gates: Gates) -> dict[str, Edit]:
    return {m.scaled: jax.tree_util.Partial(multiplied, gates[m.name]) for m in self.modules}

  def _loss(self, gates: Gates, params: PyTree, batch: Batch) -> jax.Array:
    """Nats of a batch."""
    edits = Intermediates(edits=self._edits(gates))
    logits = self.subject.task.model.forward(params, batch, intermediates=edits)
    return cross_entropy(logits, *self.read.targets(batch)).nll

  def _relevances(self, gates: Gates, params: PyTree, batch: Batch) -> Gates:
    edits: dict[str, Edit] = dict.fromkeys(constant_sites(self.subject), _constant)

    def largest(gates: Gates) -> jax.Array:
      intermediates = Intermediates(edits={**edits, **self._edits(gates)})
      with constant_deviations():
        logits = self.subject.task.model.forward(params, batch, intermediates=intermediates)
      _, counted = self.read.targets(batch)
      return jnp.sum(jnp.where(counted, jnp.max(logits.astype(jnp.float32), axis=-1), 0))

    return jax.grad(largest)(gates)


def multiplied(gates: jax.Array, value: jax.Array) -> jax.Array:
  """Outputs [rows, time, heads, head_dim], those of each row and head times its gate."""
  return value * gates[:, None, :, None].astype(value.dtype)


def _constant(value: jax.Array) -> jax.Array:
  """The same, through which no gradient goes."""
  return jax.lax.stop_gradient(value)


_FACTORS = tuple(
  f"/{name}"
  for name in (
    "attention", "head_code", "router/weights", "head_gates", "copy_gate", "depth/weights",
    "value_experts", "output_experts",
  )
)  # fmt: skip
_GATES = "gates/"  # of later places in modulated language models


def constant_sites(subject: Subject) -> list[str]:
  """Factors on activations, through which no relevance goes: attention, routers' weights, gates."""
  gate = subject.task.model.config.gate_site()
  return [
    site
    for site in subject.shapes
    if site.endswith(_FACTORS) or site.startswith(_GATES) or site == gate
  ]


@contextmanager
def constant_deviations() -> Iterator[None]:
  """Norms whose deviation, or root mean square, is a constant in gradients; their values do not
  change by a bit."""

  def rule(function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    value, module = function(*args, **kwargs), context.module
    norms = nn.LayerNorm | nn.RMSNorm | GroupNorm
    if not isinstance(module, norms) or context.method_name != "__call__":
      return value
    scale = module.get_variable("params", "scale")
    slices = module.mechanisms if isinstance(module, GroupNorm) else 1
    centred = not isinstance(module, nn.RMSNorm)
    return _linear_norm(args[0], value, scale, module.epsilon, slices, centred)

  with nn.intercept_methods(rule):
    yield


def _linear_norm(
  inputs: jax.Array,
  value: jax.Array,
  scale: jax.Array,
  epsilon: float,
  slices: int,
  centred: bool,
) -> jax.Array:
  """`value`, with the gradient of (inputs - mean) * scale / deviation for a constant deviation.

  Args:
    inputs: of the norm.
    value: what it gives.
    scale: its scale.
    epsilon: added to the variance.
    slices: parts of the width, each with a mean and a deviation of its own.
    centred: whether the mean is taken off; else the deviation is from 0.
  """
  x = inputs.astype(jnp.float32).reshape(*inputs.shape[:-1], slices, -1)
  x = x - jnp.mean(x, axis=-1, keepdims=True) if centred else x
  variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  rate = jax.lax.stop_gradient(jax.lax.rsqrt(variance + epsilon))
  linear = (x * rate).reshape(inputs.shape) * scale.reshape((1,) * (inputs.ndim - 1) + (-1,))
  linear = linear.astype(value.dtype)
  return jax.lax.stop_gradient(value) + (linear - jax.lax.stop_gradient(linear))


def agreement(halves: Sequence[Importance]) -> dict[str, float]:
  """Spearman's correlation of the two halves over all heads, by way."""
  first, second = halves
  return {way: spearman(first.over_heads(way), second.over_heads(way)) for way in WAYS}


def mean(halves: Sequence[Importance], way: str) -> dict[str, np.ndarray]:
  """Module -> mean of the halves, [heads]."""
  return {
    name: functools.reduce(np.add, [half.values[way][name] for half in halves]) / len(halves)
    for name in halves[0].values[way]
  }
