r"""Neural interpreters: functions with a signature and a code, between which positions are routed.

A function u has a signature :math:`s_u`, which says what it takes, and a code :math:`c_u`, which
says what it does. A position has the type :math:`t_i = \mathrm{FFN}(x_i)` and access to the
functions whose signatures are near it,

.. math::
   d_{ui} = 1 - \cos(s_u, t_i), \qquad
   C_{ui} = \frac{\tilde C_{ui}}{\epsilon + \sum_v \tilde C_{vi}}, \qquad
   \tilde C_{ui} = e^{-d_{ui} / \sigma} [d_{ui} < \tau]

with :math:`\sigma` learned. All functions have the weights of their layers in common; a code
changes what a layer reads,

.. math:: \mathrm{ModLin}(x, c) = W (x \odot \mathrm{LN}(W_c c)) + b

Attention among the positions that a function takes has its query, key, value and output layers of
this kind, and so has the network behind it, ModMLP:

.. math::
   w_{uij} &= \frac{\tilde w_{uij}}{\epsilon + \sum_j \tilde w_{uij}}, \qquad
   \tilde w_{uij} = C_{ui} C_{uj}\,
   \mathrm{softmax}_j\Big(\frac{q_{ui} \cdot k_{uj}}{\sqrt{D_{key}}}\Big) \\
   a_{ui} &= x_{ui} + C_{ui}\, \mathrm{ModAttn}(\mathrm{LN}(x_u); c_u, C_u)_i \\
   y_{ui} &= a_{ui} + C_{ui}\, \mathrm{ModMLP}(\mathrm{LN}(a_{ui}); c_u)

The last two are a line of code. Several lines, one after the other, make of a position as many
copies as there are functions, and

.. math:: y_i = x_i + \sum_u C_{ui}\, y_{ui}

is an iteration. A script is several iterations with the same parameters, each routed anew. Arrays
of all functions have them as their first axis, and products are of all functions at once.

Source: Rahaman et al. 2021, section 2; Kolios 2023, section 4.12, equations 4.33 to 4.44. The
thesis leaves out the norms of (4.33), without which the distance is no cosine's, and the sum over j
in the denominator of (4.38).
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least, check_numbers
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical
from compmod_jax.layers.basic import ACTIVATIONS, Activation, Dropout, layer_norm

_MASKED = -1e30  # of the score of a position that no other one looks at


@dataclasses.dataclass(frozen=True)
class ScriptConfig:
  """Sizes and options of scripts of a neural interpreter (Rahaman et al. 2021)."""

  dim: int = 64
  """Model width, a multiple of `heads`."""
  functions: int = 5
  """Functions of a script."""
  iterations: int = 2
  """Function iterations of a script, which share their parameters."""
  lines: int = 1
  """Lines of code of an iteration, each with layers of its own."""
  heads: int = 4
  """Attention heads of a line of code."""
  ffn_dim: int = 128
  """Hidden units of a line's network."""
  activation: Activation = "gelu"
  """Nonlinearity of that network, and of type inference."""
  code_dim: int = 64
  """Width of the functions' codes."""
  type_dim: int = 16
  """Width of types and signatures."""
  type_hidden: int = 64
  """Hidden units of type inference."""
  truncation: float = 1.5
  """Distance from a signature, from 0 to 2, from which on a position has no access (tau)."""
  bandwidth: float = 0.5
  """What sigma starts at."""
  epsilon: float = 1e-6
  """Added where compatibilities and attention weights are normalised."""
  train_signatures: bool = False
  """Whether signatures move; in the original they do in adaptation alone."""
  dropout: float = 0.0
  """Dropout on what a line of code adds, in models of texts; classifiers have none."""

  def __post_init__(self):
    check_numbers(self, "model.")
    check_least(self, "model.", functions=1, iterations=1, lines=1, heads=1)
    check_least(self, "model.", dim=1, ffn_dim=1, code_dim=1, type_dim=1, type_hidden=1)
    errors.check(
      self.dim % self.heads == 0,
      f"model.heads is {self.heads}, which does not divide model.dim = {self.dim}; each head is"
      " dim / heads wide. Choose a number of heads that divides the width.",
    )
    errors.check_choice("model.activation", self.activation, ACTIVATIONS)
    errors.check(
      self.truncation > 0,
      f"model.truncation is {self.truncation}; distances are at least 0, so that no position would"
      " have access to a function. Give a value over 0; over 2, all have access to all.",
    )
    for field in ("bandwidth", "epsilon"):
      value = getattr(self, field)
      errors.check(value > 0, f"model.{field} is {value}; it must be positive.")
    errors.check(
      0 <= self.dropout < 1, f"model.dropout is {self.dropout}; it must be at least 0 and below 1."
    )


def type_distance(
  signatures: Float[Array, "functions key"], types: Float[Array, "batch time key"]
) -> Float[Array, "batch time functions"]:
  r"""How far types are from signatures, :math:`1 - \cos(s_u, t_i)`, from 0 to 2.

  Source: Kolios 2023, equation 4.33, with both normalised.
  """
  return 1 - jnp.einsum("btk,uk->btu", _unit(types), _unit(signatures))


def _unit(x: jax.Array) -> jax.Array:
  return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def compatibility(
  distance: Float[Array, "batch time functions"],
  sigma: Float[Array, ""],
  truncation: float,
  epsilon: float = 1e-6,
) -> Float[Array, "batch time functions"]:
  r"""Weights of the functions that a position has access to; the others get exactly 0.

  Gradients reach the distances below `truncation` alone. The weights of a position sum to
  1 (to :math:`1 - \epsilon / (\epsilon + \sum \tilde C)`), or to 0 where no function is near.

  Args:
    distance: of `type_distance`.
    sigma: over how much distance a weight falls.
    truncation: the distance from which on there is no access, tau.
    epsilon: added to the sum.

  Source: Kolios 2023, equation 4.34.
  """
  near = jnp.where(distance < truncation, jnp.exp(-distance / sigma), 0)
  return near / (epsilon + jnp.sum(near, axis=-1, keepdims=True))


def routed_attention(
  scores: Float[Array, "functions batch heads time keys"],
  weights: Float[Array, "functions batch time"],
  epsilon: float = 1e-6,
) -> Float[Array, "functions batch heads time keys"]:
  r"""Attention among the positions that functions take, :math:`w_{uij}`; see the module.

  Args:
    scores: of queries and keys, scaled; very low where a key is padding.
    weights: compatibilities of positions with functions.
    epsilon: added to the sums over keys.

  Source: Kolios 2023, equation 4.38, with the sum over j.
  """
  both = weights[:, :, None, :, None] * weights[:, :, None, None, :]
  made = both * jax.nn.softmax(scores, axis=-1)
  return made / (epsilon + jnp.sum(made, axis=-1, keepdims=True))


def routed_read(
  scores: Float[Array, "functions batch heads time keys"],
  weights: Float[Array, "functions batch time"],
  value: Float[Array, "functions batch heads keys dim"],
  epsilon: float = 1e-6,
) -> Float[Array, "functions batch heads time dim"]:
  r"""What positions read with the weights of `routed_attention`, which are not formed.

  With e the exponentials of the scores, one product gives all three sums of

  .. math::
     \sum_j w_{uij} v_{uj} = \frac{C_{ui} \sum_j e_{ij} C_{uj} v_{uj}}
     {\epsilon \sum_j e_{ij} + C_{ui} \sum_j e_{ij} C_{uj}}

  Args:
    scores: as of `routed_attention`, which takes twice the time on a CPU.
    weights: compatibilities of positions with functions.
    value: what is read.
    epsilon: added to the sums over keys.
  """
  highest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  taken = weights[:, :, None, :, None]
  ones = jnp.ones_like(value[..., :1])
  sides = jnp.concatenate([taken * value, taken * ones, ones], axis=-1)
  sums = jnp.matmul(jnp.exp(scores - highest), sides)
  read, accepted, every = sums[..., :-2], sums[..., -2:-1], sums[..., -1:]
  return taken * read / (epsilon * every + taken * accepted)


class TypeMatching(nn.Module):
  """Weights of all functions at every position.

  Intermediates: `signatures` [functions, key], `types` [batch, time, key], `distance` and
  `weights` [batch, time, functions].

  Attributes:
    config: sizes and options.
  """

  config: ScriptConfig

  def setup(self):
    """Makes the network, the signatures and sigma."""
    c, init = self.config, nn.initializers.lecun_normal()
    self.norm = layer_norm(jnp.float32)
    self.hidden = nn.Dense(c.type_hidden, kernel_init=logical(init, "embed", "mlp"))
    self.type = nn.Dense(c.type_dim, kernel_init=logical(init, "mlp", "key"))
    self.signatures = self.param(
      "signatures", logical(nn.initializers.normal(1.0), "units", "key"), (c.functions, c.type_dim)
    )
    self.log_sigma = self.param("log_sigma", nn.initializers.constant(jnp.log(c.bandwidth)), ())

  def __call__(
    self, x: Float[Array, "batch time embed"], intermediates: Intermediates = OFF
  ) -> Float[Array, "batch time functions"]:
    """See `compatibility`."""
    c, signatures = self.config, intermediates("signatures", self.signatures)
    if not c.train_signatures:
      signatures = lax.stop_gradient(signatures)
    types = self.type(ACTIVATIONS[c.activation](self.hidden(self.norm(x))))
    distance = type_distance(signatures, intermediates("types", types))
    distance = intermediates("distance", distance)
    weights = compatibility(distance, jnp.exp(self.log_sigma), c.truncation, c.epsilon)
    return intermediates("weights", weights)


class ModLin(nn.Module):
  r"""A linear layer that codes program, :math:`W (x \odot \mathrm{LN}(W_c c_u)) + b`.

  What a code multiplies the inputs with is multiplied into the matrix, which there is once for all
  positions.

  Attributes:
    features: width of the outputs.
    parts: layers side by side, each with an equal part of the outputs and a norm and matrices of
      its own, such as those of attention heads.

  Source: Kolios 2023, equation 4.35.
  """

  features: int
  parts: int = 1

  @nn.compact
  def __call__(
    self, x: Float[Array, "copies rows inner"], codes: Float[Array, "functions code"]
  ) -> Float[Array, "functions rows outer"]:
    """The layer under every code.

    Args:
      x: rows of every function; one copy where all functions read the same.
      codes: of the functions.
    """
    inner, outer = x.shape[-1], self.features // self.parts
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=(0,))
    kernel = self.param("kernel", logical(init, None, "embed", "mlp"), (self.parts, inner, outer))
    bias = self.param("bias", logical(nn.initializers.zeros, "norm"), (self.features,))
    of_codes = self.param(
      "code", logical(init, None, None, "embed"), (self.parts, codes.shape[-1], inner)
    )
    factors = jnp.einsum("uc,pci->upi", codes, of_codes)
    factors = _PartNorm(name="norm")(factors)
    kernels = jnp.einsum("upi,pio->uipo", factors, kernel).reshape(len(codes), inner, -1)
    if len(x) == 1:  # one product with the matrices side by side
      wide = jnp.matmul(x[0], kernels.swapaxes(0, 1).reshape(inner, -1))
      made = wide.reshape(-1, len(codes), self.features).swapaxes(0, 1)
    else:
      made = lax.dot_general(x, kernels, (((2,), (1,)), ((0,), (0,))))
    return made + bias[None, None]


class _PartNorm(nn.Module):
  """Layer normalisation over the last axis, with scales and shifts of every part."""

  @nn.compact
  def __call__(
    self, x: Float[Array, "functions parts inner"]
  ) -> Float[Array, "functions parts inner"]:
    scale = self.param("scale", logical(nn.initializers.ones, None, "norm"), x.shape[1:])
    bias = self.param("bias", logical(nn.initializers.zeros, None, "norm"), x.shape[1:])
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * scale[None] + bias[None]


class ModMLP(nn.Module):
  """Two modulated layers with a nonlinearity between.

  Intermediate: `hidden` [functions, batch * time, mlp].

  Attributes:
    config: sizes and options.

  Source: Kolios 2023, equation 4.36.
  """

  config: ScriptConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "functions rows embed"],
    codes: Float[Array, "functions code"],
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "functions rows embed"]:
    """The network under every code."""
    c = self.config
    hidden = ACTIVATIONS[c.activation](ModLin(c.ffn_dim, name="up")(x, codes))
    return ModLin(c.dim, name="down")(intermediates("hidden", hidden), codes)


class ModAttn(nn.Module):
  """Self-attention of every function among the positions that it takes.

  Intermediate: `attention` [functions, batch, heads, time, time].

  Attributes:
    config: sizes and options.

  Source: Kolios 2023, equations 4.37 to 4.40.
  """

  config: ScriptConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "copies batch time embed"],
    codes: Float[Array, "functions code"],
    weights: Float[Array, "functions batch time"],
    valid: Bool[Array, "batch time"] | None = None,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "functions batch time embed"]:
    """What every function's positions read of each other.

    Args:
      x: the stream of every function; one copy where all read the same.
      codes: of the functions.
      weights: compatibilities.
      valid: positions that are no padding; None for all.
      intermediates: activations to read or change.
    """
    c = self.config
    _, batch, time, dim = x.shape
    made = ModLin(3 * dim, 3 * c.heads, name="qkv")(x.reshape(len(x), -1, dim), codes)
    made = made.reshape(-1, batch, time, 3, c.heads, dim // c.heads)
    query, key, value = jnp.moveaxis(made, (3, 4), (0, 3))
    query = query / jnp.sqrt(jnp.float32(dim // c.heads))
    scores = jnp.matmul(query, key.swapaxes(-1, -2))
    if valid is not None:
      scores = jnp.where(valid[None, :, None, None, :], scores, _MASKED)
    if intermediates.wants("attention"):
      attention = intermediates("attention", routed_attention(scores, weights, c.epsilon))
      read = jnp.matmul(attention, value)
    else:
      read = routed_read(scores, weights, value, c.epsilon)
    read = read.swapaxes(2, 3).reshape(-1, batch * time, dim)
    made = ModLin(dim, name="out")(read, codes)
    return made.reshape(-1, batch, time, dim)


class LineOfCode(nn.Module):
  """Modulated attention and a modulated network, each weighted and added to the stream.

  Intermediates: those of `attention` and `ffn`.

  Attributes:
    config: sizes and options.

  Source: Kolios 2023, equation 4.41.
  """

  config: ScriptConfig

  def setup(self):
    """Makes the layers."""
    self.attention, self.ffn = ModAttn(self.config), ModMLP(self.config)
    self.attention_norm, self.ffn_norm = layer_norm(jnp.float32), layer_norm(jnp.float32)
    self.drop = Dropout(self.config.dropout)

  def __call__(
    self,
    x: Float[Array, "copies batch time embed"],
    codes: Float[Array, "functions code"],
    weights: Float[Array, "functions batch time"],
    valid: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "functions batch time embed"]:
    """The streams of all functions after the line; arguments as of `ModAttn`."""
    factors = weights[..., None]
    inner = intermediates.scope("attention")
    update = self.attention(self.attention_norm(x), codes, weights, valid, inner)
    x = x + factors * self.drop(update, deterministic=deterministic)
    rows = self.ffn_norm(x).reshape(len(codes), -1, x.shape[-1])
    update = self.ffn(rows, codes, intermediates.scope("ffn")).reshape(x.shape)
    return x + factors * self.drop(update, deterministic=deterministic)


class Script(nn.Module):
  """Function iterations: every position is routed, and lines of code run, again and again.

  Intermediates: of every iteration, `iteration_<i>/functions/router/...` (see `TypeMatching`),
  `iteration_<i>/line_<l>/...` (see `LineOfCode`) and `iteration_<i>/output` [batch, time, embed].

  Attributes:
    config: sizes and options.

  Source: Kolios 2023, equations 4.42 to 4.44.
  """

  config: ScriptConfig

  def setup(self):
    """Makes codes, type matching and lines of code, which all iterations share."""
    c = self.config
    self.router = TypeMatching(c)
    self.codes = self.param(
      "codes", logical(nn.initializers.normal(1.0), "units", None), (c.functions, c.code_dim)
    )
    self.line = [LineOfCode(c) for _ in range(c.lines)]

  def __call__(
    self,
    x: Float[Array, "batch time embed"],
    valid: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch time embed"]:
    """The stream after all iterations.

    Args:
      x: the stream.
      valid: positions that are no padding; None for all.
      deterministic: no dropout.
      intermediates: activations to read or change.
    """
    for i in range(self.config.iterations):
      inner = intermediates.scope(f"iteration_{i}")
      routed = self.router(x, inner.scope("functions").scope("router"))
      weights = jnp.moveaxis(routed, -1, 0)
      copies = x[None]
      for number, line in enumerate(self.line):
        copies = line(
          copies,
          self.codes,
          weights,
          valid,
          deterministic=deterministic,
          intermediates=inner.scope(f"line_{number}"),
        )
      x = inner("output", x + jnp.sum(weights[..., None] * copies, axis=0))
    return x
