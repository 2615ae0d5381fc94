"""The option `--config`, which gives the defaults of all others."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from compmod_jax.commands import cli, help
from compmod_jax.core import errors
from compmod_jax.training.experiment import Experiment, load_config

T = TypeVar("T")


def parse(make_args: Callable[..., T], argv: list[str], **defaults: object) -> T:
  """Parses a command line whose `--config PATH[:VARIANT]` gives the defaults of `config`.

  `--config` is taken off first; every other option is typed and checked against the fields of
  `make_args`, a dataclass with a field `config: Experiment`. `--help` prints the help of `help` and
  ends the program, `--help-all` the list of all fields.

  Raises:
    UserError: there is no such configuration, or an option is wrong.
    SystemExit: help was asked for and printed.
  """
  first = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
  first.add_argument("--config")
  try:
    known, rest = first.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise errors.UserError(f"--config: {error.message}. Give the path of a file.") from error
  if {"-h", "--help"} & set(rest):
    print(cli.as_started(help.page(make_args, known.config)))
    raise SystemExit(0)
  if help.ALL in rest:
    rest = ["--help" if token == help.ALL else token for token in rest]
    known.config = known.config or help.EXAMPLE
  errors.check(
    known.config is not None,
    "--config is missing. Give a configuration, for example --config configs/nmt_cah.py.",
  )
  default = make_args(config=load_config(known.config), **defaults)
  return cli.options(make_args, rest, default=default)


def load_experiment(argument: str, overrides: list[str]) -> Experiment:
  """The experiment of `--config argument` with `--config.*` overrides applied."""
  return parse(_OnlyConfig, ["--config", argument, *overrides]).config


@dataclasses.dataclass(frozen=True)
class _OnlyConfig:
  config: Experiment
