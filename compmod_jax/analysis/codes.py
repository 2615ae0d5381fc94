"""What routers know: whether their weights at a token tell the function that it has.

A token's weights on the heads (or experts) of all modules that read its text are its code. A linear
classifier is trained to read an annotation of words from it, on training sentences, and is asked
about other sentences. Beside it stand a classifier of the residual stream; the commonest label of
the word, which needs no code; and a control task (Hewitt and Liang 2019), a label that was drawn at
random for every word type and can only be learned by heart.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy import optimize, special

from compmod_jax.analysis.minimal_pairs import wilson
from compmod_jax.analysis.reading import NOTHING, Reader, read_sentence, reader
from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.bounds import check_least
from compmod_jax.core.intermediates import Intermediates
from compmod_jax.core.types import Params
from compmod_jax.tasks.base import Batch

_ROUTER = "router/weights"
_CODES = (_ROUTER, "head_gates", "head_code")
ALL, STREAM, WORD = "all codes", "residual stream", "word alone"


@dataclasses.dataclass(frozen=True)
class Codes:
  """Whether the weights of routers and gates at a token tell its function in the sentence: linear
  classifiers of every module's weights, beside one of the residual stream and a control task, on
  training and on other sentences; for data whose words are annotated."""

  annotations: tuple[str, ...] = ()
  """Names of annotations, such as order_source; none: all of words that the data have."""
  training: int = 1000
  """Training sentences of the classifiers."""
  penalty: float = 1e-4
  """Weight of the squared norm of a classifier, relative to the mean loss."""

  def __post_init__(self):
    check_least(self, "--", training=10)
    errors.check(self.penalty > 0, f"--penalty is {self.penalty}; it must be positive.")

  def measure(self, subject: Subject) -> "list[Probed]":
    """Trains the classifiers on the training split and tests them on the subject's; where that is
    the training split, too, on other sentences of it.

    Raises:
      UserError: nothing competes or is gated in the model, words have no such annotation, or the
        subject has all training sentences.
    """
    reads = reader(subject.task)
    train = subject.of_training(self.training)
    names = self._annotations(reads, subject)
    found = []
    for stream in reads.streams:
      here = [name for name in names if name.endswith(f"_{stream}")]
      sites = code_sites(subject, reads, stream)
      if here and sites:
        layers = layer_sites(subject, reads, stream)
        sites |= {STREAM: layers[-1]} if layers else {}
        read, asked = (read_tokens(one, reads, stream, sites, here) for one in (train, subject))
        found += [
          _probe(name, read, asked, self.penalty, subject.seed, len(train.numbers)) for name in here
        ]
    errors.check(
      found,
      f"The annotations {', '.join(names)} are of words at which nothing competes or has gates in"
      " this model. Choose a model whose heads compete or have gates where these words are read.",
    )
    return found

  def _annotations(self, reads: Reader, subject: Subject) -> list[str]:
    """Names of the annotations that are classified."""
    known = [
      name
      for name, value in reads.info(subject.split, int(subject.numbers[0])).items()
      if not isinstance(value, str)
      and isinstance(value, Sequence)
      and name.rpartition("_")[2] in reads.streams
    ]
    errors.check(
      known,
      f"The data of {subject.task.dataset.config.data!r} annotate no words; their `info` needs a"
      " sequence of labels, one for each word, under a name that ends in"
      f" _{' or _'.join(reads.streams)}.",
    )
    for name in self.annotations:
      errors.check_choice("--annotations", name, known)
    return list(self.annotations or known)


class Tokens(NamedTuple):
  """All tokens of some sentences that have a label.

  Attributes:
    features: name of a module, or `ALL`, or `STREAM` -> [tokens, dim].
    word: of each, lower case, [tokens].
    labels: name of an annotation -> label of each, [tokens].
  """

  features: dict[str, np.ndarray]
  word: np.ndarray
  labels: dict[str, np.ndarray]


class Share(NamedTuple):
  """A share of right answers and its 95 % interval."""

  share: float
  low: float
  high: float
  count: int

  @classmethod
  def of(cls, right: np.ndarray) -> "Share":
    """Of right and wrong answers; NaN for none."""
    if not len(right):
      return cls(float("nan"), float("nan"), float("nan"), 0)
    share = float(np.mean(right))
    low, high = wilson(share, len(right))
    return cls(share, low, high, len(right))


class Reading(NamedTuple):
  """How well a classifier reads labels.

  Attributes:
    train: on the sentences that it was trained on.
    test: on others.
    new: on those of these tokens whose word never had the label in training.
  """

  train: Share
  test: Share
  new: Share


class Probed(NamedTuple):
  """What is known of an annotation.

  Attributes:
    annotation: its name.
    classes: how many labels there are.
    by_word: the commonest label of each word in training, as an answer.
    readings: features -> how well they tell it; modules in the model's order, then all, then the
      residual stream.
    controls: features -> share of right answers in the control task, on the other sentences.
    training: how many sentences classifiers were trained on.
  """

  annotation: str
  classes: int
  by_word: Reading
  readings: dict[str, Reading]
  controls: dict[str, Share]
  training: int


def code_sites(subject: Subject, reads: Reader, stream: str) -> dict[str, str]:
  """Router's module, or site of gates or codes -> site, of those that read a stream, in the model's
  order."""
  return {
    site.removesuffix(f"/{_ROUTER}"): site
    for site in _sites(subject, reads, stream)
    if site.endswith(tuple(f"/{code}" for code in _CODES))
  }


def layer_sites(subject: Subject, reads: Reader, stream: str) -> list[str]:
  """The residual stream after every layer that reads a stream, in the model's order."""
  sites = _sites(subject, reads, stream)
  return [site for site in sites if site.endswith("/output") and "layer_" in site]


def _sites(subject: Subject, reads: Reader, stream: str) -> list[str]:
  return [
    site for site in sorted(subject.shapes, key=style.site_order) if reads.stream(site) == stream
  ]


def read_tokens(
  subject: Subject, reads: Reader, stream: str, sites: Mapping[str, str], annotations: Sequence[str]
) -> Tokens:
  """Codes and labels of the subject's sentences.

  Args:
    subject: model, split and which of its sentences.
    reads: how to read its tokens.
    stream: which of its texts.
    sites: features -> site of a code [batch, time, units], or of a code of every key
      [batch, heads, queries, keys], whose mean over the keys that a query reads is taken.
    annotations: of words, that are kept.
  """

  @jax.jit
  def run(params: Params, batch: Batch) -> dict[str, jax.Array]:
    intermediates = Intermediates(capture=frozenset(sites.values()))
    subject.task.model.forward(params, batch, intermediates=intermediates)
    found = {name: intermediates.captured[site] for name, site in sites.items()}
    return {name: mean_over_keys(x) if x.ndim == 4 else x for name, x in found.items()}

  features: dict[str, list[np.ndarray]] = {name: [] for name in sites}
  words: list[str] = []
  labels: dict[str, list[str]] = {name: [] for name in annotations}
  tokenizer = reads.tokenizer(stream)
  for done, batch in enumerate(subject.batches):
    captured = jax.device_get(run(subject.params, subject.place(batch)))
    ids = reads.tokens(stream, batch)
    for row, number in enumerate(np.asarray(batch["index"]).tolist()):
      if number < 0:
        continue
      sentence = read_sentence(tokenizer, ids[row].tolist())
      info = reads.info(subject.split, number)
      places = [
        place
        for place, word in enumerate(sentence.word)
        if word != NOTHING and all(word < len(info[name]) for name in annotations)
      ]
      words += [sentence.words[sentence.word[place]].lower() for place in places]
      for name in annotations:
        labels[name] += [str(info[name][sentence.word[place]]) for place in places]
      for name, value in captured.items():
        features[name].append(np.asarray(value[row, places], np.float64))
    subject.status(f"codes on {subject.split}", done + 1, len(subject.batches))
  joined = {name: np.concatenate(parts) for name, parts in features.items()}
  modules = [value for name, value in joined.items() if name != STREAM]
  stream_features = {STREAM: joined.pop(STREAM)} if STREAM in joined else {}
  every = {ALL: np.concatenate(modules, axis=1)} if len(modules) > 1 else {}
  return Tokens(
    joined | every | stream_features,
    np.array(words),
    {name: np.array(value) for name, value in labels.items()},
  )


def mean_over_keys(
  code: Float[Array, "batch heads queries keys"],
) -> Float[Array, "batch queries heads"]:
  """Mean over the keys that a query reads: codes of others, such as padding, are 0 in all heads."""
  read = jnp.any(code != 0, axis=1, keepdims=True)
  mean = jnp.sum(code, axis=-1) / jnp.maximum(jnp.sum(read, axis=-1), 1)
  return jnp.moveaxis(mean, 1, 2)


def _probe(
  annotation: str, train: Tokens, test: Tokens, penalty: float, seed: int, sentences: int
) -> Probed:
  wanted, asked = train.labels[annotation], test.labels[annotation]
  classes = np.unique(wanted)
  pairs = set(zip(train.word.tolist(), wanted.tolist(), strict=True))
  new = np.array(
    [pair not in pairs for pair in zip(test.word.tolist(), asked.tolist(), strict=True)], bool
  )
  chance = np.random.default_rng([seed, 1])
  # As many labels as the task has, as frequent as there; one for every word type.
  types = np.unique(np.concatenate([train.word, test.word]))
  drawn = dict(zip(types.tolist(), chance.choice(wanted, len(types)), strict=True))
  control, asked_control = (
    np.array([drawn[word] for word in tokens.word.tolist()]) for tokens in (train, test)
  )
  readings, controls = dict[str, Reading](), dict[str, Share]()
  for name in train.features:
    given, others = train.features[name], test.features[name]
    answers = classify(given, wanted, [given, others], penalty)
    by_heart = classify(given, control, [others], penalty)[0]
    readings[name] = Reading(
      Share.of(answers[0] == wanted),
      Share.of(answers[1] == asked),
      Share.of((answers[1] == asked)[new]),
    )
    controls[name] = Share.of(by_heart == asked_control)
  commonest = _commonest(train.word, wanted)
  answers = [
    np.array([commonest.get(word, classes[0]) for word in tokens.word.tolist()])
    for tokens in (train, test)
  ]
  by_word = Reading(
    Share.of(answers[0] == wanted),
    Share.of(answers[1] == asked),
    Share.of((answers[1] == asked)[new]),
  )
  return Probed(annotation, len(classes), by_word, readings, controls, sentences)


def _commonest(words: np.ndarray, labels: np.ndarray) -> dict[str, str]:
  """Word -> its commonest label, the first in order of several."""
  found = {}
  for word in np.unique(words).tolist():
    names, counts = np.unique(labels[words == word], return_counts=True)
    found[word] = str(names[np.argmax(counts)])
  return found


def classify(
  given: np.ndarray, labels: np.ndarray, asked: Sequence[np.ndarray], penalty: float
) -> list[np.ndarray]:
  r"""Answers of multinomial logistic regression.

  .. math:: \min_{W, b} -\frac{1}{n} \sum_i \ln \mathrm{softmax}(W x_i + b)_{y_i}
     + \frac{\lambda}{2} \|W\|^2

  Features are brought to mean 0 and variance 1 first, those without variance to 0.

  Args:
    given: features of the training tokens, [n, dim].
    labels: theirs, [n].
    asked: features of tokens whose labels are wanted, [tokens, dim] each.
    penalty: lambda.

  Returns:
    A label for each of them.
  """
  classes, y = np.unique(labels, return_inverse=True)
  mean, deviation = given.mean(axis=0), given.std(axis=0)
  scale = np.where(deviation > 1e-12, 1 / np.maximum(deviation, 1e-12), 0)
  x, count = (given - mean) * scale, len(given)
  shape = (x.shape[1] + 1, len(classes))

  def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
    w = flat.reshape(shape)
    log = special.log_softmax(x @ w[:-1] + w[-1], axis=1)
    error = np.exp(log)
    error[np.arange(count), y] -= 1
    gradient = np.concatenate([x.T @ error, error.sum(axis=0)[None]]) / count
    gradient[:-1] += penalty * w[:-1]
    value = -log[np.arange(count), y].mean() + penalty / 2 * float(np.square(w[:-1]).sum())
    return value, gradient.ravel()

  found = optimize.minimize(
    loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 200}
  ).x.reshape(shape)
  return [
    classes[np.argmax((one - mean) * scale @ found[:-1] + found[-1], axis=1)] for one in asked
  ]


# The report.

_COLUMNS = (
  "read from", "training", "test", "low", "high", "new uses", "new tokens", "control task",
  "selectivity",
)  # fmt: skip


def make_page(settings: Codes, subject: Subject, found: list[Probed]) -> Page:
  """How well every annotation is read from every module."""
  sections, summary, data = [], [], []
  for one in found:
    rows = list(_rows(one))
    table = Table(
      one.annotation,
      _COLUMNS,
      rows,
      f"Share of right answers, {one.classes} classes. New uses: test tokens whose word never has"
      " the label in the training sentences. Selectivity: test less control task.",
    )
    sections.append(Section(one.annotation.replace("_", " "), [_picture(one), table]))
    name = ALL if ALL in one.readings else next(iter(one.readings))
    summary.append(
      f"{one.annotation}: {100 * one.readings[name].test.share:.1f} % from the codes,"
      f" {100 * one.by_word.test.share:.1f} % from the word alone; the control task"
      f" {100 * one.controls[name].share:.1f} %."
    )
    data.append(
      {
        "annotation": one.annotation,
        "classes": one.classes,
        WORD: _as_json(one.by_word),
        "readings": {
          name: _as_json(reading) | {"control": one.controls[name]._asdict()}
          for name, reading in one.readings.items()
        },
      }
    )
  return Page(
    title=f"What codes tell of a word's function, on {subject.split}",
    description=f"{subject.task.describe()} Linear classifiers, trained on {found[0].training:,}"
    " training sentences.",
    summary=summary,
    sections=sections,
    data={"annotations": data},
  )


def _rows(one: Probed) -> Iterator[list[Any]]:
  for name, reading in (*one.readings.items(), (WORD, one.by_word)):
    test, control = reading.test, one.controls.get(name)
    yield [
      name if name in (ALL, STREAM, WORD) else style.site_title(name),
      reading.train.share,
      test.share,
      test.low,
      test.high,
      reading.new.share if reading.new.count else None,
      reading.new.count,
      None if control is None else control.share,
      None if control is None else test.share - control.share,
    ]


def _as_json(reading: Reading) -> dict[str, Any]:
  return {
    name: share._asdict() if share.count else None for name, share in reading._asdict().items()
  }


def _picture(one: Probed) -> Picture:
  figure: Figure = style.canvas(style.WIDTH, 0.9 + 0.28 * len(one.readings))
  axes = figure.add_subplot()
  names = list(one.readings)
  places = np.arange(len(names))
  tests = {name: reading.test for name, reading in one.readings.items()}
  for number, (label, of) in enumerate((("test", tests), ("control task", one.controls))):
    shares = [of[name] for name in names]
    values = np.array([share.share for share in shares])
    spread = np.abs(np.array([(share.low, share.high) for share in shares]).T - values)
    axes.errorbar(
      values, places, xerr=spread, fmt="o" if number == 0 else "s", markersize=4,
      color=style.PALETTE[number], label=label, linewidth=1,
    )  # fmt: skip
  axes.axvline(one.by_word.test.share, color=style.MUTED, linewidth=1, label=f"{WORD}, test")
  titles = [name if name in (ALL, STREAM) else style.site_title(name) for name in names]
  axes.set_yticks(places, titles)
  axes.invert_yaxis()
  axes.set_xlim(0, 1.02)
  axes.legend(fontsize=style.SMALL, frameon=False, loc="lower left")
  style.label(axes, "", "share of right answers", "")
  style.finish(figure, f"{one.annotation.replace('_', ' ')}: what tells it")
  return Picture(
    one.annotation,
    figure,
    "Right answers of linear classifiers on sentences that they were not trained on, with 95 %"
    " intervals; squares: the control task; line: the commonest label of the word.",
  )
