"""Where a run came from: code, packages, machine."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
  "compmod_jax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "grain",
  "numpy",
  "sentencepiece",
  "sacrebleu",
  "safetensors",
)


def provenance() -> dict[str, Any]:
  """Git revision, versions, devices, processor and date, all of which JSON can hold.

  Never fails: what cannot be found out, as without git, is None.
  """
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "git": git_revision(),
    "python": platform.python_version(),
    "packages": {name: _version(name) for name in _PACKAGES},
    "devices": _devices(),
    "host": {
      "cpu": cpu_name(),
      "cores": os.cpu_count(),
      "system": platform.platform(),
    },
  }


def git_revision(folder: Path = Path(__file__).parent) -> dict[str, Any] | None:
  """The commit of the repository that has `folder`, and whether tracked files differ from it.

  None where no file in it is tracked, as in an environment within another project's repository.
  """

  def git(*arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=10, stdin=subprocess.DEVNULL
    ).stdout.strip()

  try:
    if not git("ls-files"):
      return None
    return {
      "revision": git("rev-parse", "HEAD"),
      "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
  except (OSError, ValueError, subprocess.SubprocessError):
    return None


def cpu_name() -> str | None:
  """The processor's name, such as "AMD EPYC 7B13"."""
  try:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.partition(":")[2].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine() or None


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _devices() -> dict[str, Any] | None:
  try:
    import jax

    devices = jax.devices()
    kind, platform_name = devices[0].device_kind, devices[0].platform
  except (ImportError, RuntimeError):
    return None
  return {"platform": platform_name, "kind": kind, "count": len(devices)}
