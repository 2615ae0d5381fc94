"""Memory of a training step of a GPT-2 on one long text, on a GPU that is not here.

    python -m benchmarks.long_text [--quick] [--json FILE] [--check]

In the environment of `make aot`: GPT-2 Small (124 million parameters) in bfloat16 with AdamW, one
text of 1,024, 8,192 or 32,768 tokens, the whole step compiled for an H100; nothing runs. Memory is
what XLA plans: arguments, results that do not take their place, and temporaries. About two minutes
on 2 cores.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from benchmarks import common, devices
from compmod_jax.core import sharding
from compmod_jax.models.decoder_lm import DecoderConfig
from compmod_jax.models.text import Text

VOCABULARY = 50_257
LENGTHS = (1024, 8192, 32_768)
TARGETS = {8192: 16.0}
"""Gigabytes at most."""


def program(length: int, compete: bool) -> tuple[Callable[..., Any], Callable[[], Any]]:
  """A step of parameters, optimizer's state and tokens [1, length]; what makes the first two."""
  config = DecoderConfig(
    max_length=length,
    dtype="bfloat16",
    dropout=0.0,
    compete=("decoder_self",) if compete else (),
  )
  module, optimizer = config.decoder(VOCABULARY, 0), optax.adamw(1e-4)

  def initial() -> Any:
    text = Text(jnp.zeros((1, 16), jnp.int32))
    params = module.init(jax.random.key(0), text)["params"]
    return params, optimizer.init(params)

  def step(params: Any, state: Any, tokens: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
      made: Any = module.apply({"params": params}, Text(tokens))
      rows = optax.softmax_cross_entropy_with_integer_labels(made.logits[:, :-1], tokens[:, 1:])
      return jnp.mean(rows)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  return step, initial


def planned(compiled: Any) -> float:
  """Gigabytes of a compiled step."""
  used = compiled.memory_analysis()
  given = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
  return (given + used.temp_size_in_bytes) / 1e9


def memory(length: int, compete: bool) -> float:
  """Gigabytes of a step on an H100."""
  step, initial = program(length, compete)
  device = devices.DEVICES["h100"]
  place = SingleDeviceSharding(devices.device_named(device.name))
  tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    (*jax.eval_shape(initial), tokens),
  )
  with sharding.tracing_for(device.abstract):
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    return planned(traced.lower(lowering_platforms=("cuda",)).compile())


def main() -> None:
  options = common.options(__doc__, ("cpu",)).parse_args()
  devices.use_compilers()
  report = common.start("A GPT-2 on one long text", options)
  table = report.tables["h100"] = {}
  for length in LENGTHS[: 1 if options.quick else None]:
    for compete in (False, True):
      row = f"{length:,} tokens, {'heads compete' if compete else 'plain'}"
      table[row] = memory(length, compete)
      target = {"at_most": TARGETS[length]} if length in TARGETS else {}
      report.claim(f"{row}: GB of a training step", table[row], 1.0, **target)
  report.finish()


if __name__ == "__main__":
  main()
