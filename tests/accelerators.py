"""Accelerators that are not here, for `compmod_jax.core.sharding.tracing_for`."""

from jax.sharding import AbstractDevice

DEVICES = {
  "tpu": AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu"),
  "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
}
"""By the platform that programs are lowered for."""
