"""Makes a starter project: a configuration, a few lines of data, and a note of what to run.

The program is `compmod_jax.commands.init`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.init import main

if __name__ == "__main__":
  cli.run(main)
