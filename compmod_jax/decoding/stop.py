"""Stop strings: a hypothesis ends once the text of its tokens contains one of them.

A string is looked for by its automaton (Knuth, Morris and Pratt 1977), whose transitions for whole
tokens are worked out beforehand; its state is a part of each hypothesis's cache. So a string may
begin within a token, end within another, and span several.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from compmod_jax.core.errors import check
from compmod_jax.decoding.types import Cache, Step


def stop_table(stop: str, pieces: Sequence[str]) -> Int[np.ndarray, "states vocab"]:
  """How many characters of a stop string match after a token, from how many matched before.

  Args:
    stop: the string.
    pieces: what every token adds to a text.

  Returns:
    int32; row and value `len(stop)` mean that the text contains the string.

  Raises:
    UserError: the string is empty.
  """
  check(bool(stop), "A stop string is empty; everything would end at once. Leave it out.")
  whole, nowhere = len(stop), np.zeros(len(stop) + 1, np.int32)
  nowhere[whole] = whole
  moves = {character: nowhere.copy() for character in stop}
  for character, move in moves.items():
    for state in range(whole):
      seen = stop[:state] + character
      move[state] = next(n for n in range(len(seen), -1, -1) if seen.endswith(stop[:n]))
  table = np.empty((whole + 1, len(pieces)), np.int32)
  for number, piece in enumerate(pieces):
    states = np.arange(whole + 1, dtype=np.int32)
    for character in piece:
      states = moves.get(character, nowhere)[states]
    table[:, number] = states
  return table


def stopping(
  step: Step, cache: Cache, tables: Sequence[Array], *, batch: int, beams: int, eos: int
) -> tuple[Step, Cache]:
  """A step after which nothing but the end, at no cost, follows a stop string; and its cache.

  The token that the search starts from does not count.

  Args:
    step: of the model.
    cache: the model's, before the first step; `["model"]` of the new one.
    tables: of `stop_table`, one for each string.
    batch: examples.
    beams: hypotheses an example.
    eos: end token.
  """

  def run(cache: Cache, tokens: Int[Array, "batch beams"]) -> tuple[Array, Cache]:
    logits, model = step(cache["model"], tokens)
    matched = [
      jnp.where(cache["begun"], table[state, tokens], state)
      for table, state in zip(tables, cache["matched"], strict=True)
    ]
    ended = jnp.zeros(tokens.shape, bool)
    for table, state in zip(tables, matched, strict=True):
      ended |= state == len(table) - 1
    only_end = jnp.where(jnp.arange(logits.shape[-1]) == eos, 0.0, -jnp.inf)
    logits = jnp.where(ended[..., None], only_end[None, None], logits)
    return logits, {"model": model, "matched": matched, "begun": jnp.bool_(True)}

  matched = [jnp.zeros((batch, beams), jnp.int32) for _ in tables]
  return run, {"model": cache, "matched": matched, "begun": jnp.bool_(False)}
