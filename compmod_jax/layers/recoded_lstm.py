r"""A stack of LSTM layers whose states are recoded at every step.

At step t every layer computes its state (h, c) from the recoded states of step t - 1; the error
signal looks at the top layer's h; its gradients with respect to all h and c of step t are taken
there, through this step's computation alone, and applied at once. Layer l + 1 reads layer l's h
from before recoding; step t + 1 starts from the recoded states.

The closed forms below give the gradients that `jax.grad` gives (`definition`): one product for
W_ho^T (o - e_y), and one reverse pass through the cells of this step. Where an edit changes what a
step computes, `jax.grad` takes its place, so that gradients are those of the edited computation.

Source: Ulmer 2019, section 4.1; order of operations as in its program.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from compmod_jax.core.intermediates import OFF, Intermediates
from compmod_jax.core.linear import copies_of_rows, rows_of_copies
from compmod_jax.core.types import Params
from compmod_jax.layers import deferred_scan
from compmod_jax.layers.deferred_scan import Product
from compmod_jax.layers.lstm import Gates, State, advance, cell, gates, reverse
from compmod_jax.mechanisms.recoding.config import RecodingConfig
from compmod_jax.mechanisms.recoding.descent import descend, descend_safely, recode, smoothness

States = tuple[State, ...]
Inputs = Mapping[str, Any]


@runtime_checkable
class Signal(Protocol):
  """An error signal on the top layer's hidden state.

  What it needs of a step stands in the inputs `x`, what it multiplies with in the weights.
  """

  def error(self, product: Product, others: Params, top: jax.Array, x: Inputs) -> jax.Array:
    """The error of each example, [batch]: the definition, which `jax.grad` differentiates."""
    ...

  def closed(
    self, product: Product, others: Params, top: jax.Array, x: Inputs, through: bool
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Its gradient with respect to `top`, the error, and what else is kept of the step."""
    ...

  def kept(
    self, product: Product, others: Params, top: jax.Array, x: Inputs
  ) -> dict[str, jax.Array]:
    """What else is kept of the step, where gradients are those of the definition."""
    ...


@runtime_checkable
class StepSize(Protocol):
  """Step sizes, from the states that a step has computed of the layers that are recoded."""

  def __call__(self, product: Product, others: Params, after: States) -> tuple[State, ...]:
    """For every layer and kind of state a number, or one for each example [batch]."""
    ...


class _Step(NamedTuple):
  """What a step computes before anything is recoded."""

  gates: tuple[Gates, ...]
  after: States


class _Recoding(NamedTuple):
  """How a step is recoded, and what it multiplies with.

  Attributes:
    edited: whether the step's own computation is changed by edits.
  """

  signal: Signal
  sizes: StepSize
  config: RecodingConfig
  product: Product
  others: Params
  edited: bool


def scan(
  signal: Signal | None,
  sizes: StepSize,
  config: RecodingConfig,
  weights: Mapping[str, jax.Array],
  others: Params,
  states: States,
  xs: Inputs,
  *,
  measure: bool = False,
  intermediates: Intermediates = OFF,
) -> tuple[States, dict[str, Any]]:
  """Runs the stack over a sequence, recoding at every step.

  Sites, [batch, time, dim]: `layer_<l>/hidden` and `layer_<l>/cell` before recoding, and
  `layer_<l>/hidden_recoded` and `layer_<l>/cell_recoded` after it. An edit acts at every step, on
  [batch, 1, dim], before anything else reads the state; h is made from c as the layer computes it.
  Recoding adds to the edited state: minus the step size times the derivative of the error with
  respect to an addition to the state before its edit.

  Args:
    signal: what is lowered; None to recode nothing.
    sizes: how far.
    config: settings of recoding.
    weights: `cell_<l>` [gates, below + hidden], for what a layer reads beside its own state;
      `input_<l>` [below, gates] for l from 1, `recurrent_0` [hidden, gates], and what the signal
      multiplies with.
    others: `bias_<l>`, and what signal and step sizes use besides.
    states: before the first step, of every layer.
    xs: [time, batch, ...]: `read`, what the bottom layer reads, or `first`, its W x + b;
      `between_<l>`, factors on what
      layer l reads (dropout), if any; `recurrent_<l>`, on the state that its recurrent weights
      read, if any; `active`, factors on the step sizes, if any; `valid`, 1 where there is a real
      token, for edits that ask; the signal's.
    measure: also return the error after recoding.
    intermediates: sites to read or change.

  Returns:
    The states after the last step, recoded; and of every step, [time, batch, ...]: `top`, the top
    layer's hidden state before recoding, `recoded`, the same after it, `error`, the signal before,
    `sizes`, the step sizes of every layer, what the signal keeps, and if measured `error_after`.
  """
  edited = any(map(intermediates.changes, _sites(len(states))))
  defined = signal is not None and (config.by_definition or edited)

  def body(
    product: Product, others: Params, states: States, x: Inputs
  ) -> tuple[States, dict[str, Any]]:
    inner = intermediates.apart()
    if "valid" in x:
      inner = inner.knowing(lambda site: x["valid"][:, None] > 0)
    step = forward(product, others, states, x, intermediates=inner)
    recoded, out = step.after, dict[str, Any]()
    if signal is not None:
      how = _Recoding(signal, sizes, config, product, others, edited)
      if defined:
        recoded, out = _by_definition(how, states, x, step, inner)
      else:
        recoded, out = _closed(how, states, x, step)
    recoded = tuple(_passed(inner, number, "_recoded", s) for number, s in enumerate(recoded))
    if measure and signal is not None:
      out["error_after"] = signal.error(product, others, recoded[-1].h, x)
    seen.update(inner.seen)
    out |= {"top": step.after[-1].h, "recoded": recoded[-1].h, "captured": inner.captured}
    return recoded, out

  seen: set[str] = set()
  # What `jax.grad` does with the weights inside a step cannot be put off until after the scan.
  scan = deferred_scan.plain if defined else deferred_scan.scan
  last, out = scan(body, weights, others, states, xs)
  captured = {name: value[:, :, 0].swapaxes(0, 1) for name, value in out.pop("captured").items()}
  intermediates.merge(captured, seen)
  return last, out


def _sites(layers: int) -> list[str]:
  """The sites whose edits change what a step computes."""
  return [f"layer_{number}/{kind}" for number in range(layers) for kind in ("hidden", "cell")]


def _passed(intermediates: Intermediates, number: int, after: str, state: State) -> State:
  """A layer's state, past its sites."""
  if intermediates is OFF:
    return state
  hidden = intermediates(f"layer_{number}/hidden{after}", state.h[:, None])[:, 0]
  return State(hidden, intermediates(f"layer_{number}/cell{after}", state.c[:, None])[:, 0])


def _closed(
  how: _Recoding, states: States, x: Inputs, step: _Step
) -> tuple[States, dict[str, Any]]:
  """Recoding by closed forms: the states after it, and what is kept of the step."""
  top, through = step.after[-1].h, how.config.through
  gradient, error, kept = how.signal.closed(how.product, how.others, top, x, through)
  lowest = how.config.lowest(len(states))
  gradients = pull(how.product, states, step, x, gradient, through, lowest)
  gradients = gradients if through else lax.stop_gradient(gradients)
  taken = _taken(how, step.after[lowest:], x, lambda: gradients[-1].h)
  recoded = tuple(map(descend, step.after[lowest:], gradients, taken))
  sizes = _of_rows(taken, top, lowest)
  return (*step.after[:lowest], *recoded), {"error": error, "sizes": sizes, **kept}


def _by_definition(
  how: _Recoding, states: States, x: Inputs, step: _Step, intermediates: Intermediates
) -> tuple[States, dict[str, Any]]:
  """Recoding as it is defined: `jax.grad` with respect to what is added to every state."""
  edits, config = intermediates.apart(), how.config
  lowest = config.lowest(len(states))

  def error(added: States) -> jax.Array:
    every = *[None] * lowest, *added
    top = forward(how.product, how.others, states, x, every, intermediates=edits).after[-1].h
    return how.signal.error(how.product, how.others, top, x)

  top, moved = step.after[-1].h, step.after[lowest:]
  nothing = jax.tree.map(jnp.zeros_like, moved)
  gradients = jax.grad(lambda added: jnp.sum(error(added)))
  taken = _taken(how, moved, x, lambda: gradients(nothing)[-1].h)
  found = recode(error, nothing, taken, steps=config.steps, through=config.through)
  recoded = jax.tree.map(jnp.add, moved, found.activations)
  kept = how.signal.kept(how.product, how.others, top, x)
  sizes = _of_rows(taken, top, lowest)
  return (*step.after[:lowest], *recoded), {"error": found.error, "sizes": sizes, **kept}


def _of_rows(taken: tuple[State, ...], top: jax.Array, lowest: int) -> tuple[State, ...]:
  """Step sizes of every row; 0 in layers below the lowest that is recoded."""
  sizes = *[State(jnp.float32(0), jnp.float32(0))] * lowest, *taken
  return jax.tree.map(lambda size: jnp.broadcast_to(size, top.shape[:1]), sizes)


def forward(
  product: Product,
  others: Params,
  states: States,
  x: Inputs,
  added: tuple[State | None, ...] | None = None,
  *,
  intermediates: Intermediates = OFF,
) -> _Step:
  """A step of all layers; `added` to each state, if any, before anything reads it."""
  found, after, below = list[Gates](), list[State](), x.get("read")
  for number, state in enumerate(states):
    name = f"recurrent_{number}"
    held = state.h * x[name] if name in x else state.h
    if below is None:
      activations = x["first"] + product(name, held)
    else:
      rows = jnp.concatenate([below, held], axis=-1)
      activations = product(f"cell_{number}", rows, transposed=True)
      activations = activations + others[f"bias_{number}"][None]
    more = None if added is None else added[number]
    if more is None:
      opened, new = cell(activations, state.c)
    else:
      opened = gates(activations)
      new = advance(opened, state.c, more)
    found.append(opened)
    after.append(_passed(intermediates, number, "", new))
    below = after[-1].h
    if f"between_{number + 1}" in x:
      below = below * x[f"between_{number + 1}"]
  return _Step(tuple(found), tuple(after))


def pull(
  product: Product,
  states: States,
  step: _Step,
  x: Inputs,
  top: Float[Array, "batch hidden"],
  through: bool,
  lowest: int = 0,
) -> tuple[State, ...]:
  """The gradients with respect to states of a step, given that with respect to the top h.

  Those of the layers from `lowest` on.
  """
  times = product if through else product.fixed
  gradient, found = top, list[State]()
  for number in reversed(range(lowest, len(states))):
    dc, da = reverse(step.gates[number], states[number].c, step.after[number], gradient)
    found.append(State(gradient, dc))
    if number > lowest:
      gradient = times(f"input_{number}", da, transposed=True)
      if f"between_{number}" in x:
        gradient = gradient * x[f"between_{number}"]
  return tuple(reversed(found))


def _taken(
  how: _Recoding, after: States, x: Inputs, gradient: Callable[[], jax.Array]
) -> tuple[State, ...]:
  """The step sizes of a step, for every layer that is recoded and kind of state.

  `gradient` is that with respect to the top hidden state, which safe step sizes depend on.
  """
  taken = how.sizes(how.product, how.others, after)
  if how.config.step == "safe":
    size = _safe(how, after[-1].h, x, gradient())
    taken = jax.tree.map(lambda _: size, taken)
  if "active" in x:
    taken = jax.tree.map(lambda size: size * x["active"], taken)
  return taken


def _safe(how: _Recoding, top: jax.Array, x: Inputs, gradient: jax.Array) -> jax.Array:
  """The safe step size of every row; copies of an example share its error and its step."""
  copies = how.config.copies
  frozen = Product(lax.stop_gradient(dict(how.product.weights)))
  held, top, gradient = lax.stop_gradient((how.others, top, gradient))
  top, gradient = (copies_of_rows(rows, len(rows) // copies) for rows in (top, gradient))

  def error(top: jax.Array) -> jax.Array:
    return how.signal.error(frozen, held, rows_of_copies(top), x)

  # Steps go along the derivative before an edit, but the error is smooth in the edited state.
  slope = jax.grad(lambda top: jnp.sum(error(top)))(top) if how.edited else gradient
  smooth = smoothness(error, top, slope)
  size = jnp.minimum(how.config.size, 1 / jnp.maximum(smooth, 1e-12))
  _, share = descend_safely(error, top, gradient, size)
  return lax.stop_gradient(jnp.tile(size * share, copies))
