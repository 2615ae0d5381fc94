"""Runs a model on standard input, line by line, to standard output.

The program is `compmod_jax.commands.predict`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.predict import main

if __name__ == "__main__":
  cli.run(main)
