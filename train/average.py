"""Averages the parameters of a run's last evaluated models.

The program is `compmod_jax.commands.average`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.average import main

if __name__ == "__main__":
  cli.run(main)
