"""Programs that train, evaluate and use the models of compmod_jax."""

import sys

from compmod_jax import _renamed

_renamed.install()

if sys.argv[:1] == ["-m"]:  # python -m train.PROGRAM, of which nothing is imported yet
  from compmod_jax.commands import garbage, interrupt

  garbage.look_rarely()
  interrupt.install(importing=True)
  interrupt.hook()
