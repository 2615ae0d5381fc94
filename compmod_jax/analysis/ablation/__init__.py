"""What a model loses without some of its heads or experts: measured and reported."""

from compmod_jax.analysis.ablation.measure import Ablate, Ablated, Effect
from compmod_jax.analysis.ablation.report import make_page

__all__ = ["Ablate", "Ablated", "Effect", "make_page"]
