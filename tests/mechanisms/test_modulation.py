"""Gates: what passes, and the statistics of them."""

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.mechanisms.modulation import attention_bias, gate_statistics, modulate

RANDOM = np.random.default_rng(0)


def test_without_a_gate_values_pass_untouched():
  values = jnp.asarray(RANDOM.normal(size=(2, 3, 4)), jnp.float32)
  assert modulate(values, None) is values
  np.testing.assert_array_equal(modulate(values, jnp.ones_like(values)), values)


def test_a_gate_keeps_the_type_of_the_values():
  values = jnp.ones((1, 2, 3), jnp.bfloat16)
  assert modulate(values, jnp.full((1, 2, 3), 0.3, jnp.float32)).dtype == jnp.bfloat16


def test_gates_on_attention_logits_multiply_unnormalised_probabilities():
  scores = jnp.asarray(RANDOM.normal(size=(2, 3, 4, 5)), jnp.float32)  # batch heads time keys
  gates = jnp.asarray(RANDOM.uniform(0.1, 0.9, size=(2, 5, 3)), jnp.float32)  # batch keys heads
  found = jax.nn.softmax(scores + attention_bias(jnp.log(gates)), axis=-1)
  weighted = np.exp(scores) * np.transpose(gates, (0, 2, 1))[:, :, None]
  np.testing.assert_allclose(found, weighted / weighted.sum(axis=-1, keepdims=True), rtol=1e-5)


def test_health_counts_real_positions_alone():
  gate = jnp.asarray([[[0.05, 0.95], [0.5, 0.5], [0.99, 0.99]]])
  found = gate_statistics(gate, jnp.asarray([[True, True, False]]))
  means = {name: float(total / count) for name, (total, count) in found.items()}
  assert means["mean"] == 0.5
  assert (means["closed"], means["open"]) == (0.25, 0.25)
  np.testing.assert_allclose(means["square"], (0.05**2 + 0.95**2 + 0.5) / 4, rtol=1e-6)
