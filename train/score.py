"""How probable texts, or given translations, are to a model: the lines of standard input.

The program is `compmod_jax.commands.score`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.score import main

if __name__ == "__main__":
  cli.run(main)
