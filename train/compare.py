"""Compares two trained models on the same sentences.

The program is `compmod_jax.commands.compare`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.compare import main

if __name__ == "__main__":
  cli.run(main)
