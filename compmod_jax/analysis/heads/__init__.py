"""What heads and experts do: measured on a split and reported."""

from compmod_jax.analysis.heads.findings import Finding
from compmod_jax.analysis.heads.measure import Heads, Measured
from compmod_jax.analysis.heads.report import make_page

__all__ = ["Finding", "Heads", "Measured", "make_page"]
