r"""Neural interpreters: scripts over a set of vectors and CLS vectors, or over tokens of a text.

.. math:: \mathrm{NI} = \mathrm{Script}_{L_s} \circ \dots \circ \mathrm{Script}_1

As a classifier the model reads an example as a set of vectors, with learned CLS vectors beside
them, whose outputs a linear head reads. As an encoder it reads tokens, and has the embedding and
the output head of RoBERTa.

Source: Rahaman et al. 2021; Kolios 2023, section 4.12, equation 4.32.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int

from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.sharding import logical
from compmod_jax.core.types import Params
from compmod_jax.layers.basic import layer_norm
from compmod_jax.layers.embedding import Embedding
from compmod_jax.layers.interpreter import Script, ScriptConfig
from compmod_jax.models.base import ModelConfig
from compmod_jax.models.encoder import EncoderConfig, Head

_STDDEV = 0.02  # of fresh embeddings of tokens (Devlin et al. 2019)


@dataclasses.dataclass(frozen=True)
class InterpreterConfig(ScriptConfig, ModelConfig):
  """Sizes and options of a neural interpreter; those of its scripts are in `ScriptConfig`."""

  scripts: int = 1
  """Scripts, one after the other, with parameters of their own."""
  cls: Literal["outputs", "one"] = "outputs"
  """Of a classifier: a CLS vector for every output and a head that they share, as for functions or
  tasks that are learned side by side; or one, whose head has all outputs, as for classes."""
  max_length: int = 512
  """Most tokens of a text, of an encoder."""

  family: ClassVar[str] = "Neural interpreter"

  def __post_init__(self):
    super().__post_init__()
    check_least(self, "model.", scripts=1, max_length=1)
    errors.check_choice("model.cls", self.cls, ("outputs", "one"))

  def describe(self) -> str:
    """Sizes and mechanisms, in a few words."""
    many = "" if self.scripts == 1 else "s"
    return (
      f"neural interpreter of width {self.dim}, {self.scripts} script{many} of {self.functions}"
      f" functions, {self.iterations} iterations, {self.lines} lines of code"
    )

  def classifier(self, shape: tuple[int, ...], outputs: int) -> "SetInterpreter":
    """The module for examples that are sets of numbers, [size], or of vectors, [size, width].

    Args:
      shape: of an example.
      outputs: numbers that are predicted; 0 for the features of one CLS vector.

    Raises:
      UserError: examples have another number of axes.
    """
    errors.check(
      len(shape) in (1, 2),
      "model is an InterpreterConfig, which reads sets of numbers or of vectors, but an example has"
      f" the shape {shape}; give [size] or [size, width], such as patches of a picture.",
    )
    return SetInterpreter(self, shape[0], outputs)

  def encoder(self, vocab: int, pad: int) -> "TextInterpreter":
    """The module for texts."""
    return TextInterpreter(self, vocab, pad)

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the compatibilities [batch, time, functions], by script and iteration."""
    return tuple(
      f"script_{s}/iteration_{i}/functions/router/weights"
      for s in range(self.scripts)
      for i in range(self.iterations)
    )


class SetInterpreter(nn.Module):
  """Scripts over the vectors of an example and learned CLS vectors behind them.

  Every vector is embedded and added to a learned vector of its place in the set.

  Sites: `script_<s>/...` (see `Script`), `features` [batch, cls, embed] and `logits` [batch,
  outputs].

  Attributes:
    config: sizes and options.
    size: vectors of an example.
    outputs: numbers that are predicted; 0 for none, the result is then a CLS vector's features.
  """

  config: InterpreterConfig
  size: int
  outputs: int

  @nn.compact
  def __call__(
    self, inputs: Float[Array, "batch *shape"], *, intermediates: Intermediates = OFF
  ) -> Float[Array, "batch outputs"]:
    """Logits, or features where there is no head."""
    c, normal = self.config, nn.initializers.normal(1.0)
    each = c.cls == "outputs" and self.outputs > 0
    vectors = inputs[..., None] if inputs.ndim == 2 else inputs
    embed = nn.Dense(c.dim, kernel_init=logical(normal, None, "embed"), name="embed")
    place = self.param("place", logical(normal, "position", "embed"), (self.size, c.dim))
    count = self.outputs if each else 1
    cls = self.param("cls", logical(normal, "units", "embed"), (count, c.dim))
    x = embed(vectors) + place[None]
    x = jnp.concatenate([x, jnp.broadcast_to(cls[None], (len(x), *cls.shape))], axis=1)
    for s in range(c.scripts):
      x = Script(c, name=f"script_{s}")(x, intermediates=intermediates.scope(f"script_{s}"))
    features = layer_norm(jnp.float32, name="norm")(x[:, self.size :])
    features = intermediates("features", features)
    if not self.outputs:
      return features[:, 0]
    init = logical(nn.initializers.normal(0.02), "embed", "units")
    made = nn.Dense(1 if each else self.outputs, kernel_init=init, name="head")(features)
    return intermediates("logits", made[..., 0] if each else made[:, 0])


class TextInterpreter(nn.Module):
  """Scripts over the tokens of a text, for masked language models.

  Embeddings of tokens and of learned positions are added and normalised; the scripts follow, a
  norm, and the output head of `Encoder`. No position attends to padding.

  Sites: `script_<s>/...` (see `Script`), `output` and `logits`.

  Attributes:
    config: sizes and options.
    vocab: number of tokens.
    pad: the token that marks padding.
  """

  config: InterpreterConfig
  vocab: int
  pad: int = 0

  def setup(self):
    """Makes embeddings, scripts and output head."""
    c, init = self.config, nn.initializers.normal(_STDDEV)
    self.embedding = Embedding(self.vocab, c.dim, jnp.float32, stddev=_STDDEV, scaled=False)
    self.place = self.param("place", logical(init, "position", "embed"), (c.max_length, c.dim))
    self.embedding_norm, self.norm = layer_norm(jnp.float32), layer_norm(jnp.float32)
    self.script = [Script(c) for _ in range(c.scripts)]
    sizes = EncoderConfig(
      encoder_layers=1, dim=c.dim, heads=c.heads, ffn_dim=c.ffn_dim, activation=c.activation
    )
    self.head = Head(sizes, self.vocab, jnp.float32)

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch predicted"] | None = None,
    deterministic: bool = True,
    intermediates: Intermediates = OFF,
  ) -> Float[Array, "batch predicted vocab"]:
    """Logits of the tokens that belong at positions; arguments as of `Encoder`."""
    c, length = self.config, tokens.shape[1]
    errors.check(
      length <= c.max_length,
      f"A sequence has {length} tokens, but the model has positions for {c.max_length}; shorten it"
      " or raise model.max_length.",
    )
    x = self.embedding_norm(self.embedding(tokens) + self.place[None, :length])
    for s, script in enumerate(self.script):
      x = script(
        x,
        tokens != self.pad,
        deterministic=deterministic,
        intermediates=intermediates.scope(f"script_{s}"),
      )
    hidden = intermediates("output", self.norm(x))
    if positions is not None:
      hidden = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    return intermediates("logits", self.head(hidden, self.embedding))


def with_functions(
  params: Params, kept: Sequence[int], fresh: int = 0, *, rng: jax.Array | None = None
) -> Params:
  """Parameters of the same model with other functions, for `functions = len(kept) + fresh`.

  Args:
    params: of a model.
    kept: numbers of the functions of every script that stay, in their new order.
    fresh: how many functions with random signatures and codes follow them.
    rng: key of those.

  Raises:
    UserError: no function is left, or one has a number that the model does not have.
  """
  flat: dict[tuple[str, ...], Any] = flatten_dict(dict(params))
  rng = jax.random.key(0) if rng is None else rng
  for number, (path, value) in enumerate(sorted(flat.items())):
    if path[0].startswith("script_") and path[-1] in ("signatures", "codes"):
      errors.check(
        len(kept) + fresh > 0 and all(0 <= one < len(value) for one in kept),
        f"kept is {list(kept)} and fresh {fresh}; a script has the functions 0 to"
        f" {len(value) - 1}, and at least one must be left.",
      )
      new = jax.random.normal(jax.random.fold_in(rng, number), (fresh, *value.shape[1:]))
      flat[path] = jnp.concatenate([jnp.asarray(value)[np.asarray(kept, int)], new])
  return unflatten_dict(flat)
