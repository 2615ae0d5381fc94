"""Competition: units of a layer (heads, experts) compete for every position.

`router` scores and selects, `losses` keep routers healthy, `statistics` say how healthy they are,
`drophead` drops whole heads in training.
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
