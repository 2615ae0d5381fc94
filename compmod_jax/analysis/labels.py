"""Categories of positions: where in the sentence, which word, which part of speech."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from compmod_jax.analysis.reading import NOTHING, Reader, Sentence, read_sentence, tags_of, word_key
from compmod_jax.analysis.subject import Subject

POSITION, WORD, TAG = "position", "word", "part of speech"


@dataclasses.dataclass(frozen=True)
class Labels:
  """One category for each position of a stream of tokens.

  Attributes:
    name: what kind of category: POSITION, WORD or TAG.
    categories: their names.
    ids: for each batch, the category of every position, int16 [batch, time]; NOTHING for none.
  """

  name: str
  categories: tuple[str, ...]
  ids: list[np.ndarray]

  def shuffled(self, times: int, seed: int) -> list[np.ndarray]:
    """The same categories dealt out anew to the positions that have one, over all batches.

    Args:
      times: how many independent shuffles.
      seed: the same seed, the same shuffles.

    Returns:
      For each batch int16 [batch, time, times].
    """
    flat = np.concatenate([ids.ravel() for ids in self.ids])
    labelled = np.flatnonzero(flat != NOTHING)
    dealt = np.full((len(flat), times), NOTHING, np.int16)
    for number in range(times):
      random = np.random.default_rng([seed, number])
      dealt[labelled, number] = random.permutation(flat[labelled])
    ends = np.cumsum([ids.size for ids in self.ids])
    parts = np.split(dealt, ends[:-1])
    return [part.reshape(*ids.shape, times) for part, ids in zip(parts, self.ids, strict=True)]


def labels_of(
  subject: Subject,
  reader: Reader,
  stream: str,
  *,
  words: Sequence[str] = (),
  frequent: int = 12,
  positions: int = 12,
) -> list[Labels]:
  """The categories of everything that a stream's positions read.

  Args:
    subject: the sentences.
    reader: how to read them.
    stream: which of the model's streams.
    words: these words first, as far as they occur; case and punctuation around them do not count.
    frequent: number of the most frequent other words.
    positions: number of first positions, start tokens left out.

  Returns:
    Positions; words, if any is asked for; parts of speech, where gold gives them. A masked token
    has a position alone.

  Raises:
    UserError: gold tags that are not one for each word.
  """
  read = [list(_sentences(subject, reader, stream, batch)) for batch in subject.batches]
  hidden = [reader.hidden(stream, batch) for batch in subject.batches]
  shapes = [reader.tokens(stream, batch).shape for batch in subject.batches]
  made = [_positions(subject, reader, stream, positions)]
  keys = [
    _fill(shape, {row: sentence.key for row, _, sentence in rows})
    for shape, rows in zip(shapes, read, strict=True)
  ]
  chosen = _words((s for rows in read for _, _, s in rows), words, frequent)
  if chosen:
    made.append(_labels(WORD, chosen, keys, hidden))
  tags = _tags(subject, reader, stream, read, shapes)
  if tags is not None:
    kinds = sorted({tag for part in tags for tag in part.flat} - {""})
    made.append(_labels(TAG, kinds, tags, hidden))
  return made


def _sentences(
  subject: Subject, reader: Reader, stream: str, batch: dict[str, np.ndarray]
) -> Iterator[tuple[int, int, Sentence]]:
  """Row, number of the example and words of every example of a batch."""
  tokenizer, tokens = reader.tokenizer(stream), reader.tokens(stream, batch)
  for row in np.flatnonzero(batch["index"] >= 0).tolist():
    yield row, int(batch["index"][row]), read_sentence(tokenizer, tokens[row].tolist())


def _positions(subject: Subject, reader: Reader, stream: str, positions: int) -> Labels:
  ids = []
  for batch in subject.batches:
    tokens = reader.tokens(stream, batch)
    # The first token that is read is number 0, whatever stands before it.
    place = np.cumsum(tokens != NOTHING, axis=1) - 1
    within = (tokens != NOTHING) & (place < positions)
    ids.append(np.where(within, place, NOTHING).astype(np.int16))
  return Labels(POSITION, tuple(map(str, range(positions))), ids)


def _words(sentences: Iterator[Sentence], named: Sequence[str], frequent: int) -> list[str]:
  """The named words that occur, then the most frequent others; ties in alphabetical order."""
  counts: collections.Counter[str] = collections.Counter()
  marks: set[str] = set()
  for sentence in sentences:
    counts.update(map(word_key, sentence.words))
    marks |= {key for key, mark in zip(sentence.key, sentence.mark, strict=True) if mark}
  first = [key for key in dict.fromkeys(map(word_key, named)) if key in counts or key in marks]
  ranked = sorted(
    (key for key in counts if key not in first and any(map(str.isalnum, key))),
    key=lambda key: (-counts[key], key),
  )
  return first + ranked[:frequent]


def _tags(subject, reader, stream, read, shapes) -> list[np.ndarray] | None:
  """The gold tag of every position of every batch; None where there is no gold."""
  found = []
  for shape, rows in zip(shapes, read, strict=True):
    tagged = {}
    for row, number, sentence in rows:
      tags = reader.tags(stream, subject.split, number)
      if tags is None:
        return None
      where = f"example {number} of {subject.split} ({stream})"
      tagged[row] = tags_of(sentence, tags, where)
    found.append(_fill(shape, tagged))
  return found


def _fill(shape: tuple[int, ...], rows: dict[int, list[str]]) -> np.ndarray:
  """Texts [batch, time], empty in rows that are not given."""
  texts = np.full(shape, "", object)
  for row, values in rows.items():
    texts[row] = values
  return texts


def _labels(
  name: str, categories: Sequence[str], texts: list[np.ndarray], hidden: list[np.ndarray]
) -> Labels:
  """Labels from texts; a token that the model is not shown has none."""
  number = {category: i for i, category in enumerate(categories)}
  of = np.vectorize(lambda text: number.get(text, NOTHING), otypes=[np.int16])
  ids = [
    np.where(away, NOTHING, of(part)).astype(np.int16)
    for part, away in zip(texts, hidden, strict=True)
  ]
  return Labels(name, tuple(categories), ids)
