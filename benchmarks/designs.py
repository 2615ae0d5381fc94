"""Ways to route heads on their way to the output projection, as programs.

A program goes from a block's activations x [tokens, embed] and its heads' outputs
[tokens, features] through the output projection.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from compmod_jax.kernels import routing as kernels

Args = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of an attention block and its router."""

  tokens: int = 16384
  heads: int = 8
  head_dim: int = 64
  embed: int = 512
  hidden: int = 128
  key: int = 24
  dtype: str = "bfloat16"

  @property
  def features(self) -> int:
    """Width of all heads."""
    return self.heads * self.head_dim

  def args(self) -> Args:
    """Shapes of activations and of parameters, the latter in float32 but for the large ones."""
    narrow = {
      "x": (self.tokens, self.embed),
      "pre": (self.tokens, self.hidden),
      "heads": (self.tokens, self.features),
      "first": (self.embed, self.hidden),
      "out": (self.features, self.embed),
    }
    wide = {
      "shift": (self.hidden,),
      "second": (self.hidden, self.key),
      "second_shift": (self.key,),
      "signatures": (self.heads, self.key),
    }
    shapes = {name: jax.ShapeDtypeStruct(s, jnp.dtype(self.dtype)) for name, s in narrow.items()}
    return shapes | {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in wide.items()}

  def cotangent(self) -> jax.ShapeDtypeStruct:
    """The shape of the output's gradient."""
    return jax.ShapeDtypeStruct((self.tokens, self.embed), jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Design:
  """A way to compute the same.

  Attributes:
    name: for a table.
    program: from arguments by name to the output.
    uses: the arguments that it reads.
    elsewhere: what other kernels do for it, in the forward pass and in training: so many times they
      move the inference network's hidden layer, and multiply with its first matrix.
  """

  name: str
  program: Callable[[Any], jax.Array]
  uses: tuple[str, ...]
  elsewhere: tuple[int, int] = (0, 0)

  def args(self, sizes: Sizes) -> Args:
    """The arguments that it reads."""
    every = sizes.args()
    return {name: every[name] for name in self.uses}

  def training(self, args: Any, cotangent: jax.Array) -> Any:
    """The output, and its gradient with respect to every argument."""
    output, pull = jax.vjp(self.program, args)
    return output, pull(cotangent)


_ROUTER = ("first", "shift", "second", "second_shift", "signatures")
_EVERY = ("x", "heads", "out", *_ROUTER)


def designs(kernel: kernels.Implementation) -> dict[str, Design]:
  """All designs, with this implementation of the kernels."""

  def folded(a: Any) -> kernels.Readout:
    return kernels.fold_signatures(a["second"], a["second_shift"], a["signatures"])

  def scores(a: Any) -> jax.Array:
    hidden = jax.nn.relu(a["x"] @ a["first"] + a["shift"].astype(a["x"].dtype)[None])
    keys = hidden @ a["second"].astype(hidden.dtype) + a["second_shift"].astype(hidden.dtype)[None]
    scaled = a["signatures"] / a["signatures"].shape[1] ** 0.5
    return keys.astype(jnp.float32) @ scaled.T

  def from_hidden(a: Any) -> jax.Array:
    return kernels.routing_weights(a["pre"], folded(a), implementation=kernel)

  def plain(a: Any) -> jax.Array:
    return kernels.routing_softmax(scores(a), implementation="reference")

  def softmax(a: Any) -> jax.Array:
    return kernels.routing_softmax(scores(a), implementation=kernel)

  def flat(a: Any) -> jax.Array:
    """Weights are spread over features by a product with zeros and ones; heads stay flat."""
    units, features = a["signatures"].shape[0], a["out"].shape[0]
    member = jnp.repeat(jnp.eye(units, dtype=a["heads"].dtype), features // units, axis=1)
    return (a["heads"] * (plain(a).astype(member.dtype) @ member)) @ a["out"]

  def through(weights: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    def program(a: Any) -> jax.Array:
      scale = weights(a).astype(a["heads"].dtype)
      apart = a["heads"].reshape(*scale.shape, -1)
      return (scale[..., None] * apart).reshape(a["heads"].shape) @ a["out"]

    return program

  made = (
    Design("no routing", lambda a: a["heads"] @ a["out"], ("heads", "out")),
    Design("plain XLA", through(plain), _EVERY),
    Design("flat XLA", flat, _EVERY),
    Design("softmax alone", through(softmax), _EVERY),
    # The product for queries, keys and values makes and writes the first layer's outputs; in
    # training both products of its gradient read that gradient.
    Design(
      "packed",
      through(from_hidden),
      ("pre", "heads", "out", *_ROUTER[2:]),
      elsewhere=(1, 3),
    ),
  )
  return {design.name: design for design in made}
