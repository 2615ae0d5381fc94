"""Programs that train, evaluate and use the models of compmod_jax."""

import sys

if sys.argv[:1] == ["-m"]:  # python -m train.PROGRAM, of which nothing is imported yet
  from train import interrupt

  interrupt.install(importing=True)
  interrupt.hook()
