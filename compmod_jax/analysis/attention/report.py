"""The report on attention: options of the analysis, and its page."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from compmod_jax.analysis.attention import figures
from compmod_jax.analysis.attention.measure import Weights, attention_modules, read_attention
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.api import AnsweringModel, TranslationModel, model_of
from compmod_jax.core import errors
from compmod_jax.core.sharding import fetch
from compmod_jax.data.qa.typed_lines import typed_question

_COLUMNS = (
  "text",
  "module",
  "head",
  "query",
  "query word",
  "key",
  "key word",
  "attention",
  "router",
)


@dataclasses.dataclass(frozen=True)
class Attention:
  """Where every attention head looks in single texts, token by token, and the router's weight of
  each head beside it."""

  of_splits: ClassVar[bool] = False  # it reads what it is given, and nothing of the data

  text: tuple[str, ...] = ()
  """Texts; for a translation model source sentences, for one that answers questions "passage |
  question (1) a (2) b"."""
  target: tuple[str, ...] = ()
  """Translations of these sentences, one for each; none: the model's own."""
  module: tuple[str, ...] = ()
  """Attention modules that are drawn, such as decoder/layer_0/cross; none: all."""

  def __post_init__(self):
    errors.check(bool(self.text), "There is nothing to read; give --text.")
    errors.check(
      len(self.target) in (0, len(self.text)),
      f"--target has {len(self.target)} texts and --text {len(self.text)}; give a translation for"
      " each sentence, or none.",
    )

  def measure(self, subject: Subject) -> list[dict[str, Weights]]:
    """The attention on every text: module -> its weights.

    Raises:
      UserError: the model has no attention or no such module, or a text cannot be read.
    """
    # Single texts are not laid over devices.
    model = model_of(subject.task, jax.device_put(fetch(subject.params)))
    errors.check(
      not self.target or isinstance(model, TranslationModel),
      "--target is of translation models; leave it out for this one.",
    )
    given: Sequence[Any] = self.text
    if self.target:
      given = list(zip(self.text, self.target, strict=True))
    elif isinstance(model, AnsweringModel):
      given = [typed_question(text) for text in self.text]
    known = attention_modules(model)
    errors.check(bool(known), "The model has no attention, so there is nothing to draw.")
    modules = list(self.module) or known
    for module in modules:
      errors.check_choice("--module", module, known)
    found = []
    for number, text in enumerate(given):
      found.append(read_attention(model, text, modules))
      subject.status("texts", number + 1, len(self.text))
    return found


def make_page(settings: Attention, subject: Subject, found: Sequence[dict[str, Weights]]) -> Page:
  """The attention on every text, drawn; and all of it as a table."""
  sections, rows = [], []
  for number, (text, read) in enumerate(zip(settings.text, found, strict=True)):
    sections.append(Section(text, list(_pictures(number, read))))
    rows += [row for weights in read.values() for row in _rows(number, weights)]
  table = Table("attention", _COLUMNS, rows, shown=False)
  sections.append(Section("All weights", [table], ["attention.csv has every weight drawn."]))
  modules = list(found[0])
  return Page(
    "Attention",
    f"{subject.task.describe()} Rows: the token that looks; columns: the token that it looks at."
    " A decoder's row is the token that it has read, from which it predicts the next one.",
    [f"{len(modules)} attention modules of {len(settings.text)} texts."],
    sections,
    {"texts": list(settings.text), "targets": list(settings.target), "modules": modules},
  )


def _pictures(number: int, read: dict[str, Weights]) -> Iterator[Picture]:
  """The figures of a text with their captions."""
  for module, weights in read.items():
    caption = f"{module}: attention of every head; {_sums(weights.attention)}"
    if weights.router is not None:
      caption += " Orange: the router's weight of the head at that token."
    yield Picture(
      f"text_{number}_{module.replace('/', '_')}", figures.attention_figure(weights), caption
    )


def _sums(attention: np.ndarray) -> str:
  """What the weights of a query add up to: in geometric and differential attention to less than 1,
  and the latter's may be negative."""
  if attention.min() >= 0 and np.allclose(attention.sum(-1), 1, atol=1e-2):
    return "rows sum to 1."
  below = "; weights below 0 are drawn as 0" if attention.min() < 0 else ""
  return f"rows do not sum to 1 in this form of attention{below}."


def _rows(number: int, weights: Weights) -> Iterator[tuple[Any, ...]]:
  """Every weight of a module on a text."""
  for (head, query, key), value in np.ndenumerate(weights.attention):
    router = None if weights.router is None else float(weights.router[query, head])
    words = query, weights.queries[query], key, weights.keys[key]
    yield (number, weights.module, head, *words, float(value), router)
