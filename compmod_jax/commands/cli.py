"""What every program shares: typed options, and the message and exit status of a mistake."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from compmod_jax.commands import failures, interrupt
from compmod_jax.core.errors import UserError, check
from compmod_jax.training.memory import keep_freed_memory

T = TypeVar("T")


def run(main: Callable[[list[str]], int | None]) -> None:
  """Runs a program and ends the process with an exit status of `compmod_jax.commands.failures`.

  What a user can cause prints one paragraph, and with `--debug` the traceback before it.
  """
  interrupt.install()
  keep_freed_memory()
  argv = sys.argv[1:]
  debug = "--debug" in argv
  try:
    status = main([argument for argument in argv if argument != "--debug"])
    sys.stdout.flush()
  except BrokenPipeError:
    # The reader has seen enough; what is still held for it must not be written at exit either.
    _drop_output()
    status = 0
  except Exception as error:
    if interrupt.came():
      _fail(KeyboardInterrupt(), debug)
    _fail(error, debug)
  except KeyboardInterrupt as error:
    _fail(error, debug)
  sys.exit(status or 0)


def _fail(error: BaseException, debug: bool) -> NoReturn:
  """Prints what happened, and ends the process; a defect of ours keeps its traceback."""
  message = failures.explain(error)
  if message is None:
    raise error
  if debug:
    traceback.print_exc()
  try:
    sys.stdout.flush()
  except OSError:
    _drop_output()
  print(f"error: {as_started(message)}", file=sys.stderr)
  sys.exit(failures.status(error))


def _drop_output() -> None:
  """Sends what is still held for standard output nowhere."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


WIDTH, LEFT = 100, 42  # characters of what help prints, and of the names in it
DEBUG = "--debug adds the traceback to the message of a mistake."


CONSOLE = "compmod"  # name of the console script
MODULE = "python -m compmod_jax"  # the same without it


def start() -> str:
  """What stands before a program's name: that of the console script, or how it is started.

  Empty where the process was started by `python -m train.NAME`.
  """
  script = Path(sys.argv[0])
  if script.stem == CONSOLE:
    return CONSOLE
  return MODULE if script.parts[-2:] == ("compmod_jax", "__main__.py") else ""


def as_started(text: str) -> str:
  """A text whose commands are written as those of the program that runs.

  Texts have `python -m train.NAME`; of the console script that is `compmod NAME`, where training
  is called `train`.
  """
  before = start()
  if not before:
    return text
  return re.sub(
    r"python -m train\.(\w+)",
    lambda found: f"{before} {'train' if found[1] == 'main' else found[1].replace('_', '-')}",
    text,
  )


def command(program: str, argv: Sequence[str]) -> str:
  """The line that starts a program again, for a shell, as this one was started.

  Args:
    program: its name in `train`.
    argv: what follows.
  """
  return as_started(f"python -m train.{program} {shlex.join(argv)}".rstrip())


def program_of(make_args: Callable[..., object]) -> tuple[str, str]:
  """How the program that defines `make_args` is started, and the docstring of its module."""
  module = sys.modules[make_args.__module__]
  name = make_args.__module__.rpartition(".")[2]
  name = "main" if name == "train" else name
  return f"python -m train.{name}", (module.__doc__ or "").strip()


def options(
  make_args: Callable[..., T],
  argv: list[str],
  *,
  default: T | None = None,
  program: tuple[str, str] | None = None,
) -> T:
  """Parses typed options into `make_args`, a dataclass; `default` holds what is not given.

  Args:
    make_args: the dataclass.
    argv: the command line, without the program.
    default: an instance of it.
    program: how it is started, and what the help says of it; that of `program_of` by default.

  Raises:
    UserError: an option that does not exist (the nearest one is named) or a bad value.
    SystemExit: help was asked for and printed.
  """
  known = {} if default is None else {"default": default}
  argv = ["--help" if token == "--help-all" else token for token in argv]
  here = dict(_options_of(make_args if default is None else default, "--"))
  printed = io.StringIO()
  parse: Callable[..., tuple[T, list[str]]] = tyro.cli
  usage, about = map(as_started, program or program_of(make_args))
  try:
    with contextlib.redirect_stderr(printed):
      args, unknown = parse(
        make_args,
        prog=usage,
        description=f"{about}\n\n{DEBUG}",
        args=_spell_flags(argv, {name for name, value in here.items() if isinstance(value, bool)}),
        return_unknown_args=True,
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
        **known,
      )
  except SystemExit as stop:
    if not stop.code:
      raise
    raise _mistake(stop, printed.getvalue()) from stop
  if unknown:
    name = next((token for token in unknown if token.startswith("-")), unknown[0]).split("=")[0]
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    if name in here:
      hint = " It is a table of fields, or empty here: set it in the configuration file."
    raise UserError(f"{name} is not an option.{hint} Run with --help-all for a list of all.")
  return args


def _mistake(stop: BaseException, printed: str) -> UserError:
  """The mistake behind tyro's exit: a configuration's own, else what tyro printed, unboxed."""
  cause: BaseException | None = stop
  while cause is not None:
    if isinstance(cause, UserError):
      return UserError(str(cause))
    cause = cause.__context__
  lines = [re.sub(r"[\u2500-\u257f]+", " ", line).strip() for line in printed.splitlines()[1:]]
  text = " ".join(line for line in lines if line)
  return UserError(re.sub(r"\s*(Argument helptext|For full helptext).*", "", text))


def _options_of(holder: object, prefix: str) -> Iterator[tuple[str, Any]]:
  """Options that set the fields of a dataclass and of those inside it, with their defaults."""
  if dataclasses.is_dataclass(holder):
    for field in dataclasses.fields(holder):
      yield from _options_of(getattr(holder, field.name, None), f"{prefix}.{field.name}")
  elif isinstance(holder, tuple) and any(dataclasses.is_dataclass(item) for item in holder):
    for number, item in enumerate(holder):
      yield from _options_of(item, f"{prefix}.{number}")
  else:
    yield prefix.replace("--.", "--"), holder


def _spell_flags(argv: list[str], flags: set[str]) -> list[str]:
  """`--a.b=true` and `--a.b true` as tyro knows them: `--a.b`, and `--a.no_b` for false."""
  spelt: list[str] = []
  for token in argv:
    name, equals, value = token.partition("=")
    if not equals and spelt and spelt[-1] in flags and token.lower() in ("true", "false"):
      name, value = spelt.pop(), token
    elif not equals or name not in flags:
      spelt.append(token)
      continue
    check(value.lower() in ("true", "false"), f"{name} is {value!r}; it must be true or false.")
    holder, dot, last = name.removeprefix("--").rpartition(".")
    spelt.append(name if value.lower() == "true" else f"--{holder}{dot}no_{last}")
  return spelt


def table(rows: Iterable[tuple[str, str]], left: int = LEFT) -> str:
  """Names at the left, what they are wrapped at the right; a long name has a line of its own.

  Args:
    rows: names, such as options, and sentences on them.
    left: width of the names, in characters.
  """
  lines = []
  for name, about in rows:
    wrapped = textwrap.wrap(about, WIDTH - left - 2, break_on_hyphens=False) or [""]
    if len(name) > left - 2:
      lines.append(f"  {name}")
    else:
      lines.append(f"  {name.ljust(left)}{wrapped.pop(0)}".rstrip())
    lines += [f"  {' ' * left}{line}" for line in wrapped if line]
  return "\n".join(lines)
