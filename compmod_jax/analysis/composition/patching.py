r"""Patching: activations at a word come from a sentence that has another word there.

Two sentences differ at one position. The model reads one of them, the base, while some of its
activations at that position are those that it has when it reads the other, the source:

.. math:: a_{s, p}(\text{base}) \leftarrow a_{s, p}(\text{source}) \quad \text{for sites } s

and decodes. If the sites hold what the word contributes, the output is that of the source; if they
are of no account, it stays that of the base. As a control the activations are those of a random
other word.

Source: interchange interventions, Geiger et al. 2021 (Causal Abstractions of Neural Networks);
activation patching, Vig et al. 2020 (Investigating Gender Bias in Language Models Using Causal
Mediation Analysis).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.analysis.composition.pairs import Pair, Sentences
from compmod_jax.analysis.reading import Reader
from compmod_jax.analysis.scoring import decoded
from compmod_jax.analysis.subject import Subject
from compmod_jax.core.intermediates import Edit, Intermediates
from compmod_jax.core.types import Params
from compmod_jax.data.tokenizers import PAD
from compmod_jax.tasks.base import Batch

UNCHANGED, SOURCE, ELSE = "unchanged", "the source's", "something else"
"""What an output can become."""


class Sites(NamedTuple):
  """What is replaced.

  Attributes:
    names: sites of the encoder: [batch, time, units], or [batch, heads, queries, keys], of which
      those of a query count as activations at its position.
    everywhere: at all positions, not at the word alone.
  """

  names: tuple[str, ...]
  everywhere: bool = False


class Place(NamedTuple):
  """A position of a sentence."""

  sentence: int
  position: int


class Outcome(NamedTuple):
  """What became of the outputs of all pairs.

  Attributes:
    kinds: `UNCHANGED`, `SOURCE` or `ELSE` of every pair.
    right: whether each is the right output of the source.
  """

  kinds: np.ndarray
  right: np.ndarray


class Patches(NamedTuple):
  """What patching does.

  Attributes:
    pairs: those that were patched.
    equal: how many more were not, as the model has one output for both sentences.
    both_right: of the pairs that were patched, those for whose sentences the model's outputs are
      right.
    patched: what is replaced -> outcome with the source's activations.
    controls: the same with those of another word.
  """

  pairs: list[Pair]
  equal: int
  both_right: int
  patched: dict[str, Outcome]
  controls: dict[str, Outcome]


def other_words(
  sentences: Sentences, pairs: Sequence[Pair], end: int, chance: np.random.Generator
) -> dict[Pair, Place]:
  """Where a random word stands that is neither of a pair's, in a sentence as long as they are.

  Pairs for which there is none are left out.

  Args:
    sentences: among whose words it is drawn.
    pairs: for which.
    end: the token that ends sentences.
    chance: what draws.
  """
  places, tokens = dict[int, list[Place]](), dict[int, list[int]]()
  for number, sentence in sentences.items():
    length = len(sentence)
    places.setdefault(length, []).extend(Place(number, at) for at in range(length))
    tokens.setdefault(length, []).extend(sentence)
  known = {length: np.array(one) for length, one in tokens.items()}
  found = {}
  for pair in pairs:
    length = len(sentences[pair.base])
    others = np.flatnonzero(~np.isin(known[length], [*pair.words, end]))
    if len(others):
      found[pair] = places[length][int(chance.choice(others))]
  return found


class Patching:
  """Decodes sentences with activations of others.

  Args:
    subject: the model and the split.
    reads: how to read its tokens.
    sentences: those from which activations come.
    sites: all that will be replaced, in one call or another.
  """

  def __init__(self, subject: Subject, reads: Reader, sentences: Sentences, sites: Collection[str]):
    self.subject, self.reads, self.sentences, self.sites = subject, reads, sentences, sites

    @jax.jit
    def activations(params: Params, batch: Batch) -> dict[str, jax.Array]:
      intermediates = Intermediates(capture=frozenset(sites))
      subject.task.model.forward(params, batch, intermediates=intermediates)
      found = intermediates.captured.items()
      return {
        site: jnp.take_along_axis(value, _over(batch["taken"], value), axis=value.ndim - 2)
        for site, value in found
      }

    self._activations = activations

  def __call__(
    self, bases: Sequence[Place], sources: Sequence[Place], sites: Sites, name: str
  ) -> tuple[list[str], list[str]]:
    """Outputs, and the references of the bases.

    Args:
      bases: the sentences that are decoded, and where something is replaced.
      sources: from where, in sentences of the same lengths.
      sites: what is replaced. All that may be are arguments of one compiled search.
      name: what the progress display calls the sentences.
    """

    def edits(batch: Batch) -> Mapping[str, Edit]:
      shape = np.shape(batch["source"])
      given, replaced = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
      taken = np.tile(np.arange(shape[1]), (shape[0], 1))
      for row, number in enumerate(np.asarray(batch["index"]).tolist()):
        if number >= 0:
          base, source = bases[number], sources[number]
          tokens = self.sentences[source.sentence]
          given[row, : len(tokens)] = tokens
          replaced[row, slice(None) if sites.everywhere else base.position] = True
          if not sites.everywhere:
            taken[row, base.position] = source.position
      target = np.ones((shape[0], 1), np.int32)
      read = self.subject.place({"source": given, "target": target, "taken": taken})
      values = self._activations(self.subject.params, read)
      nothing = np.zeros(shape, bool)
      return {
        site: jax.tree_util.Partial(_replace, replaced if site in sites.names else nothing, value)
        for site, value in values.items()
      }

    numbers = [base.sentence for base in bases]
    return decoded(self.subject, self.reads, numbers, edits=edits, name=name)


def _over(positions: jax.Array, value: jax.Array) -> jax.Array:
  """What is of positions, [batch, time], with the axes of an activation of a site; see `Sites`."""
  return positions[:, None, :, None] if value.ndim == 4 else positions[..., None]


def _replace(replaced: jax.Array, other: jax.Array, value: jax.Array) -> jax.Array:
  """`other` where positions are replaced."""
  return jnp.where(_over(replaced, value), other, value)


def patch(
  subject: Subject,
  reads: Reader,
  sentences: Sentences,
  others: Mapping[Pair, Place],
  groups: Mapping[str, Sites],
) -> Patches:
  """What becomes of outputs.

  Args:
    subject: the model and the split.
    reads: how to read its tokens.
    sentences: of pairs and of the other words.
    others: pairs, and where the other word of the control stands.
    groups: name -> what is replaced together.
  """
  run = Patching(
    subject, reads, sentences, {site for sites in groups.values() for site in sites.names}
  )
  pairs = list(others)
  bases, sources = (
    [Place(number, pair.position) for pair, number in zip(pairs, numbers, strict=True)]
    for numbers in ([pair.base for pair in pairs], [pair.source for pair in pairs])
  )
  nothing = Sites(())
  before, own = run(bases, bases, nothing, "bases")
  wanted, references = run(sources, sources, nothing, "sources")
  kept = [place for place in range(len(pairs)) if before[place] != wanted[place]]
  right = [
    _equal(before[place], own[place]) and _equal(wanted[place], references[place]) for place in kept
  ]

  def outcome(name: str, sites: Sites, given: Sequence[Place]) -> Outcome:
    some = [bases[place] for place in kept], [given[place] for place in kept]
    outputs, _ = run(*some, sites, name) if kept else ([], [])
    found = list(zip(kept, outputs, strict=True))
    kinds = [
      UNCHANGED if text == before[place] else SOURCE if text == wanted[place] else ELSE
      for place, text in found
    ]
    as_source = [_equal(text, references[place]) for place, text in found]
    return Outcome(np.array(kinds, "U16"), np.array(as_source, bool))

  controls = [others[pair] for pair in pairs]
  return Patches(
    [pairs[place] for place in kept],
    len(pairs) - len(kept),
    sum(right),
    {name: outcome(name, sites, sources) for name, sites in groups.items()},
    {name: outcome(f"{name}, control", sites, controls) for name, sites in groups.items()},
  )


def _equal(output: str, reference: str) -> bool:
  """Whether an output is right as a whole."""
  return output.split() == reference.split()
