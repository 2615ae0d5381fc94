"""Gradients of experts and discriminator equal PyTorch's, where each has a backward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.mechanisms.competing_experts import compete
from compmod_jax.models.competing_experts import CompetingExperts, CompetingExpertsConfig

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")

pytestmark = pytest.mark.peers

EXPERTS, SIZE, BATCH = 3, 6, 9
CONFIG = CompetingExpertsConfig(
  experts=EXPERTS, layers=2, filters=4, discriminator_layers=2, discriminator_filters=3
)


def theirs(part):
  return torch.tensor(np.array(part), requires_grad=True)


def convolve(layer, x, stride=1):
  """Kernels are [places x channels, filters], places row by row."""
  kernel, bias = layer["kernel"], layer["bias"]
  channels = x.shape[1]
  weight = kernel.reshape(3, 3, channels, -1).permute(3, 2, 0, 1)
  size = x.shape[-1]
  # A border of one zero all around; an odd last step reads no further.
  made = torch.nn.functional.conv2d(x, weight, bias, stride=stride, padding=1)
  side = -(-size // stride)
  return made[..., :side, :side]


ACTIVATIONS = {
  "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.2),
  "elu": torch.nn.functional.elu,
}


def expert(layers, x, activation):
  x = ACTIVATIONS[activation](convolve(layers["layer_0"], x[:, None]))
  x = convolve(layers["layer_1"], x)[:, 0]
  inside = x.clamp(0, 1)
  return inside + 0.1 * (x - inside)


def score(layers, x):
  x = x[:, None]
  for i in range(2):
    x = torch.nn.functional.leaky_relu(convolve(layers[f"layer_{i}"], x, 2), 0.2)
  # Features are numbered by channel, then by place.
  return (x.flatten(1) @ layers["head"]["kernel"] + layers["head"]["bias"])[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_step_of_both_sides_has_the_gradients_of_two_backward_passes(activation):
  draw = np.random.default_rng(0)
  x = draw.random((BATCH, SIZE, SIZE)).astype(np.float32)
  real = draw.random((BATCH, SIZE, SIZE)).astype(np.float32)
  module = CompetingExperts(dataclasses.replace(CONFIG, activation=activation))
  params = module.init(jax.random.key(1), jnp.asarray(x))["params"]

  def objective(params):
    found = compete(
      lambda p, x: module.apply({"params": {"experts": p}}, x, method="transform"),
      lambda p, x: module.apply({"params": {"discriminator": p}}, x, method="score"),
      (params["experts"], params["discriminator"]),
      jnp.asarray(x),
      jnp.asarray(real),
    )
    against = found.discriminator_loss_original + found.discriminator_loss_output
    return jnp.mean(found.expert_loss) + jnp.mean(against), found

  grads, found = jax.grad(objective, has_aux=True)(params)

  their_experts = [
    jax.tree.map(lambda leaf, i=i: theirs(leaf[i]), params["experts"]) for i in range(EXPERTS)
  ]
  their_discriminator = jax.tree.map(theirs, params["discriminator"])
  images, originals = torch.tensor(x), torch.tensor(real)
  outputs = [expert(layers, images, activation) for layers in their_experts]
  scores = torch.stack([score(their_discriminator, made) for made in outputs])
  winner = scores.argmax(0)
  np.testing.assert_allclose(found.scores, scores.detach().numpy(), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(found.winner, winner.numpy())
  assert len(set(winner.tolist())) > 1

  # The discriminator: equation 4.9, on outputs that stand still.
  log = torch.nn.functional.logsigmoid
  gain = log(score(their_discriminator, originals)).mean()
  for made in outputs:
    gain = gain + log(-score(their_discriminator, made.detach())).mean() / EXPERTS
  (-gain).backward()
  for name, ours in jax.tree_util.tree_leaves_with_path(grads["discriminator"]):
    peer = their_discriminator
    for key in name:
      peer = peer[key.key]
    np.testing.assert_allclose(ours, peer.grad.numpy(), rtol=1e-3, atol=1e-6)

  # Experts, one by one: each learns from the images that it wins.
  for number, layers in enumerate(their_experts):
    mine = images[winner == number]
    loss = -log(score(their_discriminator, expert(layers, mine, activation))).sum() / BATCH
    loss.backward()
    for name, ours in jax.tree_util.tree_leaves_with_path(grads["experts"]):
      peer = layers
      for key in name:
        peer = peer[key.key]
      np.testing.assert_allclose(ours[number], peer.grad.numpy(), rtol=1e-3, atol=1e-6)
