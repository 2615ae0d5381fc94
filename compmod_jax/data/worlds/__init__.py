"""Small simulated worlds told in English, with questions that need one to three of their facts.

`lexicon` holds the words, `world` what events make true, `queries` what follows from them, `plots`
and `relations` what is asked and why it follows, `stories` what else happens, `drafts` the four
formats, `english` the sentences, `splits` the data source.
"""

from compmod_jax.data.worlds.lexicon import CLASSES, tags
from compmod_jax.data.worlds.splits import SPLITS, WorldsData

__all__ = ["CLASSES", "SPLITS", "WorldsData", "tags"]
