"""Compiles the routing kernels for accelerators that are not here, and prints what they cost.

    make aot            or, in its environment:
    python -m benchmarks.aot [--quick] [--json FILE] [--devices v5e h100]

For TPU v5e, v5p, v6e and an H100; float32 and bfloat16; 4, 8, 12 and 16 heads of 64; forward and
training (all gradients); 16,384 tokens. Every program is compiled by the compiler that the device
would use; nothing runs. Bytes are the operands and results of every top-level instruction of the
optimised module in main memory; model time is what takes longer, these bytes at the memory's
bandwidth or the products at their peak. XLA's own estimate leaves kernels out. Registers a thread
and spilt bytes are the worst of a program's Triton kernels. In full about three minutes on 2 cores.
"""

import argparse
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

from benchmarks import devices
from benchmarks.designs import Design, Sizes, designs

HEADS, DTYPES = (4, 8, 12, 16), ("float32", "bfloat16")
# Together they hold every kernel, forward and backward.
COMPILED = (
  ("packed", "forward"),
  ("packed", "training"),
  ("softmax alone", "training"),
)
COLUMNS = ("device", "type", "heads", "design", "pass", "GFLOP", "MiB", "model us", "XLA us")
COLUMNS += ("registers", "spilt")


def compile_design(
  device: devices.Device, design: Design, sizes: Sizes, training: bool, *, kernels: bool = False
) -> devices.Compiled:
  """One design, forward or in training."""
  function: Any = design.training if training else design.program
  args: Any = (design.args(sizes), sizes.cotangent()) if training else (design.args(sizes),)
  return devices.compile_for(device, function, args, sizes.dtype, kernels=kernels)


def row(device: devices.Device, design: Design, sizes: Sizes, training: bool) -> dict[str, Any]:
  """What is known of one program."""
  made = compile_design(device, design, sizes, training, kernels=device.platform == "cuda")
  if made.census.kernels == 0:
    raise RuntimeError(f"{design.name} for {device.name} holds no kernel")
  return {
    "device": device.name,
    "type": sizes.dtype,
    "heads": sizes.heads,
    "design": design.name,
    "pass": "training" if training else "forward",
    "GFLOP": made.flops / 1e9,
    "MiB": made.census.mebibytes,
    "model us": made.seconds * 1e6,
    "XLA us": None if made.estimate is None else 1e6 * made.estimate,
    "registers": max((r for r, _ in made.kernels.values()), default=None),
    "spilt": max((s for _, s in made.kernels.values()), default=None),
  }


def line(values: Any) -> str:
  """A line of the table."""
  cells = ("-" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v) for v in values)
  widths = (6, 8, 5, 14, 8, 8, 8, 8, 8, 9, 6)
  return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--quick", action="store_true", help="8 heads, bfloat16, one design")
  parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
  parser.add_argument("--devices", nargs="+", default=list(devices.DEVICES), metavar="NAME")
  options = parser.parse_args()
  devices.use_compilers()
  rows = []
  print(line(COLUMNS), flush=True)
  for name in options.devices:
    device = devices.DEVICES[name]
    for sizes in cases(options.quick):
      for name, part in COMPILED[:2] if options.quick else COMPILED:
        rows.append(row(device, designs(device.kernels)[name], sizes, part == "training"))
        print(line(rows[-1].values()), flush=True)
  if options.json is not None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"benchmark": "Kernels compiled ahead", "date": now, "rows": rows}
    options.json.write_text(json.dumps(found, indent=2) + "\n")


def cases(quick: bool) -> list[Sizes]:
  """What is compiled."""
  if quick:
    return [Sizes()]
  return [dataclasses.replace(Sizes(), heads=h, dtype=d) for d in DTYPES for h in HEADS]


if __name__ == "__main__":
  main()
