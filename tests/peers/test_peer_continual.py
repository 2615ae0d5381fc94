"""Outer gradients of ANML and OML, penalty and distillation equal PyTorch's, on copied weights.

The networks of the reference are written from the equations (Beaulieu et al. 2020, section 3;
Javed & White 2019, Algorithm 1), with single-example steps through autograd.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core.losses import token_nll
from compmod_jax.mechanisms import continual
from compmod_jax.models.neuromodulated import NeuromodulatedConfig

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BLOCKS, SIDE, CLASSES, TRAJECTORY, REMEMBER, RATE = 2, 9, 6, 5, 7, 0.1


def net(kind):
  config = NeuromodulatedConfig(kind=kind, blocks=BLOCKS, filters=4, modulator_filters=3)
  module = config.classifier((SIDE, SIDE, 1), CLASSES)
  draw = np.random.default_rng(0)
  rows = TRAJECTORY + REMEMBER
  x = draw.normal(size=(rows, SIDE, SIDE, 1)).astype(np.float32)
  y = np.concatenate([np.full(TRAJECTORY, 2), draw.integers(CLASSES, size=REMEMBER)])
  params = jax.jit(module.init)(jax.random.key(0), jnp.asarray(x))["params"]
  # Scales and biases that are not those of the start.
  params = jax.tree.map(
    lambda p: p + 0.2 * jnp.asarray(draw.normal(size=p.shape), jnp.float32), params
  )
  return module, params, x, y


def named(params):
  return {name: np.asarray(x) for name, x in flatten_dict(dict(params), sep="/").items()}


def convolutions(p, prefix, x):
  for i in range(BLOCKS):
    kernel = p[f"{prefix}/block_{i}/kernel"].permute(3, 2, 0, 1)
    x = torch.nn.functional.conv2d(x, kernel, stride=2, padding=1)
    x = (x - x.mean((2, 3), keepdim=True)) / torch.sqrt(
      x.var((2, 3), unbiased=False, keepdim=True) + 1e-5
    )
    scale, bias = (p[f"{prefix}/block_{i}/{n}"].reshape(1, -1, 1, 1) for n in ("scale", "bias"))
    x = torch.relu(x * scale + bias)
  return x.permute(0, 2, 3, 1).flatten(1)


def theirs(p, x, kind):
  x = x.permute(0, 3, 1, 2)
  if kind == "anml":
    gate = convolutions(p, "modulator", x) @ p["modulator/out/kernel"] + p["modulator/out/bias"]
    hidden = convolutions(p, "prediction/convolutions", x) * torch.sigmoid(gate)
  elif kind == "oml":
    hidden = convolutions(p, "representation", x)
    hidden = torch.relu(hidden @ p["prediction/layer/kernel"] + p["prediction/layer/bias"])
  else:
    hidden = convolutions(p, "prediction/convolutions", x)
  return hidden @ p["prediction/head/kernel"].T


@pytest.mark.parametrize("kind", ["anml", "oml", "plain"])
def test_logits_equal_pytorch(kind):
  module, params, x, _ = net(kind)
  mine = jax.jit(module.apply)({"params": params}, jnp.asarray(x))
  p = {name: torch.tensor(value) for name, value in named(params).items()}
  their = theirs(p, torch.tensor(x), kind).numpy()
  assert np.abs(their).max() > 0.3
  np.testing.assert_allclose(mine, their, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["anml", "oml", "plain"])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_outer_gradient_equals_pytorch(kind, first_order):
  module, params, x, y = net(kind)

  def loss(params, rows):
    logits = module.apply({"params": params}, rows["x"])
    return jnp.mean(token_nll(logits, rows["y"]))

  def outer(params):
    rows = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    return continual.outer_loss(
      loss,
      params,
      jax.tree.map(lambda v: v[:TRAJECTORY], rows),
      jax.tree.map(lambda v: v[TRAJECTORY:], rows),
      rate=RATE,
      parameters=("prediction",),
      first_order=first_order,
    )

  value, grads = jax.jit(jax.value_and_grad(outer))(params)

  start = {n: torch.tensor(v).requires_grad_() for n, v in named(params).items()}
  moved, inputs, labels = dict(start), torch.tensor(x), torch.tensor(y)
  entropy = torch.nn.functional.cross_entropy
  inner = [name for name in start if name.startswith("prediction/")]
  for j in range(TRAJECTORY):
    step = entropy(theirs(moved, inputs[j : j + 1], kind), labels[j : j + 1])
    slopes = torch.autograd.grad(
      step, [moved[name] for name in inner], create_graph=not first_order
    )
    moved |= {n: moved[n] - RATE * g for n, g in zip(inner, slopes, strict=True)}
  last = entropy(theirs(moved, inputs, kind), labels)
  expected = torch.autograd.grad(last, list(start.values()))
  np.testing.assert_allclose(value, last.item(), rtol=1e-3)
  found = named(grads)
  for name, slope in zip(start, expected, strict=True):
    scale = slope.abs().max().item()
    np.testing.assert_allclose(
      found[name], slope.numpy(), atol=2e-3 * max(scale, 1e-2), err_msg=name
    )


def test_penalty_and_fisher_diagonal_equal_pytorch():
  module, params, x, y = net("plain")
  names = ("prediction/head",)

  def loss(params, rows):
    return jnp.mean(token_nll(module.apply({"params": params}, rows["x"]), rows["y"]))

  rows = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
  fisher = jax.jit(lambda p: continual.fisher_diagonal(loss, p, rows, names))(params)
  p = {n: torch.tensor(v).requires_grad_() for n, v in named(params).items()}
  head, total = p["prediction/head/kernel"], 0.0
  for j in range(len(x)):
    nll = torch.nn.functional.cross_entropy(
      theirs(p, torch.tensor(x[j : j + 1]), "plain"), torch.tensor(y[j : j + 1])
    )
    total = total + torch.autograd.grad(nll, head)[0] ** 2
  total = total / len(x)
  np.testing.assert_allclose(fisher["prediction/head/kernel"], total, rtol=1e-3, atol=1e-5)
  anchor = {name: x + 0.3 for name, x in continual.selected(params, names).items()}
  value = continual.quadratic_penalty(params, anchor, fisher)
  np.testing.assert_allclose(value, 0.5 * 0.09 * total.sum().item(), rtol=1e-3)


def test_distillation_equals_pytorch():
  draw = np.random.default_rng(1)
  logits, teacher = (draw.normal(size=(4, CLASSES)).astype(np.float32) for _ in range(2))
  known = np.array([True, True, False, True, False, False])
  mine, slope = jax.value_and_grad(
    lambda z: jnp.sum(continual.distillation_loss(z, jnp.asarray(teacher), jnp.asarray(known), 2.0))
  )(jnp.asarray(logits))
  z = torch.tensor(logits).requires_grad_()
  q = torch.softmax(torch.tensor(teacher[:, known]) / 2, -1)
  their = -(q * torch.log_softmax(z[:, torch.tensor(known)] / 2, -1)).sum()
  np.testing.assert_allclose(mine, their.item(), rtol=1e-5)
  np.testing.assert_allclose(slope, torch.autograd.grad(their, z)[0], atol=1e-5)
