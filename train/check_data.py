"""Looks through an experiment's data and says what is wrong with it, and where.

The program is `compmod_jax.commands.check_data`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.check_data import main

if __name__ == "__main__":
  cli.run(main)
