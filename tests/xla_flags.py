"""Flags with which XLA compiles faster for CPUs; what it computes takes longer."""

import importlib.metadata

# A third less of compilation; a version that doesn't know a flag would abort.
QUICK = (
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  if importlib.metadata.version("jaxlib").startswith("0.10.")
  else ""
)
