r"""Experts that compete for transformed examples, so that each inverts one transformation.

A transformed example :math:`x'` goes to all experts :math:`E_i`; a discriminator :math:`D` scores
what each makes of it, and the expert with the highest score wins. The winner alone learns from the
example, to raise its score, and the discriminator learns untransformed examples against the outputs
of all experts. The two kinds of examples are of different origin: nobody is shown an example before
and after its transformation, nor which transformation it was.

Experts begin as the identity on transformed examples (`identity_error`): of experts with random
parameters, the one that happens to begin best wins everything.

Experts and discriminator are functions of their parameters and examples:

    experts(params, transformed) -> [experts, batch, *shape]
    discriminator(params, examples) -> logits [n]

An expert that wins nothing learns nothing and wins nothing later either. A `bias` of every expert
in the competition, which rises while it wins less than its share, brings it back (`balance_loss`).

Source: Parascandolo et al. 2018, section 3 and Algorithm 1; Kolios 2023, section 4.6.7,
equation 4.9; DeSieno 1988 and Wang et al. 2024 for the bias.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

Experts = Callable[[PyTree, jax.Array], jax.Array]
Discriminator = Callable[[PyTree, jax.Array], jax.Array]


class Competition(NamedTuple):
  """What a batch of transformed examples and one of untransformed examples give.

  Attributes:
    outputs: what every expert makes of every example; no gradient, [experts, batch, *shape].
    scores: logit of the discriminator for each of them, [experts, batch].
    winner: expert with the highest score of every example, its bias added, [batch].
    expert_loss: the winner's loss; its gradient reaches parameters of winners alone, [batch].
    discriminator_loss_original: the loss on untransformed examples, [originals].
    discriminator_loss_output: the loss on the outputs, the mean over all experts, [batch]. The
      gradient of both reaches the discriminator alone.
  """

  outputs: Float[Array, "experts batch *shape"]
  scores: Float[Array, "experts batch"]
  winner: Int[Array, " batch"]
  expert_loss: Float[Array, " batch"]
  discriminator_loss_original: Float[Array, " originals"]
  discriminator_loss_output: Float[Array, " batch"]


def winners(scores: Float[Array, "experts batch"]) -> Int[Array, " batch"]:
  """The expert with the highest score of every example; of equal ones the first."""
  return jnp.argmax(scores, axis=0)


def of_winners(
  outputs: Float[Array, "experts batch *shape"], winner: Int[Array, " batch"]
) -> Float[Array, "batch *shape"]:
  """The winner's output of every example; gradients reach no other."""
  return outputs[winner, jnp.arange(outputs.shape[1])]


def compete(
  experts: Experts,
  discriminator: Discriminator,
  params: tuple[PyTree, PyTree],
  transformed: Float[Array, "batch *shape"],
  originals: Float[Array, "originals *shape"],
  bias: Float[ArrayLike, " experts"] | None = None,
) -> Competition:
  r"""Winners and both losses, with their gradients kept apart.

  .. math::
     j(x') &= \mathrm{argmax}_i D(E_i(x')) \\
     L_E &= -\ln D(E_{j(x')}(x')) \\
     L_D &= -\ln D(x) - \frac{1}{N} \sum_{i=1}^{N} \ln(1 - D(E_i(x')))

  D is the sigmoid of the logit. :math:`L_E` is lowered in the parameters of experts, for a
  discriminator that stands still, and :math:`L_D` in those of the discriminator, for outputs that
  do; one gradient of the sum is both.

  Args:
    experts: all experts on a batch.
    discriminator: logit that an example is an untransformed one.
    params: those of the experts and those of the discriminator.
    transformed: x'.
    originals: x, other examples.
    bias: added to the logits of every expert where winners are found, and nowhere else.

  Source: Parascandolo et al. 2018, equations 3 and 4; Kolios 2023, equation 4.9.
  """
  of_experts, of_discriminator = params
  made = experts(of_experts, transformed)
  outputs = jax.lax.stop_gradient(made)
  count, batch = outputs.shape[:2]
  # Untransformed ones beside the outputs, so that the discriminator runs once.
  together = jnp.concatenate([outputs.reshape(-1, *outputs.shape[2:]), originals])
  logits = discriminator(of_discriminator, together)
  scores = logits[: count * batch].reshape(count, batch)
  biased = scores if bias is None else scores + jnp.asarray(bias)[:, None]
  winner = winners(jax.lax.stop_gradient(biased))
  still = jax.lax.stop_gradient(of_discriminator)
  return Competition(
    outputs=outputs,
    scores=scores,
    winner=winner,
    expert_loss=jax.nn.softplus(-discriminator(still, of_winners(made, winner))),
    discriminator_loss_original=jax.nn.softplus(-logits[count * batch :]),
    discriminator_loss_output=jnp.mean(jax.nn.softplus(scores), axis=0),
  )


def balance_loss(
  bias: Float[Array, " experts"],
  winner: Int[Array, " batch"],
  weight: Float[Array, " batch"] | float = 1.0,
) -> Float[Array, " batch"]:
  r"""A loss whose gradient in the bias is how much more every expert wins than its share.

  .. math:: L_b = \sum_i b_i ([j = i] - 1 / N)

  Descent lowers the bias of experts that win more than one example in N, and raises the others'.

  Args:
    bias: b, as `compete` takes it.
    winner: j, as `winners` gives it.
    weight: what every example counts.

  Source: DeSieno 1988 (a competition with conscience); Wang et al. 2024, the same for routers.
  """
  return weight * (bias[winner] - jnp.mean(bias))


def identity_error(
  outputs: Float[Array, "experts batch *shape"], transformed: Float[Array, "batch *shape"]
) -> Float[Array, "experts batch"]:
  r"""Mean squared error of every expert as the identity, by which experts are pre-trained.

  .. math:: \frac{1}{n} |E_i(x') - x'|^2

  Source: Parascandolo et al. 2018, section 3 (approximate identity initialization).
  """
  return jnp.mean(jnp.square(outputs - transformed[None]), axis=tuple(range(2, outputs.ndim)))


def assignment(
  winner: Int[Array, " batch"],
  transformation: Int[Array, " batch"],
  shape: tuple[int, int],
  weight: Float[Array, " batch"] | float = 1.0,
) -> Float[Array, "transformations experts"]:
  """How often every expert won an example of every transformation.

  Args:
    winner: as `winners` gives it.
    transformation: its number, of every example.
    shape: how many transformations and experts there are.
    weight: what every example counts.
  """
  return jnp.zeros(shape).at[transformation, winner].add(weight)


def owners(counts: Float[np.ndarray, "transformations experts"]) -> Int[np.ndarray, " n"]:
  """The expert that has a transformation to itself, or -1, for every transformation.

  It wins more than half of the transformation's examples, and of no other transformation as many.

  Args:
    counts: as `assignment` gives them.
  """
  shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
  most = shares > 0.5
  alone = most & (most.sum(axis=0) == 1)
  return np.where(alone.any(axis=1), alone.argmax(axis=1), -1)
