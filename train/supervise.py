"""Starts training again where it crashes, and ends a step that does not end.

The program is `compmod_jax.commands.supervise`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.supervise import main

if __name__ == "__main__":
  cli.run(main)
