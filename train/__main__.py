"""Lists the programs of this package.

python -m train
"""

from compmod_jax.commands import cli, programs
from compmod_jax.core.errors import check


def main(argv: list[str]) -> None:
  """Prints the list; other arguments are a mistake."""
  known = {"main" if name == "train" else name: about for name, about in programs()}
  first = argv[0] if argv else ""
  check(
    first not in known,
    f"train {first} has a blank where the name has a dot; run python -m train.{first}.",
  )
  check(
    not set(argv) - {"-h", "--help"},
    f"{first} is not an option; python -m train takes none and lists the programs.",
  )
  rows = [(f"python -m train.{name}", about) for name, about in known.items()]
  print(
    f"usage: python -m train.PROGRAM [OPTION ...]\n\n{cli.table(rows, 34)}\n\n"
    f"Each has --help. {cli.DEBUG}"
  )


if __name__ == "__main__":
  cli.run(main)
