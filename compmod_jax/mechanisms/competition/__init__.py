"""Competition: units of a layer (heads, experts) compete for every position.

`router` scores and selects, `losses` keep the load even, `statistics` measure assignments and
weights, `drophead` drops whole heads in training.
"""

from compmod_jax.mechanisms.competition.router import (
  CompetitionConfig,
  Router,
  Rule,
  Selection,
  rank,
  scale_heads,
  score,
  select,
)

__all__ = [
  "CompetitionConfig",
  "Router",
  "Rule",
  "Selection",
  "rank",
  "scale_heads",
  "score",
  "select",
]
