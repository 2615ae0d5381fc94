"""Converts models from and to Hugging Face's format: RoBERTa, BERT, and from it also GPT-2.

The program is `compmod_jax.commands.convert`.
"""

from compmod_jax.commands import cli
from compmod_jax.commands.convert import main

if __name__ == "__main__":
  cli.run(main)
