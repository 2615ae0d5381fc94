"""Small simulated worlds told in English, with questions that need one to three of their facts.

`lexicon` holds the words, `world` what events make true, `queries` what follows from them,
`repertoire` what may be asked, `plots` and `relations` why an answer follows, `stories` what else
happens, `drafts` the four formats, `english` the sentences, `syntax` which of their words depend on
which, `splits` the data source.
"""

from compmod_jax.data.synthetic.worlds.lexicon import CLASSES, tags
from compmod_jax.data.synthetic.worlds.repertoire import FEW_KINDS
from compmod_jax.data.synthetic.worlds.splits import SPLITS, WorldsData

__all__ = ["CLASSES", "FEW_KINDS", "SPLITS", "WorldsData", "tags"]
