"""What the gates of a modulated model let pass: measured and reported."""

from compmod_jax.analysis.gates.measure import Gates, Measured
from compmod_jax.analysis.gates.report import make_page

__all__ = ["Gates", "Measured", "make_page"]
