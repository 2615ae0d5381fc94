"""A synchronous English-German grammar: every sentence is made in both languages at once.

`lexicon` holds the words, `inflect` their forms, `tables` both arranged for drawing, `phrases`,
`clauses` and `sentences` the rules, `splits` the data source, `properties` what sentences can be
told apart by, `dictionary` a baseline's word list.
"""

from compmod_jax.data.synthetic.grammar.dictionary import dictionary, translate_words
from compmod_jax.data.synthetic.grammar.splits import SPLITS, GrammarData

__all__ = ["SPLITS", "GrammarData", "dictionary", "translate_words"]
