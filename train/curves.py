"""Draws the learning curves of several runs beside each other.

The program is `compmod_jax.commands.curves`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.curves import main

if __name__ == "__main__":
  cli.run(main)
