"""Answers from the words that question, options and passage share.

Baselines of reading comprehension: the sliding window, alone and with the distance of words, which
is not trained, and a logistic regression on counts of shared words.
"""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from scipy import optimize, sparse

from compmod_jax.core.errors import check
from compmod_jax.data.qa.question import Format, Question

_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
STOP_WORDS = frozenset(
  _WORD.findall(
    """
    a an the and or but if of in on at to for from by with as up down out off over about into after
    before is are was were be been being am do does did doing have has had having can could will
    would shall should may might must i you he she it we they me him her us them my your his its our
    their mine yours hers ours theirs this that these those who whom whose which what where when why
    how not no nor so than then there too very just s t
    """
  )
)
"""what the distance of an option's words from a question's does not look at"""
_LONGEST_SPAN = 2  # words of a candidate answer of an extractive question
STRENGTHS = (0.1, 1.0, 10.0)
"""of the penalty, to choose from on validation questions"""


def words_of(text: str) -> list[str]:
  """The words of a text in lower case, without punctuation."""
  return _WORD.findall(text.lower())


def sliding_window(question: Question) -> str:
  r"""The option whose words, with those of the question, are most in one window of the passage.

  .. math:: \mathrm{sw}_i = \max_j \sum_{w = 1}^{|S|} \mathrm{ic}(P_{j + w}) [P_{j + w} \in S],
            \qquad \mathrm{ic}(w) = \log(1 + 1 / c(w))

  for S the set of words of question and option i, P the words of the passage and c(w) how often the
  passage has w. Ties go to the first option.

  Args:
    question: of multiple choice.

  Returns:
    The answer as a model writes it, such as `(2)`.

  Raises:
    UserError: the question is of another format.

  Source: Richardson et al. 2013, algorithm 1.
  """
  return _best_option(_window_scores(question))


def window_and_distance(question: Question) -> str:
  r"""The sliding window, less the distance of an option's words from those of the question.

  .. math:: \mathrm{sw}_i - d_i, \qquad
            d_i = \frac{1}{|P| - 1} \min_{q \in S_q, a \in S_i} d_P(q, a)

  for S_q the words of the question that the passage has, S_i those of option i that it has and the
  question has not, both without stop words, and d_P(q, a) how many places the nearest occurrences
  of q and a in the passage are apart. Where either set is empty, d is 1. Ties go to the first
  option.

  Args:
    question: of multiple choice.

  Returns:
    The answer as a model writes it, such as `(2)`.

  Raises:
    UserError: the question is of another format.

  Source: Richardson et al. 2013, algorithms 2 and 3. Their list of stop words is another one.
  """
  return _best_option(_window_scores(question) - _distances(question))


def _best_option(scores: np.ndarray) -> str:
  # Rounding must not decide between equal windows.
  return f"({int(np.argmax(scores.round(9))) + 1})"


def _window_scores(question: Question) -> np.ndarray:
  """[option]"""
  check(
    question.format == "multiple_choice",
    f"format is {question.format!r}; the sliding window chooses among options: give it questions of"
    " multiple choice.",
  )
  passage = words_of(question.passage)
  counts = collections.Counter(passage)
  asked = set(words_of(question.question))
  scores = []
  for option in question.options:
    wanted = asked | set(words_of(option))
    weights = [np.log1p(1 / counts[word]) if word in wanted else 0.0 for word in passage]
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    # A window at the end of the passage is a shorter one.
    ends = np.minimum(np.arange(len(passage)) + len(wanted), len(passage))
    scores.append(float((sums[ends] - sums[: len(passage)]).max(initial=0.0)))
  return np.asarray(scores)


def _distances(question: Question) -> np.ndarray:
  """[option], each from 0 to 1"""
  passage = words_of(question.passage)
  asked = set(words_of(question.question))
  places: dict[str, list[int]] = {}
  for place, word in enumerate(passage):
    places.setdefault(word, []).append(place)
  ours = [place for word in asked - STOP_WORDS for place in places.get(word, ())]
  found = []
  for option in question.options:
    words = set(words_of(option)) - asked - STOP_WORDS
    theirs = [place for word in words for place in places.get(word, ())]
    apart = np.abs(np.subtract.outer(ours, theirs))
    found.append(float(apart.min()) / (len(passage) - 1) if apart.size else 1.0)
  return np.asarray(found)


class Regression:
  r"""Logistic regression on counts of shared words: which candidate is the answer.

  .. math:: p(i) = \frac{\exp(w^\top x_i)}{\sum_j \exp(w^\top x_j)}, \qquad
            \min_w \sum -\log p(\mathrm{right}) + \frac{\lambda}{2} |w|^2

  over the candidates i of a question: its options; yes and no; one or two words of the passage, and
  no answer. Features of a candidate (bags of words, nothing of their order but which sentence is
  last): how many of its words are in the passage, in the question, in the last sentence, in the
  sentence that shares most words with the question, together with those; each of these with the
  first words of the question and with its length; for yes/no which words the question has, and
  whether some sentence has all but few of its words.

  Args:
    strength: of the penalty, lambda.
  """

  def __init__(self, strength: float = 1.0):
    check(strength > 0, f"strength is {strength}; the penalty must be above 0.")
    self.strength = strength
    self._features: dict[str, int] = {}
    self._weights = np.zeros(0)

  def fit(self, questions: Sequence[Question]) -> "Regression":
    """Finds the weights on questions of one format; those without their answer are left out."""
    rows: list[Mapping[str, float]] = []
    groups: list[int] = []
    right: list[int] = []
    for question in questions:
      found = candidates(question)
      number = next((i for i, text in enumerate(found) if text in gold(question)), None)
      if number is None or len(found) < 2:
        continue
      right.append(len(rows) + number)
      groups += [len(right) - 1] * len(found)
      rows += features(question, found)
    for row in rows:
      for name in row:
        self._features.setdefault(name, len(self._features))
    matrix, group = self._matrix(rows), np.asarray(groups, np.int64)
    chosen = np.asarray(right, np.int64)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
      log_p = _log_softmax(matrix @ weights, group)
      wanted = np.zeros(len(rows))
      wanted[chosen] = 1.0
      slope = matrix.T @ (np.exp(log_p) - wanted) + self.strength * weights
      return float(-log_p[chosen].sum() + self.strength / 2 * weights @ weights), slope

    start = np.zeros(len(self._features))
    self._weights = start
    if len(chosen):
      self._weights = optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x
    return self

  def answer(self, question: Question) -> str:
    """The most probable candidate, as a model writes it; ties go to the first one."""
    found = candidates(question)
    if not found:
      return ""
    scores = self._matrix(features(question, found)) @ self._weights
    best = int(np.argmax(scores.round(9)))
    return f"({best + 1})" if question.options else found[best]

  def _matrix(self, rows: Sequence[Mapping[str, float]]) -> sparse.csr_array:
    """[candidate, feature]; features that training has not are left out."""
    index = [
      [(self._features[n], v) for n, v in row.items() if n in self._features] for row in rows
    ]
    ends = np.cumsum([0, *map(len, index)])
    columns = np.asarray([i for row in index for i, _ in row], np.int64)
    values = np.asarray([v for row in index for _, v in row], np.float64)
    return sparse.csr_array((values, columns, ends), shape=(len(rows), len(self._features)))


def chosen(train: Sequence[Question], valid: Sequence[Question]) -> Regression:
  """The regression whose strength is best on validation questions; the first of equal ones."""
  fitted = [Regression(strength).fit(train) for strength in STRENGTHS]
  rights = [sum(one.answer(q) in gold_answers(q) for q in valid) for one in fitted]
  return fitted[rights.index(max(rights))]


def gold(question: Question) -> tuple[str, ...]:
  """The texts of candidates that are right."""
  if question.options:
    return (question.options[question.label - 1],)
  return question.answers or ("",)


def gold_answers(question: Question) -> tuple[str, ...]:
  """The right answers as a model writes them."""
  return question.answers or (question.answer,)


def candidates(question: Question) -> list[str]:
  """What can be the answer: options, yes and no, spans of one or two words, no answer."""
  if question.options:
    return list(question.options)
  if question.format == "yes_no":
    return ["yes", "no"]
  asked = set(words_of(question.question))
  words = _WORD.findall(question.passage)
  spans = dict.fromkeys([""])
  for size in range(1, _LONGEST_SPAN + 1):
    for i in range(len(words) - size + 1):
      span = words[i : i + size]
      if asked.isdisjoint(word.lower() for word in span[size - 1 :]):
        spans[" ".join(span)] = None
  return list(spans)


def features(question: Question, found: Sequence[str]) -> list[dict[str, float]]:
  """The features of every candidate, by name."""
  asked = words_of(question.question)
  sentences = [set(words_of(s)) for s in _SENTENCE.split(question.passage)]
  every = collections.Counter(words_of(question.passage))
  shared = [len(sentence & set(asked)) for sentence in sentences]
  nearest = sentences[int(np.argmax(shared))] if sentences else set()
  kind, size = " ".join(asked[:2]), f"{min(len(asked), 20)} words:"
  rows = []
  for number, candidate in enumerate(found):
    words = set(words_of(candidate))
    row: dict[str, float] = {}
    if question.format == "yes_no":
      row = {f"{candidate} {word}": 1.0 for word in asked}
      most = max((len(s & set(asked)) for s in sentences), default=0)
      row |= {f"{candidate} most {most / max(len(set(asked)), 1):.1f}": 1.0, candidate: 1.0}
      row[f"{candidate} last {len(sentences[-1] & set(asked))}"] = 1.0
    else:
      together = [len(s & set(asked)) for s in sentences if words and words <= s]
      values = {
        "in passage": sum(min(every[word], 3) for word in words) / max(len(words), 1),
        "in question": len(words & set(asked)) / max(len(words), 1),
        "in last": len(words & sentences[-1]) / max(len(words), 1) if sentences else 0.0,
        "in nearest": len(words & nearest) / max(len(words), 1),
        "sentences": float(len(together)),
        "most together": float(max(together, default=0)),
        "sum together": float(sum(together)),
        "words": float(len(words)),
        "none": float(not candidate),
      }
      values = {name: value for name, value in values.items() if value}
      row = dict(values)
      for about in (kind, size):
        row |= {f"{about} {name}": value for name, value in values.items()}
      if not question.options:
        row |= {f"{kind} is {word}": 1.0 for word in words}
      row[f"place {number}"] = float(bool(question.options))
    rows.append(row)
  return rows


def _log_softmax(scores: np.ndarray, group: np.ndarray) -> np.ndarray:
  """Logarithms of probabilities within each group of scores; groups are numbered in order."""
  starts = np.flatnonzero(np.diff(group, prepend=-1))
  top = np.maximum.reduceat(scores, starts)[group]
  total = np.add.reduceat(np.exp(scores - top), starts)[group]
  return scores - top - np.log(total)


def overlap_answers(
  train: Iterable[Question],
  valid: Iterable[Question],
  test: Iterable[Question],
  formats: Sequence[Format] = ("multiple_choice", "yes_no", "extractive"),
) -> Iterator[tuple[str, Question, str]]:
  """(baseline, question, its answer) of all of them, for the formats that they answer.

  Args:
    train: what the regressions learn from, one for each format.
    valid: what the strength of their penalty is chosen on.
    test: questions to answer.
    formats: that the regression answers. Extractive ones have a candidate for every one or two
      words, which takes long where passages are long.
  """
  learnt: dict[Format, Regression] = {}
  known, checked, asked = list(train), list(valid), list(test)
  present: dict[Format, None] = dict.fromkeys(question.format for question in asked)
  for format in present:
    if format in formats and format != "abstractive":
      mine = [[q for q in part if q.format == format] for part in (known, checked)]
      learnt[format] = chosen(*mine)
  for question in asked:
    if question.format == "multiple_choice" and question.passage:
      yield "sliding window", question, sliding_window(question)
      yield "window and distance", question, window_and_distance(question)
    if question.format in learnt:
      yield "logistic regression", question, learnt[question.format].answer(question)
