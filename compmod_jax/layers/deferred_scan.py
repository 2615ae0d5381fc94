"""A scan over time whose weight gradients are one matrix product each, after the scan.

The gradient of a weight that a scan uses is a sum over steps. Written plainly, the reverse pass
reads and writes the whole gradient at every step; but only the products' inputs and the gradients
of their outputs differ from step to step, and kept for all steps they give the sum in one product:

.. math:: \\frac{\\partial L}{\\partial W} = \\sum_t a_t^T \\frac{\\partial L}{\\partial (a_t W)}
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from compmod_jax.core.linear import transposed_product

Weights = Mapping[str, jax.Array]
Others = TypeVar("Others")
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


class _Call(NamedTuple):
  """A product that a step makes: with which weight, whether transposed, and what it gives."""

  name: str
  transposed: bool
  out: jax.ShapeDtypeStruct


class Product:
  """What a step multiplies with: `product(name, rows)` is rows @ weights[name].

  Attributes:
    weights: by name, [inner, outer].
  """

  def __init__(self, weights: Weights):
    self.weights = weights

  def __call__(self, name: str, rows: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Rows [rows, inner] times a weight, or [rows, outer] times its transpose."""
    return _times(rows, self.weights[name], transposed)

  def fixed(self, name: str, rows: jax.Array, *, transposed: bool = False) -> jax.Array:
    """The same, through which no gradient passes, neither to the weight nor to the rows."""
    weight = lax.stop_gradient(self.weights[name])
    return _times(lax.stop_gradient(rows), weight, transposed)


@jax.custom_vjp
def _plus_zeros(out: jax.Array, zeros: jax.Array) -> jax.Array:
  """The sum, which never reads the zeros. Reverse mode, any order."""
  return out


_plus_zeros.defvjp(lambda out, zeros: (out, None), lambda _, cotangent: (cotangent, cotangent))


class _Deferring(Product):
  """Notes what goes into every product, and adds to each an output of zeros to differentiate by."""

  def __init__(self, weights: Weights, zeros: tuple[jax.Array, ...] | None):
    super().__init__(weights)
    self.zeros, self.calls, self.rows = zeros, list[_Call](), list[jax.Array]()

  def __call__(self, name: str, rows: jax.Array, *, transposed: bool = False) -> jax.Array:
    out = _times(rows, self.weights[name], transposed)
    if self.zeros is not None:
      out = _plus_zeros(out, self.zeros[len(self.rows)])
    self.calls.append(_Call(name, transposed, jax.ShapeDtypeStruct(out.shape, out.dtype)))
    self.rows.append(rows)
    return out


def _times(rows: jax.Array, weight: jax.Array, transposed: bool) -> jax.Array:
  """rows @ weight, or rows @ weight.T."""
  return transposed_product(rows, weight) if transposed else rows @ weight


Body = Callable[[Product, Others, Carry, X], tuple[Carry, Y]]


class _Kept(NamedTuple):
  """What the reverse pass reads: the scan's own, the inputs of all products, and the weights."""

  pull: Callable[..., tuple[PyTree, ...]]
  rows: tuple[jax.Array, ...]
  weights: Weights


def scan(
  body: Body[Others, Carry, X, Y], weights: Weights, others: Others, carry: Carry, xs: X
) -> tuple[Carry, Y]:
  """`lax.scan` whose steps multiply with weights, with the weights' gradients formed afterwards.

  Args:
    body: `(product, others, carry, x) -> (carry, y)`; its large products are made by `product`, a
      `Product`, and it closes over nothing that is differentiated.
    weights: matrices by name.
    others: what else is differentiated and the same at every step: biases, step sizes.
    carry: before the first step.
    xs: of every step, [time, ...].

  Returns:
    The last carry and the stacked ys, with the derivatives of the plain scan. Reverse mode, any
    order.
  """

  calls = _calls(body, weights, others, carry, xs)

  run = jax.custom_vjp(functools.partial(plain, body))

  def forward(
    weights: Weights, others: Others, carry: Carry, xs: X
  ) -> tuple[tuple[Carry, Y], _Kept]:
    steps = jax.tree.leaves(xs)[0].shape[0]
    zeros = tuple(jnp.zeros((steps, *call.out.shape), call.out.dtype) for call in calls)

    def inner(
      zeros: tuple[jax.Array, ...], others: Others, carry: Carry, xs: X
    ) -> tuple[tuple[Carry, Y], tuple[jax.Array, ...]]:
      def step(
        carry: Carry, x_zeros: tuple[X, tuple[jax.Array, ...]]
      ) -> tuple[Carry, tuple[Y, tuple[jax.Array, ...]]]:
        product = _Deferring(weights, x_zeros[1])
        carry, y = body(product, others, carry, x_zeros[0])
        return carry, (y, tuple(product.rows))

      carry, (ys, rows) = lax.scan(step, carry, (xs, zeros))
      return (carry, ys), rows

    result, pull, rows = jax.vjp(inner, zeros, others, carry, xs, has_aux=True)
    return result, _Kept(pull, rows, weights)

  def backward(kept: _Kept, cotangent: PyTree) -> tuple[PyTree, ...]:
    pull, rows, weights = kept
    outs, *rest = pull(cotangent)
    parts: dict[str, list[jax.Array]] = {name: [] for name in weights}
    for call, a, out in zip(calls, rows, outs, strict=True):
      pair = (out, a) if call.transposed else (a, out)
      first, second = (x.reshape(-1, x.shape[-1]) for x in pair)
      parts[call.name].append(lax.dot_general(first, second, (((0,), (0,)), ((), ()))))
    grads = {n: sum(found, jnp.zeros_like(weights[n])) for n, found in parts.items()}
    return (grads, *rest)

  run.defvjp(forward, backward)
  return run(weights, others, carry, xs)


def plain(
  body: Body[Others, Carry, X, Y], weights: Weights, others: Others, carry: Carry, xs: X
) -> tuple[Carry, Y]:
  """The same scan, differentiated step by step: any order, and through `jax.grad` in the body."""
  return lax.scan(lambda c, x: body(Product(weights), others, c, x), carry, xs)


def _calls(
  body: Body[Others, Carry, X, Y], weights: Weights, others: Others, carry: Carry, xs: X
) -> list[_Call]:
  """The products that a step makes, in order."""
  calls: list[_Call] = []

  def trace(weights: Weights, others: Others, carry: Carry, x: X) -> None:
    product = _Deferring(weights, None)
    body(product, others, carry, x)
    calls.extend(product.calls)

  first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
  jax.eval_shape(trace, weights, others, carry, first)
  return calls
