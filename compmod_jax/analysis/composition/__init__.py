"""Whether words can be exchanged inside a model: patching, and homomorphism error."""

from compmod_jax.analysis.composition.measure import Composed, Composition
from compmod_jax.analysis.composition.report import make_page

__all__ = ["Composed", "Composition", "make_page"]
