"""Diagnostic classifiers: what can be predicted linearly from a recurrent model's hidden states.

A logistic classifier of the number of a sentence's subject reads the hidden state at every token.
Beside it stands a control task (Hewitt and Liang 2019): the same classifier is asked for a label
that was drawn at random for every word type, which can only be learned by heart; what it does
better on the real task is in the states rather than in the classifier. A classifier that was
trained here is what recoding by weak supervision lowers the loss of (Ulmer 2019, section 4.2).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from compmod_jax.analysis.minimal_pairs import wilson
from compmod_jax.analysis.report.page import Page, Section, Table
from compmod_jax.analysis.subject import Subject, drawn, others
from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import UserError, check
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.tasks.language_model import LanguageModel

_CHUNK = 256  # sentences that go through the model at once


class Probe(NamedTuple):
  """A logistic classifier: the logit of label 1 is `weight . state + bias`."""

  weight: np.ndarray
  bias: float

  def logits(self, states: np.ndarray) -> np.ndarray:
    """Of states [n, dim]."""
    return states @ self.weight + self.bias


class Tokens(NamedTuple):
  """Hidden states of all tokens of some sentences, and what is known of each token.

  Attributes:
    states: [tokens, dim].
    label: of its sentence, 0 or 1.
    place: in its sentence, from 0.
    word: token number.
    sentence: number of its sentence.
  """

  states: np.ndarray
  label: np.ndarray
  place: np.ndarray
  word: np.ndarray
  sentence: np.ndarray


class Probed(NamedTuple):
  """A classifier and the tokens it was tested on.

  Attributes:
    site: that it reads.
    probe: the classifier.
    training: how many sentences the classifier was trained on.
    test: tokens of the subject's split.
    by_chance: whether the control task is solved, bool [tokens].
  """

  site: str
  probe: Probe
  training: int
  test: Tokens
  by_chance: np.ndarray


@dataclasses.dataclass(frozen=True)
class ProbeNumber:
  """Whether the number of the subject can be predicted from hidden states: a logistic classifier at
  every token, beside a control task, by place and by attractors; for data with gold numbers."""

  layer: int = -1
  """Layer whose hidden state is read; -1: the last one."""
  training: int = 2000
  """Training sentences of the classifier."""
  penalty: float = 1e-3
  """Weight of the squared norm of the classifier, relative to the mean loss."""
  places: int = 12
  """Number of first positions with an accuracy of their own."""

  def __post_init__(self):
    check_least(self, "--", training=10)
    check(self.penalty > 0, f"--penalty is {self.penalty}; it must be positive.")

  def measure(self, subject: Subject) -> Probed:
    """Trains the classifier on the training split and tests it on the subject's; where that is the
    training split, too, on other sentences of it.

    Raises:
      UserError: the model is no recurrent language model, its data have no gold numbers, or the
        subject has all training sentences.
    """
    task = subject.task
    if not isinstance(task, LanguageModel):
      raise UserError("The model is no recurrent language model; this classifier reads those.")
    layers = task.model.config.layers
    check(
      -layers <= self.layer < layers,
      f"--layer is {self.layer}, but the model has {layers}; give {-layers} to {layers - 1}.",
    )
    site = f"layer_{self.layer % layers}/hidden"
    test = read_tokens(task, subject, subject.split, site, subject.sentences)
    without = np.unique(test.sentence) if subject.split == "train" else ()
    train = read_tokens(task, subject, "train", site, self.training, without)
    probe = fit(train.states, train.label, self.penalty)
    control = _control_labels(task.dataset.tokenizer.vocab_size, subject.seed)
    other = fit(train.states, control[train.word], self.penalty)
    by_chance = (other.logits(test.states) > 0) == (control[test.word] > 0)
    return Probed(site, probe, len(np.unique(train.sentence)), test, by_chance)


def make_page(settings: ProbeNumber, subject: Subject, found: Probed) -> Page:
  """How well the classifier does, by position and by attractors."""
  site, probe, training, test, by_chance = found
  task = subject.task
  assert isinstance(task, LanguageModel)
  right = (probe.logits(test.states) > 0) == (test.label > 0)
  rows = [_row("all", right, by_chance)]
  for place in range(settings.places):
    here = test.place == place
    if here.any():
      rows.append(_row(f"token {place}", right[here], by_chance[here]))
  attractors = _attractors(subject, test)
  if attractors is not None:
    last = np.append(np.diff(test.sentence) != 0, True)
    for count in np.unique(attractors):
      here = attractors == count
      rows.append(_row(f"{count} attractors", right[here], by_chance[here]))
      end = here & last
      rows.append(_row(f"{count} attractors, last token", right[end], by_chance[end]))
  columns = ("tokens", "number", "accuracy", "low", "high", "control task", "selectivity")
  majority = max(float(np.mean(test.label)), 1 - float(np.mean(test.label)))
  return Page(
    title=f"The subject's number in the hidden states, on {subject.split}",
    description=f"{task.describe()} A logistic classifier of {site}, trained on"
    f" {training:,} training sentences, at every token.",
    summary=[
      f"The classifier is right at {100 * float(np.mean(right)):.1f} % of tokens; the larger class"
      f" has {100 * majority:.1f} %.",
      "The control task, a label drawn at random for every word type, is solved at"
      f" {100 * float(np.mean(by_chance)):.1f} % of tokens: selectivity"
      f" {100 * float(np.mean(right) - np.mean(by_chance)):+.1f} points.",
    ],
    sections=[Section("Accuracy", [Table("accuracy", columns, rows, "With 95 % intervals.")])],
    data={
      "site": site,
      "tokenizer": task.dataset.tokenizer.fingerprint,
      "classifier": {"weight": probe.weight.tolist(), "bias": probe.bias},
      "accuracy": [dict(zip(columns, row, strict=True)) for row in rows],
    },
  )


def _row(name: str, right: np.ndarray, control: np.ndarray) -> list[Any]:
  share = float(np.mean(right))
  low, high = wilson(share, len(right))
  by_chance = float(np.mean(control))
  return [name, len(right), share, low, high, by_chance, share - by_chance]


def read_tokens(
  task: LanguageModel,
  subject: Subject,
  split: str,
  site: str,
  sentences: int,
  without: Sequence[int] | np.ndarray = (),
) -> Tokens:
  """Hidden states at a site, while the model reads sentences one by one.

  Args:
    task: the language model's.
    subject: parameters, seed and display.
    split: whose sentences.
    site: of the hidden states.
    sentences: how many, drawn at random; 0: all.
    without: numbers of sentences that are not among them.
  """
  texts, labels = list(task.dataset.config.data.load(split)), np.asarray(task.dataset.labels(split))
  every = np.arange(len(texts))
  every = others(every, np.asarray(without)) if len(without) else every
  chosen = drawn(every, sentences, subject.seed)
  read = jax.jit(lambda params, batch: _captured(task, params, batch, site))
  parts: list[Tokens] = []
  for start in range(0, len(chosen), _CHUNK):
    numbers = chosen[start : start + _CHUNK]
    batch = task.generator.scorer.batch([texts[i] for i in numbers])
    states = np.asarray(read(subject.params, batch))
    rows, places = np.nonzero(np.asarray(batch["counted"]))
    words = np.asarray(batch["tokens"])[rows, places]
    # The state at a place has read the token there; the first is the end token before the text.
    kept = places > 0
    rows, places, words = rows[kept], places[kept], words[kept]
    parts.append(
      Tokens(states[rows, places], labels[numbers[rows]], places - 1, words, numbers[rows])
    )
    subject.status(f"states on {split}", min(start + _CHUNK, len(chosen)), len(chosen))
  return Tokens(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _captured(
  task: LanguageModel, params: PyTree, batch: Mapping[str, Any], site: str
) -> jax.Array:
  intermediates = Intermediates(capture=frozenset([site]))
  task.model.forward(params, batch, intermediates=intermediates)
  return intermediates.captured[site]


def _attractors(subject: Subject, test: Tokens) -> np.ndarray | None:
  """Attractors of every token's sentence; None where the data do not say."""
  counts: Sequence[int] | None = subject.task.dataset.config.data.attractors(subject.split)
  return None if counts is None else np.asarray(counts)[test.sentence]


def _control_labels(vocab: int, seed: int) -> np.ndarray:
  """A random label for every word type."""
  return np.random.default_rng([seed, 1]).integers(2, size=vocab)


def fit(states: np.ndarray, labels: np.ndarray, penalty: float, steps: int = 30) -> Probe:
  r"""Logistic regression by Newton's method.

  .. math:: \min_{w, b} \frac{1}{n} \sum_i \ln(1 + e^{z_i}) - y_i z_i + \frac{\lambda}{2} \|w\|^2,
     \qquad z_i = w \cdot h_i + b

  Args:
    states: [n, dim].
    labels: 0 or 1, [n].
    penalty: lambda.
    steps: most Newton steps.
  """
  x = np.concatenate([states, np.ones((len(states), 1))], axis=1).astype(np.float64)
  ridge = np.full(x.shape[1], penalty)
  ridge[-1] = 1e-9  # the bias is free
  w = np.zeros(x.shape[1])
  for _ in range(steps):
    p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
    gradient = x.T @ (p - labels) / len(x) + ridge * w
    curvature = (x * (p * (1 - p))[:, None]).T @ x / len(x) + np.diag(ridge)
    change = np.linalg.solve(curvature, gradient)
    w = w - change
    if np.abs(change).max() < 1e-8:
      break
  return Probe(w[:-1].astype(np.float32), float(w[-1]))
