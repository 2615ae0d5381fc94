"""What tasks ask of models: kinds of modules, and what every configuration of one answers.

A configuration declares the kinds of which it can build a module by the methods that it overrides:
`seq2seq`, `decoder`, `encoder`, `recurrent`, `classifier`, `regressor`, and three that one task
each needs, `continual_learner`, `image_experts` and `causal_direction`. A task calls the method of
the kind that it needs and takes every model that has it. Masked and causal language modelling are
objectives, not kinds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import EditMaker, Intermediates
from compmod_jax.core.types import Params
from compmod_jax.layers.output import OutputLayer
from compmod_jax.mechanisms.competition.losses import RouterLosses
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.models.text import Blocks, OutputLayers, Text, TextOutput

C = TypeVar("C", bound="ModelConfig")
Side = Literal["source", "target", "both"]
"""Of a pair; both: the source and behind it the target, see `models.text.joined`."""


@runtime_checkable
class Module(Protocol):
  """A Linen module with a configuration, called through `init` and `apply`."""

  @property
  def config(self) -> "ModelConfig":
    """The model's configuration."""
    ...

  def init(
    self, rngs: jax.Array | dict[str, jax.Array], *args: Any, **kwargs: Any
  ) -> Mapping[str, Params]:
    """Fresh variables; `["params"]` are boxed with the logical names of their dimensions."""
    ...

  def apply(self, variables: Mapping[str, Params], *args: Any, **kwargs: Any) -> Any:
    """Calls the module, or the `method` that is named, with these variables."""
    ...


@runtime_checkable
class Seq2Seq(Module, Protocol):
  """From a source to the logits of a target, all at once or token by token."""

  def __call__(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> Float[Array, "batch target_time vocab"]:
    """Logits of the token that follows each target position; `target` begins with a start token."""
    ...

  def output_layer(
    self,
    source: Int[Array, "batch source_time"],
    target: Int[Array, "batch target_time"],
    *,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> OutputLayer:
    """What `__call__` makes the logits of, its site `logits`."""
    ...

  def prefill(
    self,
    source: Int[Array, "batch source_time"],
    *,
    beams: int,
    length: int,
    routing: bool = False,
    intermediates: Intermediates = ...,
  ) -> dict[str, Any]:
    """The cache with which decoding starts: leaves [batch, beams or 1, ...] and a position.

    Args:
      source: source tokens, padded.
      beams: hypotheses an example.
      length: most steps.
      routing: keep the router weights of every step under `routing`.
      intermediates: sites to read or change.
    """
    ...

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    *,
    intermediates: Intermediates = ...,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    ...


@runtime_checkable
class Decoder(Module, Protocol):
  """From texts to the logits of every next token, all at once or token by token."""

  def __call__(
    self,
    text: Text,
    blocks: Blocks,
    *,
    causal: bool = True,
    vanilla_logits: bool = False,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> TextOutput:
    """Logits at every position; see `Nemot.__call__`."""
    ...

  def output_layers(
    self,
    text: Text,
    blocks: Blocks,
    *,
    causal: bool = True,
    vanilla_logits: bool = False,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> OutputLayers:
    """What `__call__` makes the logits of, its site `logits`."""
    ...

  def prefill(
    self, text: Text, task: str, *, beams: int, length: int, intermediates: Intermediates = ...
  ) -> dict[str, Any]:
    """The cache with which decoding after prompts starts."""
    ...

  def step(
    self,
    cache: dict[str, Any],
    tokens: Int[Array, "batch beams"],
    task: str,
    *,
    intermediates: Intermediates = ...,
  ) -> tuple[Float[Array, "batch beams vocab"], dict[str, Any]]:
    """Logits after one more token of every beam, and the cache that includes it."""
    ...


@runtime_checkable
class Encoder(Module, Protocol):
  """From texts, seen whole, to the logits of the tokens that belong at positions."""

  def __call__(
    self,
    tokens: Int[Array, "batch time"],
    *,
    positions: Int[Array, "batch predicted"] | None = None,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> Float[Array, "batch predicted vocab"]:
    """Logits at these positions; at all, in their order, if none are given."""
    ...


@runtime_checkable
class Classifier(Module, Protocol):
  """From examples, such as pictures, to the logits of their classes, or to features."""

  def __call__(
    self, inputs: Float[Array, "batch *shape"], *, intermediates: Intermediates = ...
  ) -> Float[Array, "batch outputs"]:
    """Logits; features where the classifier was made without outputs."""
    ...


@runtime_checkable
class Regressor(Module, Protocol):
  """From sequences of vectors to numbers, which are read at the last vector."""

  def __call__(
    self,
    inputs: Float[Array, "batch time width"],
    *,
    causal: bool = True,
    deterministic: bool = True,
    intermediates: Intermediates = ...,
  ) -> Float[Array, "batch outputs"]:
    """The numbers; with `causal` no position reads a later one."""
    ...


class ModelConfig:
  """What tasks, training and analyses ask of every model's configuration.

  The values here are those of a model without routers, gates, auxiliary tokens or several outputs;
  a configuration overrides what it has.
  """

  family: ClassVar[str] = "Model"
  """What kind of network it is, in a word or two."""
  steps_through_time: ClassVar[bool] = False
  """Whether a forward pass over a sequence is a loop over its positions."""
  max_length: int
  """Most positions of a sequence; absent from models without a limit."""
  convolution: int = 1
  """Width of convolutions over positions before self-attention; 1 for none."""
  recoding: RecodingConfig = RecodingConfig()
  """How the model recodes its own states; a field of the models that can."""

  # Kinds.

  def seq2seq(self, source_vocab: int, target_vocab: int, pad: int) -> Seq2Seq:
    """The sequence-to-sequence model of this configuration.

    Raises:
      UserError: it is none.
    """
    self._is_no("a sequence-to-sequence model, such as a TransformerConfig")

  def decoder(self, vocab: int, pad: int) -> Decoder:
    """The decoder of this configuration.

    Raises:
      UserError: it is none.
    """
    self._is_no("a decoder, such as a DecoderConfig or a NemotConfig")

  def encoder(self, vocab: int, pad: int) -> Encoder:
    """The encoder of this configuration.

    Raises:
      UserError: it is none.
    """
    self._is_no("an encoder, such as an EncoderConfig or a NemotConfig")

  def recurrent(self, vocab: int) -> Any:
    """The recurrent language model of this configuration; see `LstmLM`.

    Raises:
      UserError: it is none.
    """
    self._is_no("a recurrent language model, such as an LstmConfig")

  def classifier(self, shape: tuple[int, ...], outputs: int) -> "Classifier":
    """The classifier of this configuration.

    Args:
      shape: of an example.
      outputs: classes; 0 for features in place of logits.

    Raises:
      UserError: it is none.
    """
    self._is_no("a classifier of single examples, such as pictures")

  def regressor(self, outputs: int) -> "Regressor":
    """The regressor of this configuration, which reads sequences of vectors of any width.

    Args:
      outputs: numbers of each sequence.

    Raises:
      UserError: it is none.
    """
    self._is_no("a regressor of sequences of vectors, such as a DecoderConfig")

  def continual_learner(self, shape: tuple[int, ...], outputs: int) -> Any:
    """The network that learns class after class.

    It has the methods `context` and `features`, and the last layer `prediction/head`.

    Args:
      shape: of an example.
      outputs: rows of the last layer.

    Raises:
      UserError: it is none, or does not fit the examples.
    """
    self._is_no(
      "a network with a prediction network and a last layer without bias, such as that of"
      " configs/continual_anml.py"
    )

  def image_experts(self) -> Any:
    """The experts and the discriminator of this configuration; see `CompetingExperts`.

    Raises:
      UserError: it has none.
    """
    self._is_no(
      "experts that turn images into images, and a discriminator, such as a CompetingExpertsConfig"
    )

  def causal_direction(self) -> Any:
    """The two directions of this configuration; see `CausalDirection`.

    Raises:
      UserError: it has none.
    """
    self._is_no("a model of two directions, such as a CausalDirectionConfig")

  def _is_no(self, kind: str) -> NoReturn:
    raise UserError(
      f"model is a {type(self).__name__}, but the task needs {kind}. Set another model."
    )

  # Size.

  def plain(self: C) -> C:
    """The same model without any mechanism."""
    return self

  def describe(self) -> str:
    """Sizes and mechanisms, in a few words."""
    raise NotImplementedError

  def warnings(self) -> list[str]:
    """What is allowed here but hardly meant, a sentence each; empty if nothing is."""
    return []

  def marks(self) -> dict[str, str]:
    """Site or module -> what a mechanism does there besides what its parameters tell."""
    return {}

  def decoding_stack(self, task: str) -> tuple[str, int]:
    """The stack of layers whose output gives a task's logits in decoding, and how many it has.

    Raises:
      UserError: the model has no layers that decoding could recode.
    """
    raise UserError(
      f"recode_layer is given, but a {type(self).__name__} has no stack of layers to recode in"
      " decoding. Leave it out."
    )

  # Pairs of a source and a target.

  def side_at(self, site: str) -> Side:
    """What stands at the positions of a site of a sequence-to-sequence model."""
    return "source" if site.startswith("encoder/") else "target"

  def room_for_target(self, source_time: int) -> int:
    """Most tokens of a target behind a source of so many."""
    return self.max_length

  # Competition.

  def routers(self) -> tuple[RouterLosses, ...]:
    """The routers of each kind."""
    return ()

  def routing_sites(self) -> tuple[str, ...]:
    """Names of the weights [batch, time, units] of every router, in the model's order."""
    return ()

  def training_edits(self) -> tuple[EditMaker, ...]:
    """What mechanisms change in training, such as DropHead; empty if nothing is."""
    return ()

  # Auxiliary tokens, gates, outputs of several tasks.

  def output_tasks(self) -> tuple[str, ...] | None:
    """Tasks with an output of their own; None where one output serves all."""
    return None

  def for_tasks(self: C, tasks: Sequence[str]) -> C:
    """The configuration of what runs where these tasks are asked for alone."""
    return self

  def unused_parameters(self, tasks: Sequence[str]) -> tuple[str, ...]:
    """Top-level names of the parameters that do not run where these tasks are asked for alone."""
    return ()

  @property
  def auxiliary(self) -> tuple[str, ...]:
    """Names of all auxiliary tokens, in the order of their ids."""
    return ()

  def auxiliary_ids(self, mode: str, task: str) -> list[int]:
    """Auxiliary tokens in front of a text: of the mode `enc` or `dec`, and of the task."""
    return []

  def auxiliary_at(self, site: str) -> int:
    """How many auxiliary positions a site has in front of those of the tokens."""
    return 0

  def gate_site(self) -> str | None:
    """Name of the gate [batch, time, dim] of the model's stream; None without one."""
    return None

  def error_prediction_site(self) -> str | None:
    """Name of the losses [batch, time] that a network of the model expects; None without one."""
    return None

  def check_running_text(self) -> None:
    """Raises a `UserError` if the model cannot read text that asks no question."""

  reads_vectors: ClassVar[bool] = False
  """Whether a recurrent model also reads real numbers in place of tokens."""

  sliding_window: ClassVar[int] = 0
  """How many of the newest positions self-attention of a decoder reads; 0 for all."""

  @property
  def reads_options(self) -> bool:
    """Whether the model has to know where answer options stand."""
    return False

  @property
  def reads_tags(self) -> bool:
    """Whether the model has to know the part of speech of every token."""
    return False

  @property
  def has_vanilla_head(self) -> bool:
    """Whether there is a second head, on the stream before it is gated."""
    return False


def valid_at(
  config: ModelConfig,
  site: str,
  real: jax.Array,
  positions: jax.Array | None = None,
) -> jax.Array:
  """The valid mask of a site, bool [batch, time]: auxiliary positions, which hold tokens, in front.

  Args:
    config: of the model.
    site: its name.
    real: true where there is a token, bool [batch, time].
    positions: of the logits, where these are not all.
  """
  if site == "logits" and positions is not None:
    return jnp.take_along_axis(real, positions, axis=1)
  before = config.auxiliary_at(site)
  return jnp.pad(real, ((0, 0), (before, 0)), constant_values=True) if before else real
