"""The convolutional net and an outer gradient of MAML equal PyTorch's, on copied weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.core.losses import token_nll
from compmod_jax.models.conv_net import ConvNetConfig
from compmod_jax.tasks.few_shot import adapted_loss

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

BLOCKS, FILTERS, WAYS, STEPS, RATE = 2, 5, 3, 2, 0.3


def net(halve):
  module = ConvNetConfig(blocks=BLOCKS, filters=FILTERS, halve=halve).classifier((9, 9, 1), WAYS)
  x = np.random.default_rng(0).normal(size=(9, 9, 9, 1)).astype(np.float32)
  params = dict(module.init(jax.random.key(0), jnp.asarray(x))["params"])
  # A head of some size, and scales and biases that are not those of the start.
  params["head"]["kernel"] = 20 * params["head"]["kernel"]
  for i in range(BLOCKS):
    for name, seed in (("scale", 1), ("bias", 2)):
      noise = np.random.default_rng([seed, i]).normal(size=FILTERS)
      params[f"block_{i}"][name] = params[f"block_{i}"][name] + jnp.asarray(0.2 * noise)
  return module, params, x


def their_params(params):
  found = {}
  for i in range(BLOCKS):
    block = {name: torch.tensor(np.array(part)) for name, part in params[f"block_{i}"].items()}
    found[f"block_{i}/kernel"] = block["kernel"].permute(3, 2, 0, 1).contiguous()
    found[f"block_{i}/scale"], found[f"block_{i}/bias"] = block["scale"], block["bias"]
  found["head/kernel"] = torch.tensor(np.array(params["head"]["kernel"])).T.contiguous()
  found["head/bias"] = torch.tensor(np.array(params["head"]["bias"]))
  return {name: value.requires_grad_() for name, value in found.items()}


def theirs(params, x, halve):
  functional, stride = torch.nn.functional, 2 if halve == "stride" else 1
  x = x.permute(0, 3, 1, 2)
  for i in range(BLOCKS):
    x = functional.conv2d(x, params[f"block_{i}/kernel"], stride=stride, padding=1)
    scale, bias = params[f"block_{i}/scale"], params[f"block_{i}/bias"]
    x = functional.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
    x = functional.relu(x)
    x = functional.max_pool2d(x, 2) if halve == "pool" else x
  x = x.permute(0, 2, 3, 1).flatten(1) if halve == "pool" else x.mean((2, 3))
  return functional.linear(x, params["head/kernel"], params["head/bias"])


def ours_like(grads):
  found = {}
  for i in range(BLOCKS):
    block = grads[f"block_{i}"]
    found[f"block_{i}/kernel"] = np.transpose(block["kernel"], (3, 2, 0, 1))
    found[f"block_{i}/scale"], found[f"block_{i}/bias"] = block["scale"], block["bias"]
  found["head/kernel"], found["head/bias"] = grads["head"]["kernel"].T, grads["head"]["bias"]
  return found


@pytest.mark.parametrize("halve", ["pool", "stride"])
def test_logits_equal_pytorch(halve):
  module, params, x = net(halve)
  mine = module.apply({"params": params}, jnp.asarray(x))
  their = theirs(their_params(params), torch.tensor(x), halve).detach().numpy()
  assert np.abs(their).max() > 0.3
  np.testing.assert_allclose(mine, their, atol=2e-5)


@pytest.mark.parametrize("halve", ["pool", "stride"])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_outer_gradient_of_maml_equals_pytorch(halve, first_order):
  module, params, x = net(halve)
  labels = np.arange(9) % WAYS
  episode = tuple(
    {"x": jnp.asarray(x[part]), "y": jnp.asarray(labels[part])} for part in (slice(3), slice(3, 9))
  )

  def loss(params, rows):
    return jnp.mean(token_nll(module.apply({"params": params}, rows["x"]), rows["y"]))

  how = {"steps": STEPS, "rate": RATE, "first_order": first_order}
  value = jax.jit(jax.value_and_grad(functools.partial(adapted_loss, loss, **how)))
  mine, grads = value(params, episode)

  start = their_params(params)
  moved, inputs, targets = dict(start), torch.tensor(x), torch.tensor(labels)
  entropy = torch.nn.functional.cross_entropy
  for _ in range(STEPS):
    inner = entropy(theirs(moved, inputs[:3], halve), targets[:3])
    slopes = torch.autograd.grad(inner, list(moved.values()), create_graph=not first_order)
    moved = {name: p - RATE * g for (name, p), g in zip(moved.items(), slopes, strict=True)}
  outer = entropy(theirs(moved, inputs[3:], halve), targets[3:])
  expected = torch.autograd.grad(outer, list(start.values()))
  np.testing.assert_allclose(mine, outer.item(), rtol=1e-4)
  for name, slope in zip(start, expected, strict=True):
    scale = slope.abs().max().item()
    np.testing.assert_allclose(
      ours_like(grads)[name], slope.numpy(), atol=2e-4 * max(scale, 1), err_msg=name
    )
