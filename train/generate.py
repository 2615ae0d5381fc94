"""Continues texts with a language model: the lines of standard input, line by line.

The program is `compmod_jax.commands.generate`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.generate import main

if __name__ == "__main__":
  cli.run(main)
