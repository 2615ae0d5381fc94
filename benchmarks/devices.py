"""Accelerators: what they can do, and programs compiled for them.

For those that are not here it needs the environment of `make aot`, in which XLA's compilers for
TPUs and NVIDIA GPUs are installed.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, SingleDeviceSharding

from benchmarks.census import Census, take_census
from compmod_jax.core import sharding
from compmod_jax.tools import matmul_flops
from compmod_jax.tools.devices import BANDWIDTH, PEAK_FLOPS, TPUS

# No device is opened, so that programs may share the TPU compiler.
_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
_NVIDIA = importlib.util.find_spec("nvidia")
_CUDA = Path(_NVIDIA.submodule_search_locations[0]) / "cuda_nvcc" if _NVIDIA else None  # type: ignore

# What the compiler has to know of an H100 with SXM5.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator.

  Attributes:
    name: short.
    kind: as JAX calls it.
    topology: as the TPU compiler calls it; empty for a GPU.
    cores: of one device.
    bandwidth: of its memory, bytes a second.
    peaks: products of matrices, operations a second, by type.
    here: whether programs can run on it.
  """

  name: str
  kind: str
  topology: str
  cores: int
  bandwidth: float
  peaks: dict[str, float]
  here: bool = False

  @property
  def platform(self) -> str:
    """What programs are lowered for."""
    return "tpu" if self.kind.startswith("TPU") else "cuda"

  @property
  def abstract(self) -> AbstractDevice:
    """As JAX describes one that need not be here."""
    platform = "gpu" if self.platform == "cuda" else "tpu"
    return AbstractDevice(device_kind=self.kind, num_cores=self.cores, platform=platform)

  @property
  def kernels(self) -> Any:
    """The implementation that is made for it."""
    return "tpu" if self.platform == "tpu" else "gpu"

  def peak(self, dtype: str) -> float:
    """Operations a second for arrays of this type."""
    return self.peaks[dtype]


# float32 products are one bfloat16 pass on TPUs by default, TF32 on an H100 (its data sheet).
_H100_KIND = "NVIDIA H100 80GB HBM3"
_SLICES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
DEVICES = {
  name: Device(
    name,
    f"TPU {name}",
    topology,
    1,
    chip.bandwidth,
    dict.fromkeys(("bfloat16", "float32"), chip.peak),
  )
  for name, topology in _SLICES.items()
  for chip in (TPUS[name],)
} | {
  "h100": Device(
    "h100", _H100_KIND, "", 132, BANDWIDTH[_H100_KIND], {"bfloat16": 989e12, "float32": 495e12}
  )
}


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What is known of a compiled program.

  Attributes:
    census: its instructions and their bytes.
    flops: of its products of matrices, those inside kernels included.
    estimate: XLA's own, seconds, if it has one; it leaves kernels out.
    seconds: at best: of memory and of arithmetic, what takes longer.
    kernels: of each Triton kernel, registers a thread and bytes spilt.
  """

  census: Census
  flops: float
  estimate: float | None
  seconds: float
  kernels: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def compile_for(
  device: Device, function: Callable[..., Any], args: Any, dtype: str, *, kernels: bool = False
) -> Compiled:
  """Compiles `function(*args)`, of arrays or their shapes, for one device of this kind.

  Args:
    device: what for.
    function: what.
    args: its arguments.
    dtype: whose peak counts.
    kernels: also assemble Triton kernels and read their registers.
  """
  if device.here:
    traced = jax.jit(function).trace(*args)
    return _known(device, traced, traced.lower().compile(), dtype)
  place = SingleDeviceSharding(device_named(device.name))
  args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
  before = set(_dump().glob("*.ptx"))
  with sharding.tracing_for(device.abstract):
    traced = jax.jit(function).trace(*args)
    compiled = traced.lower(lowering_platforms=(device.platform,)).compile()
  found = _registers(set(_dump().glob("*.ptx")) - before) if kernels else {}
  return dataclasses.replace(_known(device, traced, compiled, dtype), kernels=found)


def _known(device: Device, traced: Any, compiled: Any, dtype: str) -> Compiled:
  census = take_census(compiled.as_text() or "")
  flops = matmul_flops.count(traced.jaxpr, device.platform)
  seconds = max(census.bytes / device.bandwidth, flops / device.peak(dtype))
  estimate = (compiled.cost_analysis() or {}).get("optimal_seconds", -1.0)
  return Compiled(census, flops, estimate if estimate > 0 else None, seconds)


@functools.cache
def device_named(name: str) -> Any:
  """One that JAX can compile for, of a kind in `DEVICES` that need not be here."""
  device = DEVICES[name]
  if device.topology:
    return topologies.get_topology_desc(device.topology, platform="tpu").devices[0]
  described = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1")
  return described.devices[0]


def _registers(files: set[Path]) -> dict[str, tuple[int, int]]:
  """Registers a thread and bytes spilt of each entry of these PTX files."""
  found: dict[str, tuple[int, int]] = {}
  for path in sorted(files):
    command = [str(_CUDA / "bin" / "ptxas"), "-v", "--gpu-name", "sm_90a", str(path)]  # type: ignore
    run = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=False)
    pattern = (
      r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
      r".*?Used (\d+) registers"
    )
    for name, stores, loads, registers in re.findall(pattern, run.stderr, re.DOTALL):
      found[name] = int(registers), int(stores) + int(loads)
  return found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
  return tempfile.TemporaryDirectory(prefix="compmod_aot_")


def _dump() -> Path:
  """Where XLA leaves the code of kernels, until the program ends."""
  return Path(_folder().name)


def use_compilers() -> None:
  """Sets the compilers up for devices that are not here; before JAX first does anything.

  Raises:
    SystemExit: they are not installed.
  """
  if not (importlib.util.find_spec("libtpu") and _CUDA is not None and _CUDA.exists()):
    sys.exit(f"{sys.executable} lacks the compilers for accelerators; use `make aot`")
  flags = f"--xla_gpu_cuda_data_dir={_CUDA} --xla_dump_to={_dump()}"
  os.environ |= _TPU | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
  jax.config.update("jax_platforms", "cpu")
  # What is compiled for a device that is not here cannot be read back.
  jax.config.update("jax_enable_compilation_cache", False)


def attached() -> Device:
  """The accelerator that is here.

  Raises:
    SystemExit: there is none, or what it can do is not known.
  """
  kind = jax.devices()[0].device_kind
  if kind not in BANDWIDTH:
    known = ", ".join(sorted(BANDWIDTH))
    sys.exit(f"no figures of {kind!r} are known; compmod_jax/tools/devices.py has those of {known}")
  # float32 products are one bfloat16 pass on TPUs by default, TF32 at half the rate on GPUs.
  narrow = 1.0 if kind.startswith("TPU") else 0.5
  peaks = {"bfloat16": PEAK_FLOPS[kind], "float32": narrow * PEAK_FLOPS[kind]}
  return Device(kind, kind, "", 0, BANDWIDTH[kind], peaks, here=True)
