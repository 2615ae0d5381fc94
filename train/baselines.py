"""Scores what needs no training: what a trained model must be better than.

The program is `compmod_jax.commands.baselines`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.baselines import main

if __name__ == "__main__":
  cli.run(main)
