"""The short help of programs that take an experiment: usage, variants, the fields that matter."""

import ast
import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from compmod_jax.commands import cli
from compmod_jax.training.experiment import (
  Experiment,
  config_names,
  find_config,
  load_config,
  variants,
)

ALL = "--help-all"
EXAMPLE = "nmt_cah"  # whose values are shown where none is given

# The ten fields that matter most; of each line the first one that the experiment has and uses.
FIELDS = (
  ("phases.0.steps", "phases.0.epochs"),
  ("time_limit_minutes",),
  ("evaluate_every",),
  ("optimizer.learning_rate",),
  (
    "task.batch.tokens",
    "task.batch_tokens",
    "task.batch_questions",
    "task.rows",
    "task.episodes.batch",
  ),
  ("model.dim", "model.cell.dim"),
  (
    "model.encoder_layers",
    "model.vanilla_layers",
    "model.decoder_layers",
    "model.layers",
    "model.scripts",
    "model.embedding_dim",
  ),
  (
    "model.compete",
    "model.recoding.signal",
    "model.cell.active",
    "model.cell.rule",
    "model.functions",
  ),
  ("model.dropout",),
  ("seed",),
)


def page(make_args: Callable[..., object], config: str | None) -> str:
  """The help of a program.

  Args:
    make_args: the dataclass of its options, with a field `config: Experiment`.
    config: PATH[:VARIANT] as it was given; None if it was not.

  Raises:
    UserError: there is no such configuration, or it is wrong.
  """
  shown = config or EXAMPLE
  experiment = load_config(shown)
  start, about = cli.program_of(make_args)
  parts = [
    f"usage: {start} --config PATH[:VARIANT] [--config.FIELD=VALUE ...] [OPTION ...]",
    about,
    *([_of_file(config)] if config else _files()),
  ]
  fields = list(important(experiment))
  ten = "ten " if len(fields) == len(FIELDS) else ""  # a model that reads no text has fewer
  heading = f"The {ten}fields that matter, with their values in {shown}:"
  parts.append(f"{heading}\n\n{cli.table(fields)}")
  others = [*_others(make_args), ("--debug", cli.DEBUG.removeprefix("--debug ").capitalize())]
  others.append((ALL, "All fields of --config and all options, with their types and defaults."))
  parts.append(f"Other options, with their defaults:\n\n{cli.table(others)}")
  return "\n\n".join(parts)


def _of_file(config: str) -> str:
  """What a configuration file says of itself, and its variants."""
  path = config.partition(":")[0]
  module = ast.parse(find_config(path).read_text(encoding="utf-8"))
  about = textwrap.indent(ast.get_docstring(module) or "(no description)", "  ")
  found = variants(path)
  listed = f"{path} has no variants that it checks."
  if found:
    listed = f"Variants, as --config {path}:VARIANT, all of them: {', '.join(found)}."
  return f"{path}:\n\n{about}\n\n{textwrap.fill(listed, cli.WIDTH, break_on_hyphens=False)}"


def _files() -> Iterator[str]:
  """The configurations of the package, and how to see the variants of one."""
  here = Path("configs").is_dir()
  rows = [
    (f"configs/{name}.py" if here else name, about.split("\n")[0])
    for name in config_names()
    for about in [ast.get_docstring(ast.parse(find_config(name).read_text("utf-8"))) or ""]
  ]
  yield f"Configurations; --config PATH --help lists the variants of one:\n\n{cli.table(rows, 28)}"


def important(experiment: Experiment) -> Iterator[tuple[str, str]]:
  """The fields of `FIELDS` with values, and the first sentence on each."""
  for choices in FIELDS:
    had = [(path, *_find(experiment, path)) for path in choices]
    had = [(path, holder, value) for path, holder, value in had if holder is not None]
    if had:
      path, holder, value = next((one for one in had if one[2]), had[0])
      about = describe(type(holder), path.rpartition(".")[2])
      if len(about) > cli.WIDTH - cli.LEFT - 2:  # one line each: the rest is in the full help
        about = re.split("[:;] ", about)[0].rstrip(".") + "."
      yield _set(f"--config.{path}", value), about


def _find(holder: object, path: str) -> tuple[object, object]:
  """The object that holds a dotted field, and its value; (None, None) if there is no such field."""
  for name in path.split("."):
    last = holder
    if isinstance(holder, tuple) and name.isdigit():
      holder = holder[int(name)]
    elif dataclasses.is_dataclass(holder) and name in {f.name for f in dataclasses.fields(holder)}:
      holder = getattr(holder, name)
    else:
      return None, None
  return last, holder


def _others(make_args: object, prefix: str = "--") -> Iterator[tuple[str, str]]:
  """The options besides `--config`, those of nested dataclasses too."""
  assert isinstance(make_args, type)
  assert dataclasses.is_dataclass(make_args)
  hints = typing.get_type_hints(make_args, include_extras=True)
  for field in dataclasses.fields(make_args):
    if field.name == "config":
      continue
    if dataclasses.is_dataclass(field.default):
      yield from _others(type(field.default), f"{prefix}{field.name}.")
      continue
    extras = getattr(hints[field.name], "__metadata__", ())
    aliases = [alias for extra in extras for alias in getattr(extra, "aliases", None) or ()]
    name = next(iter(aliases), f"{prefix}{field.name}")
    yield _set(name, field.default), describe(make_args, field.name)


def _set(name: str, value: object) -> str:
  """An option with its value as it would be typed."""
  if value is None or value is False or value in ("", (), dataclasses.MISSING):
    return name
  shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
  return f"{name} {shown}" if isinstance(value, tuple) else f"{name}={shown}"


def describe(holder: type, name: str) -> str:
  """The first sentence of the docstring of a dataclass's field; empty where it has none."""
  for owner in holder.__mro__:
    if name not in inspect.get_annotations(owner):
      continue
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    for place, line in enumerate(body.body[:-1]):
      if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == name:
        text = body.body[place + 1]
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
          whole = " ".join(str(text.value.value).split())
          return re.split(r"(?<=\.) (?=[A-Z])", whole)[0]
  return ""
