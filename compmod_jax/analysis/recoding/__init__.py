"""Recurrent language models with recoding: how they read, and what their hidden states hold."""

from compmod_jax.analysis.recoding import probes, report
from compmod_jax.analysis.recoding.probes import ProbeNumber
from compmod_jax.analysis.recoding.traces import Traces

__all__ = ["ProbeNumber", "Traces", "probes", "report"]
