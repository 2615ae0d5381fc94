"""Trains an experiment, evaluates what it kept as best, and writes a report.

The program is `compmod_jax.commands.train`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.train import main

if __name__ == "__main__":
  cli.run(main)
