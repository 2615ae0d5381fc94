"""What the analysis of composition measures, and on which pairs of sentences."""

import dataclasses
from typing import NamedTuple

import numpy as np

from compmod_jax.analysis.codes import ALL, STREAM, code_sites, layer_sites
from compmod_jax.analysis.composition.homomorphism import (
  Errors,
  homomorphism_errors,
  representations,
)
from compmod_jax.analysis.composition.pairs import disjoint, pairs_of, read_tokens
from compmod_jax.analysis.composition.patching import Patches, Sites, other_words, patch
from compmod_jax.analysis.reading import Reader, reader
from compmod_jax.analysis.report import style
from compmod_jax.analysis.scoring import translates
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors

EVERYWHERE = f"{ALL}, at every word"


class Composed(NamedTuple):
  """What is known of composition.

  Attributes:
    names: token -> its text.
    pairs: how many pairs of sentences differ in one word, none in two pairs.
    patches: what patching does.
    errors: name of a layer's residual stream -> squared errors of exchanging words there.
    training: how many pairs of training sentences operations were estimated from.
  """

  names: dict[int, str]
  pairs: int
  patches: Patches
  errors: dict[str, Errors]
  training: int


@dataclasses.dataclass(frozen=True)
class Composition:
  """Whether words can be exchanged inside a sequence-to-sequence model as they can in a sentence:
  on pairs of sentences that differ in one word, patching of routers' weights, gates and codes, and
  the homomorphism error of the encoder's residual stream."""

  pairs: int = 200
  """Pairs of sentences that are patched and decoded; 0: all that are found."""
  training: int = 5000
  """Training sentences among which pairs are looked for, to estimate what exchanging a word does;
  0: all."""

  def __post_init__(self):
    for field in ("pairs", "training"):
      value = getattr(self, field)
      errors.check(value >= 0, f"--{field} is {value}; it must not be negative.")

  def measure(self, subject: Subject) -> Composed:
    """Finds pairs in the subject's split and in other training sentences, and measures both.

    Raises:
      UserError: the task is not one of sentence pairs, no two sentences differ in one word, or the
        subject has all training sentences.
    """
    reads = reader(subject.task)
    errors.check(
      translates(subject, reads),
      f"The task is a {type(subject.task).__name__}; composition is measured where one text is made"
      " from another, as in translation.",
    )
    tokenizer, chance = reads.tokenizer(reads.streams[0]), np.random.default_rng(subject.seed)
    sentences = read_tokens(subject, reads)
    pairs = disjoint(pairs_of(sentences, chance))
    turned = [pair.turned() if chance.integers(2) else pair for pair in pairs]
    others = other_words(sentences, turned, tokenizer.eos, chance)
    errors.check(
      others,
      f"No two of the {len(sentences)} sentences of {subject.split} that were read differ in one"
      " word, and have a third for the control; read more (--sentences), or choose another split.",
    )
    layers = layer_sites(subject, reads, reads.streams[0])
    train = subject.of_training(self.training)
    known = pairs_of(read_tokens(train, reads), chance)
    found = dict[str, Errors]()
    if known and layers:
      before = representations(train, layers, known)
      after = representations(subject, layers, pairs)
      found = {site: homomorphism_errors(before[site], after[site], chance) for site in layers}
    chosen = dict(list(others.items())[: self.pairs or None])
    patches = patch(subject, reads, sentences, chosen, replaced(subject, reads, layers))
    names = {word for pair in pairs for word in pair.words}
    texts = {word: tokenizer.text_of(word).strip() for word in sorted(names)}
    named = {layer_name(site): one for site, one in found.items()}
    return Composed(texts, len(pairs), patches, named, len(known))


def replaced(subject: Subject, reads: Reader, layers: list[str]) -> dict[str, Sites]:
  """What is patched together, by name: every module's codes, all of them, the residual stream."""
  codes = code_sites(subject, reads, reads.streams[0])
  groups = {style.site_title(name): Sites((site,)) for name, site in codes.items()}
  if codes:
    every = tuple(codes.values())
    groups |= {ALL: Sites(every)} if len(every) > 1 else {}
    groups[EVERYWHERE] = Sites(every, everywhere=True)
  return groups | {layer_name(site): Sites((site,)) for site in layers}


def layer_name(site: str) -> str:
  """What the residual stream after a layer is called."""
  return f"{STREAM}, {style.site_title(site.removesuffix('/output'))}"
