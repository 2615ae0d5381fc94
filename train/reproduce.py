"""Trains every row of a published table over several seeds, and sets the table beside the original.

The program is `compmod_jax.commands.reproduce`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.reproduce import main

if __name__ == "__main__":
  cli.run(main)
