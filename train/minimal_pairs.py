"""Scores a language model on minimal pairs: is the grammatical sentence the likelier one?

The program is `compmod_jax.commands.minimal_pairs`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.minimal_pairs import main

if __name__ == "__main__":
  cli.run(main)
