"""Neural interpreters equal PyTorch code that runs every function by itself, as the equations say.

The peer has the explicit attention weights of equation 4.38 and multiplies inputs with what codes
make of them, function by function and head by head, where ours has one product of all.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.layers.interpreter import LineOfCode, ModAttn, ModLin, ModMLP, Script
from compmod_jax.models.neural_interpreter import InterpreterConfig

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
functional = torch.nn.functional

pytestmark = pytest.mark.peers

BATCH, TIME = 2, 5
TINY = InterpreterConfig(
  dim=6, functions=3, iterations=2, lines=2, heads=2, ffn_dim=7, code_dim=5, type_dim=4,
  type_hidden=8, scripts=2, truncation=1.1, bandwidth=0.4,
)  # fmt: skip


# The peer: functions of PyTorch tensors, with parameters as ours are called.


def mod_lin(p, x, code):
  """Equation 4.35 for one code; x [..., inner]."""
  made = []
  for part, kernel in enumerate(p["kernel"]):
    factors = functional.layer_norm(
      code @ p["code"][part], kernel.shape[:1], p["norm"]["scale"][part], p["norm"]["bias"][part]
    )
    made.append((x * factors) @ kernel)
  return torch.cat(made, dim=-1) + p["bias"]


def mod_mlp(p, x, code):
  """Equation 4.36."""
  return mod_lin(p["down"], functional.gelu(mod_lin(p["up"], x, code)), code)


def mod_attn(p, x, code, weights, epsilon):
  """Equations 4.37 to 4.40 for one function; x [time, embed], weights [time]."""
  width = x.shape[-1] // TINY.heads
  parts = mod_lin(p["qkv"], x, code).split(width, dim=-1)
  read = []
  for head in range(TINY.heads):
    query, key, value = (parts[kind * TINY.heads + head] for kind in range(3))
    attention = torch.softmax(query @ key.T / width**0.5, dim=-1)
    both = weights[:, None] * weights[None, :] * attention
    read.append(both / (epsilon + both.sum(dim=-1, keepdim=True)) @ value)
  return mod_lin(p["out"], torch.cat(read, dim=-1), code)


def norm(p, x):
  return functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"])


def line_of_code(p, x, code, weights, epsilon):
  """Equation 4.41 for one function."""
  read = mod_attn(p["attention"], norm(p["attention_norm"], x), code, weights, epsilon)
  x = x + weights[:, None] * read
  return x + weights[:, None] * mod_mlp(p["ffn"], norm(p["ffn_norm"], x), code)


def type_matching(p, x, config):
  """Equations 4.33 and 4.34; x [time, embed] to [time, functions]."""
  hidden = functional.gelu(norm(p["norm"], x) @ p["hidden"]["kernel"] + p["hidden"]["bias"])
  types = hidden @ p["type"]["kernel"] + p["type"]["bias"]
  distance = 1 - functional.cosine_similarity(
    types[:, None], p["signatures"].detach()[None], dim=-1
  )
  near = torch.exp(-distance / torch.exp(p["log_sigma"])) * (distance < config.truncation)
  return near / (config.epsilon + near.sum(dim=-1, keepdim=True))


def script(p, x, config):
  """Equations 4.42 to 4.44, for one example."""
  for _ in range(config.iterations):
    weights = type_matching(p["router"], x, config)
    total = x
    for u in range(config.functions):
      stream = x
      for number in range(config.lines):
        stream = line_of_code(
          p[f"line_{number}"], stream, p["codes"][u], weights[:, u], config.epsilon
        )
      total = total + weights[:, u, None] * stream
    x = total
  return x


def classifier(p, numbers, config):
  """The whole model, for one example [size]."""
  x = numbers[:, None] @ p["embed"]["kernel"] + p["embed"]["bias"] + p["place"]
  x = torch.cat([x, p["cls"]])
  for number in range(config.scripts):
    x = script(p[f"script_{number}"], x, config)
  features = norm(p["norm"], x[len(numbers) :])
  return (features @ p["head"]["kernel"] + p["head"]["bias"])[:, 0]


# Comparisons.


def tensors(tree):
  return jax.tree.map(lambda leaf: torch.tensor(np.array(leaf)).requires_grad_(), tree)


def randomised(params, seed):
  """The same parameters with noise, so that no bias is 0 and no scale is 1."""
  leaves, shape = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    shape, [x + 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
  )


def equal(mine, theirs, tolerance=2e-5):
  """Outputs, and gradients of a sum of sines with respect to every parameter and input.

  Args:
    mine: from trees of arrays to an array.
    theirs: the same of tensors.
    tolerance: relative to the largest entry of an array.
  """

  def compare(*trees):
    def loss(*trees):
      y = mine(*trees)
      return jnp.sum(jnp.sin(y)), y

    places = tuple(range(len(trees)))
    slopes, y = jax.jit(jax.grad(loss, places, has_aux=True))(*trees)
    given = tensors(trees)
    expected = theirs(*given)
    torch.sin(expected).sum().backward()
    expected_slopes = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy(), given
    )
    pairs = [(y, expected.detach().numpy())]
    pairs += list(zip(jax.tree.leaves(slopes), jax.tree.leaves(expected_slopes), strict=True))
    for found, wanted in pairs:
      np.testing.assert_allclose(
        found, wanted, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(wanted).max()))
      )
    return slopes

  return compare


def made(module, *inputs, seed=0):
  params = nn.unbox(module.init(jax.random.key(seed), *inputs))["params"]
  return randomised(params, seed + 1)


CODES = jax.random.normal(jax.random.key(10), (3, 5))
STREAMS = jax.random.normal(jax.random.key(11), (3, BATCH, TIME, 6))
WEIGHTS = jax.random.uniform(jax.random.key(12), (3, BATCH, TIME)).at[0, 0, 1].set(0)


@pytest.mark.parametrize("copies", [1, 3])
def test_modulated_layers_equal_pytorch(copies):
  module, x = ModLin(8, 2), STREAMS[:copies, 0]

  def theirs(params, x, codes):
    return torch.stack([mod_lin(params, x[u % copies], codes[u]) for u in range(3)])

  equal(lambda params, *args: module.apply({"params": params}, *args), theirs)(
    made(module, x, CODES), x, CODES
  )


def test_modulated_networks_equal_pytorch():
  module, x = ModMLP(TINY), STREAMS[:, 0]

  def theirs(params, x, codes):
    return torch.stack([mod_mlp(params, x[u], codes[u]) for u in range(3)])

  equal(lambda params, *args: module.apply({"params": params}, *args), theirs)(
    made(module, x, CODES), x, CODES
  )


@pytest.mark.parametrize("kind", ["attention", "line"])
def test_routed_attention_and_lines_of_code_equal_pytorch(kind):
  module, peer = (
    (ModAttn(TINY), mod_attn) if kind == "attention" else (LineOfCode(TINY), line_of_code)
  )

  def theirs(params, x, codes, weights):
    return torch.stack(
      [
        torch.stack([peer(params, x[u, b], codes[u], weights[u, b], 1e-6) for b in range(BATCH)])
        for u in range(3)
      ]
    )

  equal(lambda params, *args: module.apply({"params": params}, *args), theirs)(
    made(module, STREAMS, CODES, WEIGHTS), STREAMS, CODES, WEIGHTS
  )


def test_scripts_equal_pytorch():
  module, x = Script(TINY), STREAMS[0]

  def theirs(params, x):
    return torch.stack([script(params, one, TINY) for one in x])

  equal(lambda params, x: module.apply({"params": params}, x), theirs)(made(module, x), x)


@pytest.mark.parametrize("truncation", [1.1, 2.1])
def test_the_whole_interpreter_and_every_gradient_equal_pytorch(truncation):
  config = dataclasses.replace(TINY, truncation=truncation)
  module = config.classifier((4,), 3)
  x = jax.random.uniform(jax.random.key(5), (BATCH, 4))

  def theirs(params, x):
    return torch.stack([classifier(params, one, config) for one in x])

  params = made(module, x)
  slopes, _ = equal(lambda params, x: module.apply({"params": params}, x), theirs, 1e-4)(params, x)
  assert np.all(slopes["script_0"]["router"]["signatures"] == 0)
