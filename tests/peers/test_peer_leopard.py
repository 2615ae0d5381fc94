"""LEOPARD's generated layer, an adapted step and outer gradients equal PyTorch's.

The reference is written from equations 4.19 to 4.21 of Kolios 2023.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.core.losses import token_nll
from compmod_jax.mechanisms.few_shot import init_perceptron, leopard_logits

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

DIM, FEATURES, SOFT, WAYS, SHOTS, STEPS = 4, 5, 3, 3, 2, 2


def embed(params, x):
  hidden = jnp.tanh(x @ params["layer_0"]["kernel"] + params["layer_0"]["bias"][None])
  return jnp.tanh(hidden @ params["layer_1"]["kernel"] + params["layer_1"]["bias"][None])


def parameters():
  made = {
    "layers": init_perceptron(jax.random.key(0), DIM, 6, FEATURES),
    "generator": init_perceptron(jax.random.key(1), FEATURES, 7, SOFT + 1),
    "reader": init_perceptron(jax.random.key(2), FEATURES, 7, SOFT),
    "sizes": {"layers": {"layer_1": 0.4}, "reader": 0.7, "softmax": 0.9},
  }

  def moved(x):
    """Biases that are not those of the start."""
    x = jnp.asarray(x, jnp.float32)
    return x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

  return jax.tree.map(moved, made)


def episode():
  random = np.random.default_rng(0)
  labels = np.repeat(np.arange(WAYS), SHOTS)
  inputs = [random.normal(size=(len(labels), DIM)).astype(np.float32) for _ in range(3)]
  return inputs, labels


def ours(params, first_order):
  inputs, labels = episode()
  parts = [{"inputs": jnp.asarray(x), "labels": jnp.asarray(labels)} for x in inputs]
  logits = leopard_logits(
    embed,
    params["layers"],
    parts[:2],
    parts[2]["inputs"],
    WAYS,
    generator=params["generator"],
    reader=params["reader"],
    sizes=params["sizes"],
    parameters=("layer_1",),
    steps=STEPS,
    first_order=first_order,
  )
  return jnp.mean(token_nll(logits, parts[2]["labels"])), logits


def theirs(params, first_order):
  inputs, labels = episode()
  inputs, labels = [torch.tensor(x) for x in inputs], torch.tensor(labels)

  def two_layers(p, prefix, x, last):
    hidden = torch.tanh(x @ p[f"{prefix}/layer_0/kernel"] + p[f"{prefix}/layer_0/bias"])
    out = hidden @ p[f"{prefix}/layer_1/kernel"] + p[f"{prefix}/layer_1/bias"]
    return torch.tanh(out) if last else out

  generated = two_layers(params, "generator", two_layers(params, "layers", inputs[0], True), False)
  classes = torch.stack([generated[labels == n].mean(0) for n in range(WAYS)])
  theta = {
    **{name: params[name] for name in params if name.startswith(("layers/layer_1", "reader"))},
    "w": classes[:, :-1],
    "b": classes[:, -1],
  }
  size = {"layers": "sizes/layers/layer_1", "reader": "sizes/reader"}

  def logits(theta, x):
    p = {**params, **theta}
    hidden = two_layers(p, "reader", two_layers(p, "layers", x, True), False)
    return hidden @ theta["w"].T + theta["b"]

  entropy = torch.nn.functional.cross_entropy
  for _ in range(STEPS):
    inner = entropy(logits(theta, inputs[1]), labels)
    slopes = torch.autograd.grad(inner, list(theta.values()), create_graph=not first_order)
    slopes = [g.detach() for g in slopes] if first_order else slopes
    rates = [params[size.get(name.partition("/")[0], "sizes/softmax")] for name in theta]
    theta = {n: x - a * g for (n, x), a, g in zip(theta.items(), rates, slopes, strict=True)}
  found = logits(theta, inputs[2])
  return entropy(found, labels), found


@pytest.mark.parametrize("first_order", [False, True])
def test_logits_loss_and_outer_gradients_equal_pytorch(first_order):
  params = parameters()
  run = jax.jit(
    lambda params: jax.value_and_grad(lambda p: ours(p, first_order), has_aux=True)(params)
  )
  (loss, logits), grads = run(params)
  given = {
    name: torch.tensor(np.array(x)).requires_grad_()
    for name, x in flatten_dict(params, sep="/").items()
  }
  their_loss, their_logits = theirs(given, first_order)
  np.testing.assert_allclose(logits, their_logits.detach().numpy(), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(loss, their_loss.item(), rtol=1e-5)
  expected = torch.autograd.grad(their_loss, list(given.values()), allow_unused=True)
  mine = flatten_dict(grads, sep="/")
  for name, slope in zip(given, expected, strict=True):
    assert slope is not None, name
    scale = max(slope.abs().max().item(), 1e-2)
    np.testing.assert_allclose(mine[name], slope.numpy(), atol=2e-4 * scale, err_msg=name)
