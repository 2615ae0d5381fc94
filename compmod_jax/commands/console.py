"""The console script `compmod`: every program by its name.

compmod train --config nmt_cah --workdir runs/nmt_cah
"""

import importlib
import sys

import compmod_jax
from compmod_jax.commands import garbage, interrupt


def main() -> None:
  """Runs the program that the first word names; without one, prints the list of programs."""
  garbage.look_rarely()
  interrupt.install(importing=True)
  interrupt.hook()
  from compmod_jax.commands import cli, programs
  from compmod_jax.core.errors import check_choice

  known = {name.replace("_", "-"): (name, about) for name, about in programs()}
  given = sys.argv[1] if len(sys.argv) > 1 else "--help"

  def listed(argv: list[str]) -> None:
    start = cli.start() or cli.CONSOLE
    rows = [(f"{start} {name}", about) for name, (_, about) in known.items()]
    print(f"usage: {start} PROGRAM [OPTION ...]\n\n{cli.table(rows, 34)}\n")
    print(f"Each has --help; --version prints the version. {cli.DEBUG}")

  def version(argv: list[str]) -> None:
    print(f"compmod_jax {compmod_jax.__version__}")

  def unknown(argv: list[str]) -> None:
    check_choice("The program", given.replace("_", "-"), known)

  if given == "help" and len(sys.argv) > 2:
    given, sys.argv[1:] = sys.argv[2], [sys.argv[2], "--help"]
  if given in ("help", "-h", "--help"):
    cli.run(listed)
  if given == "--version":
    cli.run(version)
  name, _ = known.get(given.replace("_", "-"), ("", ""))
  if not name:
    cli.run(unknown)
  sys.argv = [sys.argv[0], *sys.argv[2:]]
  cli.run(importlib.import_module(f"compmod_jax.commands.{name}").main)
