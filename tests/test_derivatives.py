"""Every custom derivative rule of the project: its first and second derivatives, and forward mode.

`RULES` lists all of them. A rule that is not listed fails `test_every_custom_rule_is_listed`; one
that is listed is compared with a function of JAX's own derivatives, in float64.
"""

import ast
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core import linear as rows
from compmod_jax.core import sharding
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.kernels import float32_affine, grouped
from compmod_jax.kernels.attention import blocks, chosen, distances, routed_attention
from compmod_jax.kernels.cross_entropy import label_statistics
from compmod_jax.kernels.routing import (
  Choice,
  Readout,
  routing_softmax,
  routing_weights,
)
from compmod_jax.layers import deferred_scan, lm_head, lstm
from compmod_jax.mechanisms import dispatch, expert_exchange, meta_transfer
from compmod_jax.mechanisms.recoding import signals
from compmod_jax.models import conv_net
from compmod_jax.tasks import few_shot

ROOT = Path(__file__).parents[1]
PROMISE = "Reverse mode, any order."


class Rule(NamedTuple):
  """A function with a custom rule, one of the same values without, and where to compare them."""

  ours: Callable[..., Any]
  plain: Callable[..., Any]
  args: tuple[Any, ...]
  forward: bool = False  # whether forward mode is right, too


def numbers(*shape: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape)


def _scan_body(product: Any, others: Any, carry: Any, x: Any) -> tuple[Any, Any]:
  carry = jnp.tanh(product("w", carry) + product("w", x, transposed=True) + others[None])
  return carry, carry


def scan() -> Rule:
  def run(function: Any) -> Callable[..., Any]:
    return lambda w, b, c, xs: function(_scan_body, {"w": w}, b, c, xs)

  args = tuple(numbers(*s, seed=i) for i, s in enumerate([(4, 4), (4,), (3, 4), (5, 3, 4)]))
  return Rule(run(deferred_scan.scan), run(deferred_scan.plain), args)


def plus_zeros() -> Rule:
  """Of the first argument; the other one is always zeros, which only a first derivative is of."""
  zeros = np.zeros((3, 4))

  def ours(out: Any) -> Any:
    return deferred_scan._plus_zeros(out, jnp.asarray(zeros))

  return Rule(ours, lambda out: out + zeros, (numbers(3, 4, seed=0),))


def cell() -> Rule:
  def plain(activations: Any, before: Any) -> Any:
    found = lstm.gates(activations)
    return found, lstm.advance(found, before)

  return Rule(lstm.cell, plain, (numbers(2, 12, seed=0), numbers(2, 3, seed=1)))


def layer() -> Rule:
  """With as many rows as have W x in their steps on CPUs."""
  rows = 16

  def plain(x: Any, weights: Any, bias: Any, h: Any, c: Any) -> Any:
    def step(state: lstm.State, given: Any) -> tuple[lstm.State, Any]:
      rows = jnp.concatenate([given, state.h], axis=-1)
      state = lstm.advance(lstm.gates(rows @ weights + bias[None]), state.c)
      return state, state.h

    last, hidden = jax.lax.scan(step, lstm.State(h, c), x)
    return hidden, last

  def ours(x: Any, weights: Any, bias: Any, h: Any, c: Any) -> Any:
    return lstm.layer(x, lstm.Weights(*jnp.split(weights, [5]), bias), lstm.State(h, c))

  shapes = [(4, rows, 5), (8, 12), (12,), (rows, 3), (rows, 3)]
  return Rule(ours, plain, tuple(numbers(*s, seed=i) for i, s in enumerate(shapes)))


def of_pairs() -> Rule:
  """The number of each pair, gathered."""
  time = 6
  index = time - 1 - np.arange(time)[:, None] + np.arange(time)[None]

  def plain(table: Any) -> Any:
    return table[:, index]

  return Rule(distances.of_pairs, plain, (numbers(3, 2 * time - 1, seed=0),))


def in_order() -> Rule:
  """The rows of each head at the places of an order."""
  order = jnp.argsort(jnp.asarray(numbers(2, 5, 3, seed=1)), axis=1)
  back = jnp.argsort(order, axis=1)
  places = jax.nn.one_hot(order, 5, axis=-1)

  def ours(rows: Any) -> Any:
    return chosen._in_order(rows, order, back)

  def plain(rows: Any) -> Any:
    return jnp.einsum("bths,bshd->bthd", places, rows)

  return Rule(ours, plain, (numbers(2, 5, 3, 2, seed=0),))


def known_losses() -> Rule:
  targets = jnp.array([[1, 4], [0, 2], [3, 3]])

  def logits(hidden: Any, table: Any, bias: Any) -> Any:
    return hidden @ table.T + bias[None, None]

  def ours(hidden: Any, table: Any, bias: Any) -> Any:
    known = jax.vmap(signals.likelihood)(logits(hidden, table, bias), targets)
    vector = jax.vmap(signals.surprise)(known.powers, known.total, targets) @ table
    # As recoding that does not learn through its step gives them.
    given = jax.lax.stop_gradient((known.nll, known.powers, known.total, vector))
    return lm_head.known_losses(hidden, table, bias, targets, *given)

  def plain(hidden: Any, table: Any, bias: Any) -> Any:
    found = jax.nn.log_softmax(logits(hidden, table, bias))
    return -jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]

  args = numbers(3, 2, 4, seed=0), numbers(5, 4, seed=1), numbers(5, seed=2)
  return Rule(ours, plain, args)


def narrow_product() -> Rule:
  return Rule(rows.narrow_product, jnp.matmul, (numbers(5, 4, seed=0), numbers(4, 2, seed=1)))


def split_affine() -> Rule:
  """Numbers are so few and round that half precision has them exactly."""
  sizes = (5, 4), (4, 2), (2,)
  args = tuple(jnp.round(4 * numbers(*size, seed=seed)) / 4 for seed, size in enumerate(sizes))

  def plain(rows: Any, kernel: Any, bias: Any) -> Any:
    return rows @ kernel + bias[None]

  return Rule(float32_affine.split_affine, plain, args)


SIZES = jnp.array([2, 0, 3])
MEMBER = np.repeat(np.eye(3), SIZES, axis=0)


def grouped_product() -> Rule:
  def ours(rows: Any, kernels: Any) -> Any:
    return grouped.product(rows, kernels, SIZES, implementation="blocked", block=2)

  def plain(rows: Any, kernels: Any) -> Any:
    return jnp.einsum("nd,ng,gdf->nf", rows, MEMBER, kernels)

  return Rule(ours, plain, (numbers(5, 3, seed=0), numbers(3, 3, 2, seed=1)))


def grouped_outer() -> Rule:
  def ours(left: Any, right: Any) -> Any:
    return grouped.outer(left, right, SIZES, implementation="blocked", block=2)

  def plain(left: Any, right: Any) -> Any:
    return jnp.einsum("nd,ng,nf->gdf", left, MEMBER, right)

  return Rule(ours, plain, (numbers(5, 3, seed=0), numbers(5, 2, seed=1)))


PLACES = np.array([2, 0, 5, 1, 4, 3])  # pairs of three tokens and two choices, sorted by expert
PLAN = dispatch.Plan(
  *map(jnp.asarray, (PLACES, np.argsort(PLACES), np.array([3, 3]), np.eye(2)[[0, 0, 0, 1, 1, 1]]))
)


def spread() -> Rule:
  def ours(rows: Any) -> Any:
    return dispatch.spread(rows, PLAN, 2)

  return Rule(ours, lambda rows: rows[PLACES // 2], (numbers(3, 2, seed=0),))


def collect() -> Rule:
  def ours(rows: Any) -> Any:
    return dispatch.collect(rows, PLAN, 2)

  def plain(rows: Any) -> Any:
    return jnp.zeros((3, 2), rows.dtype).at[PLACES // 2].add(rows)

  return Rule(ours, plain, (numbers(6, 2, seed=0),))


def exchanged_experts() -> Rule:
  """Two devices with two experts each; all tokens choose those of one, which takes two rounds."""
  mesh = make_mesh(MeshConfig(data=1, tensor=2), jax.devices()[:2])
  active = np.arange(4) < 2

  def ours(inputs: Any, shares: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    weights = dispatch.ExpertWeights(up, up_bias, down, down_bias)
    chosen = active[None, None] | jnp.zeros_like(shares, bool)
    options = {"keep": 2, "capacity": 1.0, "implementation": "blocked"}
    given = inputs, jnp.where(chosen, shares, 0), chosen, weights, jnp.tanh
    return expert_exchange.sparse(*given, **options)[0]

  def plain(inputs: Any, shares: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    hidden = jnp.tanh(jnp.einsum("btd,def->btef", inputs, up) + up_bias[None, None])
    made = jnp.einsum("btef,efd->bted", hidden, down) + down_bias[None, None]
    return jnp.einsum("bte,bted->btd", jnp.where(active[None, None], shares, 0), made)

  shapes = (1, 4, 3), (1, 4, 4), (3, 4, 2), (4, 2), (4, 2, 3), (4, 3)
  whole = sharding.replicated(mesh)
  args = (jax.device_put(numbers(*s, seed=i).astype("f"), whole) for i, s in enumerate(shapes))
  return Rule(ours, plain, tuple(args))


CHOICE = Choice(rule="top_k", temperature=0.5)
INTERPRETED: dict[str, Any] = {"implementation": "tpu", "interpret": True}
REFERENCE: dict[str, Any] = {"implementation": "reference"}


def softmax() -> Rule:
  def ours(way: Any, scores: Any) -> Any:
    return routing_softmax(scores, choice=CHOICE, **way)

  both = (functools.partial(ours, way) for way in (INTERPRETED, REFERENCE))
  return Rule(*both, (numbers(6, 4, seed=0).astype(np.float32),))


def route() -> Rule:
  def ours(way: Any, rows: Any, kernel: Any, bias: Any) -> Any:
    return routing_weights(rows, Readout(kernel, bias), choice=CHOICE, **way)

  both = (functools.partial(ours, way) for way in (INTERPRETED, REFERENCE))
  shapes = (6, 4), (4, 4), (4,)
  return Rule(*both, tuple(numbers(*s, seed=i).astype(np.float32) for i, s in enumerate(shapes)))


def attention(platform: str, dim: int) -> Rule:
  """Heads that compete, from the product that made all they need."""
  heads, hidden = 2, 4
  columns = 3 * heads * dim + hidden

  def ours(way: Any, packed: Any, shift: Any, kernel: Any, bias: Any, factor: Any) -> Any:
    readout = Readout(kernel, bias)
    sizes = {"heads": heads, "head_dim": dim, "choice": CHOICE, "factor": factor}
    return routed_attention(packed, shift, readout, **sizes, **way)

  played = {"implementation": platform, "interpret": True}
  both = (functools.partial(ours, way) for way in (played, REFERENCE))
  shapes = (2, 5, columns), (columns,), (hidden, heads), (heads,), (2, 5, heads)
  return Rule(*both, tuple(numbers(*s, seed=i).astype(np.float32) for i, s in enumerate(shapes)))


def attention_in_blocks() -> Rule:
  mask = jnp.tril(jnp.ones((5, 5), bool))[None, None]

  def ours(query: Any, key: Any, value: Any, bias: Any) -> Any:
    return blocks.attention_in_blocks(query, key, value, bias, mask)

  def plain(query: Any, key: Any, value: Any, bias: Any) -> Any:
    return jax.nn.dot_product_attention(query, key, value, bias, mask)

  shapes = *[(2, 5, 2, 3)] * 3, (1, 2, 5, 5)
  args = tuple(numbers(*s, seed=i).astype(np.float32) for i, s in enumerate(shapes))
  return Rule(ours, plain, args)


def attention_on_a_gpu() -> Rule:
  return attention("gpu", 3)


def attention_on_a_tpu() -> Rule:
  return attention("tpu", 64)


def statistics_of_labels() -> Rule:
  labels = jnp.array([1, 0, 3, 3])

  def ours(way: Any, hidden: Any, table: Any, bias: Any) -> Any:
    found = label_statistics(hidden, table, labels, bias, **way)
    return found.normaliser, found.gold, found.total

  both = (functools.partial(ours, way) for way in (INTERPRETED, REFERENCE))
  shapes = (4, 3), (5, 3), (5,)
  return Rule(*both, tuple(numbers(*s, seed=i).astype(np.float32) for i, s in enumerate(shapes)))


def affine() -> Rule:
  shapes = (5, 3), (3, 4), (4,)
  args = tuple(numbers(*s, seed=i).astype(np.float32) for i, s in enumerate(shapes))
  return Rule(rows._rounded_affine, lambda x, kernel, bias: x @ kernel + bias[None], args)


ROUTING = "compmod_jax.kernels.routing"


def convolution() -> Rule:
  """Steps of two, then steps of one to fewer channels."""

  def plain(x: Any, first: Any, second: Any) -> Any:
    for kernel, step in ((first, 2), (second, 1)):
      high, wide = x.shape[1:3]
      padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
      x = sum(
        padded[:, i : i + high : step, j : j + wide : step] @ kernel[i, j]
        for i in range(3)
        for j in range(3)
      )
    return x

  def ours(x: Any, first: Any, second: Any) -> Any:
    return conv_net.convolve(conv_net.convolve(x, first, 2), second, 1)

  args = tuple(
    numbers(*s, seed=i) for i, s in enumerate([(2, 4, 3, 2), (3, 3, 2, 3), (3, 3, 3, 2)])
  )
  return Rule(ours, plain, args)


def logarithm_of_cosh() -> Rule:
  return Rule(
    meta_transfer.log_cosh, lambda x: jnp.log(jnp.cosh(x)), (numbers(3, 4, seed=0),), forward=True
  )


def sums_over_tasks() -> Rule:
  batch = {"x": numbers(4, 3, 2, seed=1), "index": np.zeros((4, 3), int)}

  def one(params: Any, rows: Any) -> Any:
    return {"nll": jnp.sum(jnp.sin(rows["x"] @ params["w"]) ** 2)}

  def ours(w: Any) -> Any:
    return few_shot.summed_over_tasks(one, {"w": w}, batch, 1)["nll"]

  def plain(w: Any) -> Any:
    return sum(one({"w": w}, {"x": x})["nll"] for x in batch["x"])

  return Rule(ours, plain, (numbers(2, 3, seed=0),))


RULES: dict[str, Callable[[], Rule]] = {
  # The three are each other's derivatives.
  "compmod_jax.models.conv_net.convolve": convolution,
  "compmod_jax.models.conv_net._spread": convolution,
  "compmod_jax.models.conv_net._correlate": convolution,
  "compmod_jax.mechanisms.meta_transfer.log_cosh": logarithm_of_cosh,
  "compmod_jax.tasks.few_shot.summed_over_tasks.run": sums_over_tasks,
  "compmod_jax.layers.deferred_scan.scan.run": scan,
  "compmod_jax.layers.deferred_scan._plus_zeros": plus_zeros,
  "compmod_jax.layers.lstm.cell": cell,
  "compmod_jax.layers.lstm.layer": layer,
  "compmod_jax.layers.lm_head.known_losses": known_losses,
  "compmod_jax.layers.lm_head._known_gradients": known_losses,
  "compmod_jax.core.linear.narrow_product": narrow_product,
  "compmod_jax.kernels.float32_affine.split_affine": split_affine,
  "compmod_jax.core.linear._rounded_affine": affine,
  "compmod_jax.kernels.attention.blocks.attention_in_blocks.run": attention_in_blocks,
  "compmod_jax.kernels.attention.dispatch._rule.run": attention_on_a_gpu,
  "compmod_jax.kernels.attention.dispatch.standing_for.run": attention_on_a_tpu,
  "compmod_jax.kernels.cross_entropy.dispatch._statistics": statistics_of_labels,
  "compmod_jax.kernels.cross_entropy.dispatch._gradients": statistics_of_labels,
  "compmod_jax.kernels.attention.chosen._in_order": in_order,
  "compmod_jax.kernels.attention.distances.of_pairs": of_pairs,
  "compmod_jax.kernels.grouped._product": grouped_product,
  "compmod_jax.kernels.grouped._outer": grouped_outer,
  "compmod_jax.mechanisms.dispatch.spread": spread,
  "compmod_jax.mechanisms.dispatch.collect": collect,
  "compmod_jax.mechanisms.expert_exchange.exchange": exchanged_experts,
  "compmod_jax.mechanisms.expert_exchange._rest": exchanged_experts,
  "compmod_jax.mechanisms.expert_exchange._all_rounds": exchanged_experts,
  f"{ROUTING}.dispatch._softmax": softmax,
  f"{ROUTING}.dispatch._route": route,
  # What the two before it use for their own derivatives.
  f"{ROUTING}.dispatch._apply": softmax,
}
NAMES = ("custom_vjp", "custom_jvp", "custom_gradient", "custom_transpose")


def custom_rules() -> Iterator[str]:
  """The functions of the project with a custom rule: decorated, or assigned from a call."""
  for path in sorted(p for top in ("compmod_jax", "train") for p in (ROOT / top).rglob("*.py")):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    yield from _rules_in(ast.parse(path.read_text()), module)


def _rules_in(node: ast.AST, place: str) -> Iterator[str]:
  for child in ast.iter_child_nodes(node):
    name = getattr(child, "name", None)
    if isinstance(child, ast.FunctionDef | ast.ClassDef):
      if any(_names_a_rule(decorator) for decorator in child.decorator_list):
        yield f"{place}.{name}"
      yield from _rules_in(child, f"{place}.{name}")
    elif isinstance(child, ast.Assign) and _names_a_rule(child.value):
      yield f"{place}.{ast.unparse(child.targets[0])}"
    else:
      yield from _rules_in(child, place)


def _names_a_rule(node: ast.AST) -> bool:
  return any(getattr(part, "attr", getattr(part, "id", "")) in NAMES for part in ast.walk(node))


@pytest.mark.parametrize(
  "source",
  [
    "@jax.custom_vjp\ndef rule(x): ...",
    "@functools.partial(jax.custom_jvp, nondiff_argnums=0)\ndef rule(x): ...",
    "from jax import custom_vjp\n@custom_vjp\ndef rule(x): ...",
    "rule = custom_jvp(plain)",
    "rule = jax.custom_gradient(plain)",
  ],
)
def test_a_custom_rule_is_found_however_it_is_made(source):
  assert list(_rules_in(ast.parse(source), "here")) == ["here.rule"]


def test_no_module_renames_what_makes_custom_rules():
  """Under another name they would not be found."""
  for path in (p for top in ("compmod_jax", "train") for p in (ROOT / top).rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom):
        assert not [one for one in node.names if one.name in NAMES and one.asname], path


def test_every_custom_rule_is_listed():
  found = list(custom_rules())
  assert len(set(found)) == len(found)
  assert set(found) == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_every_custom_rule_says_to_which_order_it_is_right(name):
  module, _, function = name.removesuffix(".run").rpartition(".")
  docstring = getattr(importlib.import_module(module), function).__doc__ or ""
  assert PROMISE in " ".join(docstring.split()), f"{name} has to say: {PROMISE}"


def slope(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
  """The squared norm of the gradient of something uneven in all outputs, and the gradient."""

  def value(args: tuple[Any, ...]) -> jax.Array:
    leaves = jax.tree.leaves(function(*args))
    return sum(jnp.sum(jnp.sin(leaf + number)) for number, leaf in enumerate(leaves, 1))

  gradient = jax.grad(value)(args)
  return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)), gradient


# Rules that are each other's derivatives have one comparison.
COMPARISONS = {make.__name__: make for make in RULES.values()}


@pytest.mark.parametrize("name", COMPARISONS)
def test_first_and_second_derivatives_are_those_without_the_custom_rule(name):
  rule = COMPARISONS[name]()
  single = jax.tree.leaves(rule.args)[0].dtype == np.float32
  with jax.enable_x64(not single):
    ours, plain = (
      jax.jit(jax.grad(functools.partial(slope, function), has_aux=True))(rule.args)
      for function in (rule.ours, rule.plain)
    )
    tolerance = 2e-4 if single else 1e-6  # products of groups add in float32
    for order, mine, theirs in (("first", ours[1], plain[1]), ("second", ours[0], plain[0])):
      for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, atol=tolerance * scale, err_msg=f"{name}: {order}")
    # A rule whose second derivative is nothing would agree with nothing but itself.
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(ours[0]))


@pytest.mark.parametrize("name", COMPARISONS)
def test_forward_mode_is_right_or_refused(name):
  rule = COMPARISONS[name]()

  def slopes(function: Callable[..., Any]) -> Any:
    return jax.jit(lambda args: jax.jvp(function, args, args)[1])(rule.args)

  if rule.forward:
    np.testing.assert_allclose(slopes(rule.ours), slopes(rule.plain), rtol=1e-5)
    return
  with pytest.raises(TypeError, match="forward-mode"):
    slopes(rule.ours)


def test_second_derivatives_of_the_deferred_scan_are_those_of_finite_differences():
  """The gradient after a step of gradient descent, as meta-learning takes it."""
  rule = scan()

  def after_a_step(args: tuple[Any, ...]) -> jax.Array:
    def loss(args: tuple[Any, ...]) -> jax.Array:
      return jnp.sum(jnp.sin(rule.ours(*args)[1]) ** 2)

    return loss(jax.tree.map(lambda x, g: x - 0.1 * g, args, jax.grad(loss)(args)))

  way = jax.tree.map(lambda x: numbers(*x.shape, seed=x.size), rule.args)

  def along(args: tuple[Any, ...], step: float) -> jax.Array:
    return after_a_step(jax.tree.map(lambda x, d: x + step * d, args, way))

  @jax.jit
  def found_and_expected(args: tuple[Any, ...], step: float) -> tuple[jax.Array, jax.Array]:
    slopes = jax.tree.map(lambda g, d: jnp.sum(g * d), jax.grad(after_a_step)(args), way)
    return sum(jax.tree.leaves(slopes)), (along(args, step) - along(args, -step)) / (2 * step)

  with jax.enable_x64(True):
    np.testing.assert_allclose(*found_and_expected(rule.args, 1e-5), rtol=1e-6)
