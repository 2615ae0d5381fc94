r"""Methods of few-shot classification, for any loss and any embedding.

A learner gets an episode: a support of examples with labels, and a query that it is scored on.
`adapt` and `adapted_loss` learn by gradient descent from learned parameters (MAML, to the first
order, Meta-SGD, ANIL), `prototype_logits` and `matching_logits` compare features. LEOPARD generates
the softmax layer of an episode from its support and adapts it on further supports:

.. math:: w^n, b^n = \frac{1}{|C^n|} \sum_{x_j \in C^n} g_\psi(f_\theta(x_j)), \qquad
          p(y \mid x) = \mathrm{softmax}(W h_\phi(f_\theta(x)) + b)

(`generated_softmax`, `leopard_adapted`, `read_logits`). Black-box adaptation reads the support with
a network of sets, whose low-dimensional output conditions the predictor (`set_context`,
`conditioned_logits`).
`descend` is plain fine-tuning by Adam.

Source: Kolios 2023, section 4.8; the functions name the originals.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from compmod_jax.core import errors
from compmod_jax.core.losses import token_nll
from compmod_jax.core.parameters import chosen
from compmod_jax.core.types import Params

Rows = Mapping[str, Any]
"""Columns of examples, [rows, ...]."""
Embed = Callable[[Params, jax.Array], jax.Array]
"""From parameters and inputs [rows, ...] to logits or features [rows, dim]."""
LossOf = Callable[[Params, Rows], jax.Array]
"""From parameters and rows to a scalar."""

# Gradient descent on a support.


def adapt(
  loss: LossOf,
  params: Params,
  support: Rows,
  *,
  steps: int = 1,
  rate: float | PyTree = 0.1,
  parameters: tuple[str, ...] = ("*",),
  first_order: bool = False,
) -> Params:
  r"""Parameters after a few steps of gradient descent on a support.

  .. math:: \phi^{(i+1)} = \phi^{(i)} - \alpha \odot \nabla_\phi L(\phi^{(i)}, D)

  The result can be differentiated with respect to the parameters before and to the rates. A step is
  computed anew when it is differentiated, so that its memory does not grow with what is inside.

  Args:
    loss: from parameters and rows to a scalar.
    params: the parameters before, nested dictionaries.
    support: D, what `loss` takes.
    steps: how many.
    rate: alpha: a number, or one for every parameter that adapts (a scalar or of its shape, in a
      tree like `params`, in which others may be left out).
    parameters: names of what adapts; see `core.parameters.matches`. All else stays as it is.
    first_order: the gradient of the steps is taken for a constant.

  Source: Finn et al. 2017, equation 1; rates by element, Li et al. 2017; the last layer alone,
    Raghu et al. 2020.
  """
  moving, whole, mask = _parted(params, parameters)
  rates = _rates(rate, params, mask)

  def step(moving: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
    at = jax.lax.stop_gradient(moving) if first_order else moving
    slopes = jax.grad(lambda moving: loss(whole(moving), support))(at)
    slopes = jax.lax.stop_gradient(slopes) if first_order else slopes
    return [x - r * g for x, r, g in zip(moving, rates, slopes, strict=True)], None

  if steps == 1:  # a loop of one step would be compiled as a loop
    moving, _ = jax.checkpoint(step)(moving, None)
  else:
    moving, _ = jax.lax.scan(jax.checkpoint(step), moving, None, length=steps)
  return whole(moving)


def _parted(
  params: Params, parameters: tuple[str, ...]
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Params], list[bool]]:
  """The parameters that move, how the whole is made of them and the others, and which they are."""
  mask = jax.tree.leaves(chosen(params, parameters, "parameters"))
  leaves, tree = jax.tree.flatten(params)

  def whole(moving: list[jax.Array]) -> Params:
    new = iter(moving)
    return tree.unflatten([next(new) if m else x for m, x in zip(mask, leaves, strict=True)])

  return [x for m, x in zip(mask, leaves, strict=True) if m], whole, mask


def _rates(rate: float | PyTree, params: Params, mask: list[bool]) -> list[Any]:
  """The rate of every parameter that adapts."""
  if not isinstance(rate, Mapping):
    return [rate] * sum(mask)
  given: dict[str, Any] = flatten_dict(dict(rate), sep="/")
  names = flatten_dict(dict(jax.tree.map(lambda _: 0, params)), sep="/")
  ordered = jax.tree.leaves(unflatten_dict({name: _Name(name) for name in names}, sep="/"))
  moving = [one.name for one, m in zip(ordered, mask, strict=True) if m]
  missing = [name for name in moving if name not in given]
  errors.check(
    not missing,
    f"rate has no entry for {errors.short_list(missing)}, which adapt; give one for each, or one"
    " number for all.",
  )
  return [given[name] for name in moving]


@dataclasses.dataclass(frozen=True)
class _Name:
  """A name as a leaf of a tree."""

  name: str


def adapted_loss(
  loss: LossOf,
  params: Params,
  episode: tuple[Rows, Rows],
  **how: Any,
) -> jax.Array:
  r"""The loss on a query after adaptation to its support: what MAML lowers in the mean of episodes.

  .. math:: L(\phi^{(k)}(\theta, D_{tr}), D_{ts})

  Args:
    loss: from parameters and rows to a scalar.
    params: theta.
    episode: support and query.
    **how: as `adapt` has it.

  Source: Finn et al. 2017, Algorithm 1.
  """
  support, query = episode
  return loss(adapt(loss, params, support, **how), query)


def descend(
  loss: LossOf,
  params: Params,
  support: Rows,
  *,
  at: Sequence[int],
  rate: float | jax.Array,
  adam: bool = True,
  parameters: tuple[str, ...] = ("*",),
) -> list[Params]:
  r"""Parameters after some numbers of steps of Adam on a whole support, as fine-tuning takes them.

  .. math:: \theta \leftarrow \theta - \alpha \frac{\hat m}{\sqrt{\hat v} + 10^{-8}}

  with Adam's corrected moments for :math:`\beta_1 = 0.9`, :math:`\beta_2 = 0.999`.

  Args:
    loss: from parameters and rows to a scalar.
    params: the parameters before, nested dictionaries.
    support: what `loss` takes.
    at: the numbers of steps, ascending, each 1 at least.
    rate: alpha, the same for all parameters.
    adam: else plain gradient descent.
    parameters: names of what moves; see `core.parameters.matches`.

  Source: Kingma and Ba 2015, algorithm 1.
  """
  moving, whole, _ = _parted(params, parameters)

  def step(carry: Any, _: None) -> tuple[Any, None]:
    moving, means, squares, count = carry
    slopes = jax.grad(lambda moving: loss(whole(moving), support))(moving)
    if not adam:
      moving = [x - rate * g for x, g in zip(moving, slopes, strict=True)]
      return (moving, means, squares, count), None
    count = count + 1
    means = [0.9 * m + 0.1 * g for m, g in zip(means, slopes, strict=True)]
    squares = [0.999 * v + 0.001 * g * g for v, g in zip(squares, slopes, strict=True)]
    first, second = 1 - 0.9**count, 1 - 0.999**count
    moving = [
      x - rate * (m / first) / (jnp.sqrt(v / second) + 1e-8)
      for x, m, v in zip(moving, means, squares, strict=True)
    ]
    return (moving, means, squares, count), None

  zeros = [jnp.zeros_like(x) for x in moving] if adam else []
  carry, found, before = (moving, zeros, zeros, jnp.float32(0)), list[Params](), 0
  for number in at:
    carry, _ = jax.lax.scan(step, carry, None, length=number - before)
    found.append(whole(carry[0]))
    before = number
  return found


# Comparison of features.


def class_means(
  values: Float[Array, "support dim"], labels: Int[Array, "support"], ways: int
) -> Float[Array, "ways dim"]:
  """The mean over the examples of every class; 0 for a class without any."""
  member = jax.nn.one_hot(labels, ways, axis=0, dtype=values.dtype)
  count = jnp.maximum(jnp.sum(member, axis=1, keepdims=True), 1)
  return member @ values / count


def prototype_logits(
  support: Float[Array, "support dim"],
  labels: Int[Array, "support"],
  query: Float[Array, "query dim"],
  ways: int,
) -> Float[Array, "query ways"]:
  r"""Minus the squared distance to the mean of every class.

  .. math:: p(k \mid x) = \mathrm{softmax}_k(-|f(x) - c_k|^2), \qquad
            c_k = \frac{1}{|S_k|} \sum_{i \in S_k} f(x_i)

  Source: Snell et al. 2017, equations 1 and 2.
  """
  means = class_means(support, labels, ways)
  # |f|^2 is the same for all classes, but the distance has it.
  return -jnp.sum(jnp.square(query[:, None] - means[None]), axis=-1)


def matching_logits(
  support: Float[Array, "support dim"],
  labels: Int[Array, "support"],
  query: Float[Array, "query dim"],
  ways: int,
  scale: float = 1.0,
) -> Float[Array, "query ways"]:
  r"""Log-probabilities of attention over the support's labels by the cosine.

  .. math:: p(k \mid x) = \sum_{i \in S_k} \mathrm{softmax}_i(s \cos(f(x), f(x_i)))

  Args:
    support: features of the examples to learn from.
    labels: their classes.
    query: features of those to tell.
    ways: number of classes.
    scale: s.

  Source: Vinyals et al. 2016, equations 1 and 2, without full context embeddings.
  """

  def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)

  attention = jax.nn.log_softmax(scale * unit(query) @ unit(support).T, axis=-1)
  member = labels[None, None, :] == jnp.arange(ways)[None, :, None]
  # What no example is for has a probability of nearly 0, and finite gradients.
  return jax.nn.logsumexp(jnp.where(member, attention[:, None], -1e9), axis=-1)


# Generated predictors.


def init_perceptron(rng: jax.Array, *sizes: int) -> dict[str, Any]:
  """Parameters of `perceptron`: layers between these sizes, by Glorot and Bengio 2010."""
  init = jax.nn.initializers.glorot_normal()
  return {
    f"layer_{i}": {
      "kernel": init(jax.random.fold_in(rng, i), (before, after)),
      "bias": jnp.zeros(after),
    }
    for i, (before, after) in enumerate(itertools.pairwise(sizes))
  }


def perceptron(params: Params, x: Float[Array, "batch dim"]) -> Float[Array, "batch outputs"]:
  r"""Linear layers with tanh between them; see `init_perceptron`."""
  for i in range(len(params)):
    layer = params[f"layer_{i}"]
    x = (jnp.tanh(x) if i else x) @ layer["kernel"] + layer["bias"][None]
  return x


def generated_softmax(
  generated: Float[Array, "support dim_and_1"], labels: Int[Array, "support"], ways: int
) -> dict[str, jax.Array]:
  r"""The softmax layer of an episode: means over the examples of its classes.

  .. math:: w^n, b^n = \frac{1}{|C^n|} \sum_{x_j \in C^n} g_\psi(f_\theta(x_j))

  Args:
    generated: what g gives for every example of the support; the last number is the bias.
    labels: their classes.
    ways: number of classes, any.

  Returns:
    `weights` [ways, dim] and `bias` [ways].

  Source: Kolios 2023, equation 4.19; Bansal et al. 2020, equation 3.
  """
  means = class_means(generated, labels, ways)
  return {"weights": means[:, :-1], "bias": means[:, -1]}


def leopard_adapted(
  embed: Embed,
  params: Params,
  parts: Sequence[Rows],
  ways: int,
  *,
  generator: Params,
  reader: Params,
  sizes: Params,
  parameters: tuple[str, ...] = ("*",),
  steps: int = 1,
  first_order: bool = False,
) -> Params:
  r"""What LEOPARD predicts with, after a softmax layer was generated and adapted.

  .. math:: \Theta^{(j+1)} = \Theta^{(j)} - \alpha \odot \nabla_\Theta L(\Theta^{(j)}, D_j)

  :math:`\Theta = \{\theta_{> u}, \phi, W, b\}` adapts; the layers below, the generator and the
  step sizes stand still within an episode. There are parameters for no number of classes.

  Args:
    embed: f, from parameters and inputs to features.
    params: theta, by layer: nested dictionaries whose first names are the layers'.
    parts: supports, `inputs` and `labels`: the first generates, and each other one is adapted to;
      where there is one only, to that one.
    ways: number of classes.
    generator: psi, of a `perceptron` g with one output more than the reader.
    reader: phi, of a `perceptron` h.
    sizes: alpha: `layers`, layer -> its step size, `reader` and `softmax`.
    parameters: names in `params` of what adapts; see `core.parameters.matches`. None: none of it.
    steps: on every further support.
    first_order: the gradient of the steps is taken for a constant.

  Returns:
    Theta: `layers`, `reader` and `softmax`, which `read_logits` takes.

  Source: Kolios 2023, equations 4.19 to 4.21 and algorithm 4.3; Bansal et al. 2020.
  """
  first = parts[0]
  found = perceptron(generator, embed(params, first["inputs"]))
  softmax = generated_softmax(found, first["labels"], ways)
  adapted: Params = {"layers": params, "reader": reader, "softmax": softmax}
  rates = {
    "layers": {name: _spread(params[name], size) for name, size in sizes["layers"].items()},
    "reader": _spread(reader, sizes["reader"]),
    "softmax": _spread(softmax, sizes["softmax"]),
  }

  def loss(adapted: Params, rows: Rows) -> jax.Array:
    logits = read_logits(embed, adapted, rows["inputs"])
    return jnp.mean(token_nll(logits, rows["labels"]))

  for part in parts[1:] or parts:
    adapted = adapt(
      loss,
      adapted,
      part,
      steps=steps,
      rate=rates,
      parameters=("reader", "softmax", *(f"layers/{name}" for name in parameters)),
      first_order=first_order,
    )
  return adapted


def read_logits(embed: Embed, adapted: Params, inputs: jax.Array) -> Float[Array, "batch ways"]:
  r"""Logits of a softmax layer on features that a perceptron reads.

  .. math:: p(y \mid x) = \mathrm{softmax}(W h_\phi(f_\theta(x)) + b)

  Args:
    embed: f, from parameters and inputs to features.
    adapted: `layers` (theta), `reader` (phi) and `softmax` (W, b); see `leopard_adapted`.
    inputs: examples.

  Source: Kolios 2023, equation 4.20.
  """
  hidden = perceptron(adapted["reader"], embed(adapted["layers"], inputs))
  return hidden @ adapted["softmax"]["weights"].T + adapted["softmax"]["bias"][None]


def _spread(tree: PyTree, value: jax.Array) -> PyTree:
  """A tree like this one that has one value everywhere."""
  return jax.tree.map(lambda _: value, tree)


def set_context(
  values: Float[Array, "support units"], labels: Int[Array, "support"], ways: int
) -> Float[Array, "ways double_units"]:
  r"""What a support says about each of its classes, whatever the order of its examples.

  .. math:: \Bigl[m_n; \frac{1}{N} \sum_k m_k\Bigr], \qquad
            m_n = \frac{1}{|C^n|} \sum_{x_j \in C^n} v_j

  Exchanging two classes exchanges their rows.

  Source: Zaheer et al. 2017, theorem 2 (sums over sets).
  """
  means = class_means(values, labels, ways)
  whole = jnp.broadcast_to(jnp.mean(means, axis=0, keepdims=True), means.shape)
  return jnp.concatenate([means, whole], axis=1)


def conditioned_logits(
  hidden: Float[Array, "query units"],
  scale: Float[Array, "ways units"],
  shift: Float[Array, "ways units"],
  readout: Float[Array, "units"],
) -> Float[Array, "query ways"]:
  r"""The logit of every class by one predictor, whose units the class scales and shifts.

  .. math:: z_n(x) = v^\top \mathrm{relu}((1 + \gamma_n) \odot u(x) + \beta_n)

  Args:
    hidden: u, of every query example.
    scale: gamma.
    shift: beta.
    readout: v.

  Source: Perez et al. 2018, equation 1 (FiLM); Kolios 2023, algorithm 4.1 with the
    low-dimensional vector of section 4.8.5.
  """
  return jax.nn.relu((1 + scale)[None] * hidden[:, None] + shift[None]) @ readout
