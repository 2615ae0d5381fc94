"""The parts of a model from input to output, as it runs them, in words.

The model is traced once, on shapes alone, while every call of a module is noted: order, sizes and
options are those of what really runs.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
from flax.linen.module import InterceptorContext
from flax.traverse_util import flatten_dict

from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.types import Params
from compmod_jax.decoding.recoding import site_of
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.basic import FeedForward
from compmod_jax.layers.block import Block
from compmod_jax.layers.convolution import ShortConvolution
from compmod_jax.layers.embedding import Embedding, PositionTable
from compmod_jax.layers.experts import Experts
from compmod_jax.layers.positions import ADDED
from compmod_jax.layers.reading_strategies import PARTS_OF_SPEECH, Highlighting, OptionInteraction
from compmod_jax.mechanisms.competition.router import CompetitionConfig, Router
from compmod_jax.models.encoder import Head
from compmod_jax.tasks.base import Task

Shapes = dict[str, tuple[int, ...]]
"""Path of a parameter, joined by "/" -> its shape."""


@runtime_checkable
class KnowsParts(Protocol):
  """The configuration of a model of one module, which knows the module's parts."""

  def parts(self, vocab: int) -> list[tuple[str, str, str]]:
    """Name, pattern of its parameters' names, and what it is, of every part in order."""
    ...


@runtime_checkable
class KnowsMarks(Protocol):
  """The configuration of a model with mechanisms that have no parameters."""

  def marks(self) -> dict[str, str]:
    """Site -> what is done there."""
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """A line without its numbers.

  Attributes:
    path: of the module, or a name within the layer.
    words: what it is.
    layer: path of the layer that it belongs to, or "".
    pattern: of the paths of its parameters; the longest part that fits one has it.
    mark: whether it is a mechanism in any case.
  """

  path: str
  words: str
  layer: str = ""
  pattern: str = ""
  mark: bool = False


def shapes_of(params: Params) -> Shapes:
  """Shapes of all parameters."""
  leaves: dict[str, Any] = flatten_dict(dict(params), sep="/")
  return {path: leaf.shape for path, leaf in leaves.items()}


def parts_of(task: Task, params: Params) -> list[Part]:
  """All parts from input to output; those that the forward pass does not run come last."""
  config, shapes = task.model.config, shapes_of(params)
  if isinstance(config, KnowsParts):
    return [
      Part(name, words, name.rpartition("/")[0], pattern, mark="recoding" in name)
      for name, pattern, words in config.parts(task.model.module.vocab)
    ]
  parts = _traced(task, params, shapes)
  for path in shapes:
    if not any(re.fullmatch(part.pattern, path) for part in parts):
      top = path.split("/")[0]
      parts.append(Part(top, "not run in this pass", pattern=rf"{re.escape(top)}(/.*)?"))
  return parts


@dataclasses.dataclass
class _Noted(Intermediates):
  """Intermediates that also tell of every site when it is passed."""

  tell: Callable[[str], None] = dataclasses.field(kw_only=True)

  def __call__(self, name: str, value: jax.Array) -> jax.Array:
    self.tell(self.prefix + name)
    return super().__call__(name, value)


def _traced(task: Task, params: Params, shapes: Shapes) -> list[Part]:
  """The parts that a forward pass runs, in its order."""
  parts: dict[str, Part] = {}
  marks, layers = _marks(task), [""]

  def site(name: str) -> None:
    if name in marks:
      within = re.sub(r".*/layer_\d+/", "", name) if layers[-1] else name
      parts.setdefault(f"site {name}", Part(within, marks[name], layers[-1], mark=True))

  def module(it: nn.Module, path: str, method: str) -> None:
    if isinstance(it, Embedding) and path in parts:
      words = "once more: logits" if method in ("logits", "output") else "once more"
      parts.setdefault(f"{path} {words}", Part(path, words, layers[-1]))
    elif path not in parts and (isinstance(it, Router) or not _within(path, parts)):
      words = _words_of(it, path, shapes)
      if words or any(name.rpartition("/")[0] == path for name in shapes):
        words = ", ".join(filter(None, (words or type(it).__name__, marks.get(path))))
        parts[path] = Part(path, words, layers[-1], pattern=f"{re.escape(path)}/.*")

  def called(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: InterceptorContext,
  ) -> Any:
    path, layer = "/".join(context.module.path), layers[-1]
    if path and context.method_name not in ("setup", "describe"):
      module(context.module, path, context.method_name)
    layers.append(path if isinstance(context.module, Block) else layer)
    try:
      return call(*args, **kwargs)
    finally:
      layers.pop()

  batch = jax.eval_shape(task.dataset.example)
  with nn.intercept_methods(called):
    jax.eval_shape(
      lambda p, b: task.model.forward(p, b, intermediates=_Noted(tell=site)), params, batch
    )
  return list(parts.values())


def _within(path: str, parts: Iterable[str]) -> bool:
  """Whether a module belongs to one that has a line of its own."""
  return any(path.startswith(f"{other}/") for other in parts)


def _marks(task: Task) -> dict[str, str]:
  """Site -> what a mechanism without parameters does there, also in decoding."""
  config, decode = task.model.config, task.generator.decode
  marks = config.marks() if isinstance(config, KnowsMarks) else {}
  if decode is not None and decode.recode_layer is not None:
    times = f", {decode.recode_steps} times" if decode.recode_steps > 1 else ""
    does = "recoded in decoding: goes down the gradient of the next token's entropy by a step of"
    stacks = (config.decoding_stack(task) for task in config.output_tasks() or ("",))
    for side, layers in dict.fromkeys(stacks):
      site = site_of(decode.recode_layer, layers, side)
      also = f"{marks[site]}; " if site in marks else ""
      marks[site] = f"{also}{does} {decode.recode_size:g}{times}"
  return marks


@runtime_checkable
class Described(Protocol):
  """A module that says itself what it is."""

  def describe(self) -> str:
    """Sizes and options, in a few words."""
    ...


# From the name of a parameter, within its module, to its shape.
_Shape = Callable[[str], tuple[int, ...]]


def _words_of(module: nn.Module, path: str, shapes: Shapes) -> str:
  """Sizes and options of a module; nothing for kinds that have no words of their own."""
  if isinstance(module, Described):
    return module.describe()
  describe = _WORDS.get(type(module))
  return describe(module, lambda name: shapes[f"{path}/{name}"]) if describe else ""


def _attention(module: Attention, shape: _Shape) -> str:
  own = "to the encoder's output, " if module.cross else ""
  own = own if module.form == "softmax" else f"{module.form}, "
  tied = ", keys are values" if module.tied_key_value else ""
  inside = f", each with {module.switch.experts} experts" if module.switch else ""
  return f"{own}{module.heads} heads of {module.width}{tied}{inside}"


def _router(module: Router, shape: _Shape) -> str:
  units = "experts" if module.path[-2] == "ffn" else "heads"
  dim, hidden = shape("hidden/kernel")
  sizes = f"{dim} -> {hidden} -> {shape('key/kernel')[1]}"
  return f"{module.units} {units} compete ({_rule(module.config, module.units)}): {sizes}"


def _rule(config: CompetitionConfig, units: int) -> str:
  rules = {
    "soft": "soft",
    "top_k": f"top_k, {config.kept(units)} stay",
    "threshold": f"threshold {config.threshold:g}",
  }
  shared = f"{config.shared_heads} always and " if config.shared_heads else ""
  return shared + rules[config.rule] + "; losers give values" * (config.inactive == "value")


def _experts(module: Experts, shape: _Shape) -> str:
  one = f"{module.dim} -> {module.hidden_dim} -> {module.dim}"
  shared = f" and {module.config.shared} shared" if module.config.shared else ""
  return f"{module.config.count} experts{shared}, each {one}, {module.activation}"


_WORDS: dict[type, Callable[[Any, _Shape], str]] = {
  Attention: _attention,
  Embedding: lambda module, shape: f"{module.vocab:,} tokens x {module.dim}",
  Experts: _experts,
  FeedForward: lambda module, shape: (
    f"{module.dim} -> {module.hidden_dim} -> {module.dim}, {module.activation}"
  ),
  Head: lambda module, shape: f"{module.config.dim} -> {module.config.dim}, norm, biases of logits",
  Highlighting: lambda module, shape: (
    f"adds one of {len(PARTS_OF_SPEECH)} vectors, by part of speech"
  ),
  OptionInteraction: lambda module, shape: "answer options attend to each other",
  PositionTable: lambda module, shape: (
    f"{module.kind}, up to {module.length:,}, added" if module.kind in ADDED else ""
  ),
  Router: _router,
  nn.Dense: lambda module, shape: " -> ".join(f"{size:,}" for size in shape("kernel")),
  nn.LayerNorm: lambda module, shape: "layer normalisation",
  ShortConvolution: lambda module, shape: f"causal convolution over {module.width} positions",
}
