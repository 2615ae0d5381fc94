"""Named activations: read them, or replace them, while a model runs.

Every activation that an analysis needs has a stable name, the path of its module and a word, for
example `encoder/layer_0/self/router/weights`. A model hands each one to an `Intermediates`:

    weights = intermediates("weights", weights)

`OFF`, the default, returns what it is given, so that a model that nobody looks into compiles to
exactly the program it would be without this file.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from compmod_jax.core import errors

Edit = Callable[..., jax.Array]
"""From an activation to the one that takes its place, of the same shape. An edit that needs a
second argument is given the valid mask, bool [batch, time]: true where there is a real token."""
EditMaker = Callable[..., Mapping[str, Edit]]
"""From `rng`, the key of a training step, and `progress`, 0 at the first step and 1 at the last, to
edits by the names of their sites."""


@dataclasses.dataclass(eq=False)
class Intermediates:
  """What to read and what to change during one call of a model.

  Attributes:
    capture: full names of the sites to return; `None` for every site.
    edits: full name -> function from the activation to the one that takes its place (same shape);
      see `Edit`.
    prefix: path of the module that holds this object, and a slash; empty for the model itself.
    captured: full name -> activation, after its edit; filled while the model runs.
    seen: full names of all sites passed so far.
    off: read, change and remember nothing.
  """

  capture: frozenset[str] | None = frozenset()
  edits: Mapping[str, Edit] = dataclasses.field(default_factory=dict)
  prefix: str = ""
  captured: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
  seen: set[str] = dataclasses.field(default_factory=set)
  off: bool = False

  def scope(self, name: str) -> "Intermediates":
    """The same intermediates as seen from the submodule `name`."""
    return self if self.off else dataclasses.replace(self, prefix=f"{self.prefix}{name}/")

  def apart(self) -> "Intermediates":
    """The same requests with an empty record, for a function that is traced on its own."""
    return self if self.off else dataclasses.replace(self, captured={}, seen=set())

  def merge(self, captured: Mapping[str, jax.Array], seen: Iterable[str]) -> None:
    """Adds the record of a function that was traced on its own."""
    if not self.off:
      self.captured.update(captured)
      self.seen.update(seen)

  def also(self, names: Iterable[str]) -> "Intermediates":
    """The same requests and record with some more captures (full names)."""
    if self.off:
      return Intermediates(capture=frozenset(names))
    capture = None if self.capture is None else self.capture | frozenset(names)
    return dataclasses.replace(self, capture=capture)

  def editing(
    self, edits: Mapping[str, Edit], valid: Callable[[str], jax.Array] | None = None
  ) -> "Intermediates":
    """The same requests and record with further edits; those that are here already prevail.

    Args:
      edits: from sites to edits.
      valid: from a site to the positions at which it holds real tokens, bool [batch, time]; given
        to all edits that take a valid mask.
    """
    edits = {**edits, **self.edits}
    if not edits:
      return self
    if valid is not None:
      edits = {
        site: _Masked(edit, valid(site)) if takes_valid(edit) else edit
        for site, edit in edits.items()
      }
    return Intermediates(edits=edits) if self.off else dataclasses.replace(self, edits=edits)

  def knowing(self, valid: Callable[[str], jax.Array]) -> "Intermediates":
    """The same requests and record, with the valid mask given to the edits that take it."""
    return self.editing({}, valid)

  def at(self, position: jax.Array | int) -> "Intermediates":
    """The same requests and record for one position of a sequence, [batch, 1, ...].

    Models that step through time hand sites over so; edits that were given the valid mask of the
    whole sequence (`knowing`) get this column of it.
    """
    if self.off:
      return self
    narrowed = {
      site: edit.at(position) if isinstance(edit, _Masked) else edit
      for site, edit in self.edits.items()
    }
    return dataclasses.replace(self, edits=narrowed)

  def wants(self, *names: str) -> bool:
    """Whether any of these sites of this module is read or changed."""
    if self.off:
      return False
    full = [self.prefix + name for name in names]
    self.seen.update(full)
    return self.capture is None or any(name in self.capture or name in self.edits for name in full)

  def changes(self, name: str) -> bool:
    """Whether this site of this module is changed."""
    return self.prefix + name in self.edits

  def __call__(self, name: str, value: jax.Array) -> jax.Array:
    """Passes the site `name` of this module: edits it, records it, returns it."""
    if self.off:
      return value
    full = self.prefix + name
    self.seen.add(full)
    if full in self.edits:
      edited = self.edits[full](value)
      if jnp.shape(edited) != value.shape:
        raise errors.UserError(
          f"The edit of site {full!r} returned shape {jnp.shape(edited)} for {value.shape}; an edit"
          " must keep the shape of the activation."
        )
      value = jnp.asarray(edited, value.dtype)
    if self.capture is None or full in self.capture:
      self.captured[full] = value
    return value

  def check_all_met(self) -> None:
    """Raises a `UserError` for a requested site that the model does not have."""
    for name in sorted((self.capture or frozenset()) | set(self.edits)):
      errors.check_choice("site", name, self.seen)


OFF = Intermediates(off=True)
# The name in configurations and mechanisms of users until version 0.3.
Taps = Intermediates


R = TypeVar("R")


def run(
  function: Callable[..., R],
  *args: object,
  capture: Iterable[str] | None = (),
  edits: Mapping[str, Edit] | None = None,
  **kwargs: Any,
) -> tuple[R, dict[str, jax.Array]]:
  """Calls a function with what to read and to change, returns its result and the captured sites.

  Args:
    function: takes `intermediates`, for example a bound `model.apply`; or if `ctx` is given, a
      context that holds them, such as the `apply` of a layer.
    *args: passed on.
    capture: full site names to return; `None` for every site.
    edits: full site name -> function of the activation.
    **kwargs: passed on.

  Raises:
    UserError: a name that the model does not have, or an edit that changes the shape.
  """
  wanted = None if capture is None else frozenset(capture)
  intermediates = Intermediates(capture=wanted, edits=dict(edits or {}))
  if "ctx" in kwargs:
    kwargs["ctx"] = dataclasses.replace(kwargs["ctx"], intermediates=intermediates)
  else:
    kwargs["intermediates"] = intermediates
  result = function(*args, **kwargs)
  intermediates.check_all_met()
  return result, intermediates.captured


def after(function: Callable[..., R], site: str) -> Callable[..., R]:
  """The pure function from the activation at a site to the result of `function`.

  Everything that does not depend on the activation is computed from the other arguments as usual
  (a residual stream passes most sites by).

      rest = after(model.apply, "encoder/layer_0/ffn/hidden")
      logits = rest(activation, variables, source, target)
      gradient = jax.grad(lambda a: loss(rest(a, variables, source, target)))(activation)

  Args:
    function: takes `intermediates`, for example a bound `model.apply`.
    site: full name of the site.

  Returns:
    A function of the activation and then of the arguments of `function`; it raises a `UserError`
    for a site that is not met, or an activation of another shape.
  """

  def rest(activation: jax.Array, *args: object, **kwargs: Any) -> R:
    return run(function, *args, edits={site: lambda _: activation}, **kwargs)[0]

  return rest


def takes_valid(edit: Edit) -> bool:
  """Whether an edit needs a second argument, which is the valid mask."""
  try:
    parameters = inspect.signature(edit).parameters.values()
  except ValueError:  # a builtin
    return False
  positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  return sum(p.kind in positional and p.default is p.empty for p in parameters) == 2


@dataclasses.dataclass(frozen=True, eq=False)
class _Masked:
  """An edit that has been given its valid mask."""

  edit: Edit
  valid: jax.Array

  def __call__(self, value: jax.Array) -> jax.Array:
    return self.edit(value, self.valid)

  def at(self, position: jax.Array | int) -> "_Masked":
    """The same edit of one position."""
    column = jax.lax.dynamic_slice_in_dim(self.valid, position, 1, axis=1)
    return dataclasses.replace(self, valid=column)


def zero_units(*units: int, axis: int = -1) -> Edit:
  """An edit that sets the given units (heads, experts) to zero along `axis`."""

  def edit(value: jax.Array) -> jax.Array:
    keep = jnp.ones(value.shape[axis], bool).at[jnp.asarray(units)].set(False)
    shape = [1] * value.ndim
    shape[axis] = value.shape[axis]
    return jnp.where(keep.reshape(shape), value, 0)

  return edit
