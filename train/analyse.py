"""Looks into a trained model: what its units do, and what it loses without them.

The program is `compmod_jax.commands.analyse`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.analyse import main

if __name__ == "__main__":
  cli.run(main)
