"""Scores a trained model on splits of its data: the numbers that training reported.

The program is `compmod_jax.commands.evaluate`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.evaluate import main

if __name__ == "__main__":
  cli.run(main)
