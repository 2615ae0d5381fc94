"""The programs, where the script `compmod` is not on the path: python -m compmod_jax train ..."""

from compmod_jax.commands.console import main

if __name__ == "__main__":
  main()
