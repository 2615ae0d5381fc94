"""All tables by name; a new one is a function from a scale to a `Spec`, and a line here."""

import functools
from collections.abc import Callable

from compmod_jax.core.errors import check_choice
from compmod_jax.tables import nemot, recoding, relatives
from compmod_jax.tables.competition import competition
from compmod_jax.tables.generalisation import generalisation, logic_in_context
from compmod_jax.tables.interpreter import fuzzy_expressions
from compmod_jax.tables.masked import mechanisms, roberta
from compmod_jax.tables.spec import Spec
from compmod_jax.tables.translation import (
  drophead,
  meta_routers,
  places,
  recurrent,
  regimes,
  silent,
  sizes,
)

# Name -> spec of a scale and a number of heads, where the table has several.
TABLES: dict[str, Callable[[str, int], Spec]] = {
  "5.1": places,
  "5.2": lambda scale, heads: sizes(scale),
  "5.3": lambda scale, heads: silent(scale),
  "5.4": lambda scale, heads: regimes(scale),
  "competition": lambda scale, heads: competition(scale),
  "seq2seq": lambda scale, heads: recurrent(scale),
  "meta_routers": lambda scale, heads: meta_routers(scale),
  "roberta": lambda scale, heads: roberta(scale),
  "tim": lambda scale, heads: mechanisms(scale),
  "neural_interpreters": lambda scale, heads: fuzzy_expressions(scale),
  "competing_experts": lambda scale, heads: relatives.experts(scale),
  "drophead": lambda scale, heads: drophead(scale),
  "recoding": lambda scale, heads: recoding.signals(scale),
  "recoding-5.1": lambda scale, heads: recoding.step_sizes(scale),
  "recoding-5.2": lambda scale, heads: recoding.samples(scale),
  "recoding-5.4": lambda scale, heads: recoding.dropout(scale),
  "recoding-5.5": lambda scale, heads: recoding.dynamic(scale),
  "recoding-5.6": lambda scale, heads: recoding.ablation(scale),
  "recoding-decoders": lambda scale, heads: recoding.decoders(scale),
  "copying": lambda scale, heads: relatives.copying(scale),
  "digits": lambda scale, heads: relatives.digits(scale),
  "cues": lambda scale, heads: relatives.cues(scale),
  "plastic_lm": lambda scale, heads: relatives.plastic_lm(scale),
  "few-shot": lambda scale, heads: relatives.few_shot(scale),
  "leopard": lambda scale, heads: relatives.leopard(scale),
  "continual": lambda scale, heads: relatives.continual(scale),
  "generalisation": lambda scale, heads: generalisation(scale),
  "logic_in_context": lambda scale, heads: logic_in_context(scale),
  "nemot-3.1": lambda scale, heads: nemot.zero_shot(scale),
  "nemot-3.4": lambda scale, heads: nemot.alone(scale),
  "nemot-3.7": lambda scale, heads: nemot.general(scale),
  "nemot-3.9": lambda scale, heads: nemot.tuned(scale),
  "nemot-3.10": lambda scale, heads: nemot.strategies(scale),
  "nemot-scan": lambda scale, heads: nemot.scan(scale),
}


@functools.cache
def table(name: str, scale: str, heads: int) -> Spec:
  """The table of that name.

  Raises:
    UserError: an unknown table or scale.
  """
  check_choice("TABLE", name, TABLES)
  return TABLES[name](scale, heads)
