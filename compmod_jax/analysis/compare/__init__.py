"""Two models on the same sentences: compared and reported."""

from compmod_jax.analysis.compare.measure import Compare, Compared, compare
from compmod_jax.analysis.compare.report import make_page

__all__ = ["Compare", "Compared", "compare", "make_page"]
