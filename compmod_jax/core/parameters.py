"""Parameters by name: their paths, and patterns that choose some of them."""

import fnmatch
from collections.abc import Iterable, Sequence

import jax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from compmod_jax.core import errors
from compmod_jax.core.types import Params


def path_name(path: KeyPath) -> str:
  """The name of a leaf of a tree of parameters, such as `encoder/layer_0/self/out/kernel`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def names(params: Params) -> list[str]:
  """Names of all parameters, in the order of the tree's leaves."""
  return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def matches(name: str, patterns: Iterable[str]) -> bool:
  """Whether one of the patterns stands for a parameter of this name.

  A pattern is a name in which `*` stands for any characters, slashes included, `?` for one and
  `[ab]` for one of several, as in the standard library's `fnmatch`. A module's name stands for all
  parameters in it: `head` for `head/kernel` and `head/bias`.
  """
  return any(
    fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}/*")
    for pattern in patterns
  )


def chosen(params: Params, patterns: Sequence[str], field: str) -> PyTree:
  """True for every parameter that one of the patterns stands for, in a tree like the parameters.

  Args:
    params: the parameters, or their shapes.
    patterns: see `matches`.
    field: of the configuration that has the patterns, for messages.

  Raises:
    UserError: a pattern stands for no parameter.
  """
  known = names(params)
  for pattern in patterns:
    if not any(matches(name, [pattern]) for name in known):
      parents = {name[:place] for name in known for place, c in enumerate(name) if c == "/"}
      raise errors.UserError(
        f"{field} has {errors.short(pattern)}, which stands for no parameter of the model."
        f"{errors.near(pattern, [*known, *sorted(parents)])} Give the name of a parameter or of a"
        " module, in which * stands for any characters; for example"
        f" {errors.short_list(sorted({name.partition('/')[0] for name in known}))}."
      )
  return jax.tree_util.tree_map_with_path(
    lambda path, _: matches(path_name(path), patterns), params
  )
