"""Translation without a network: what any trained model must be compared with.

Both baselines work on raw text and need nothing but the training pairs (or a dictionary that is
known): word by word, and the translation of the nearest training sentence. A word is a run of
letters, digits and underscores, with inner hyphens and apostrophes; anything else is punctuation.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import sparse

from compmod_jax.core.errors import check

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_WORD_OR_MARK = re.compile(rf"{_WORD.pattern}|[^\w\s]")
_CHUNK = 128  # sources compared with all training sentences at once: bounds memory


def word_by_word(dictionary: Mapping[str, str], sources: Sequence[str]) -> list[str]:
  """Replaces every word by its entry, in the order of the source; punctuation stays.

  Args:
    dictionary: source word -> its translation, of any number of words; an empty one deletes it.
    sources: sentences.

  Returns:
    One output a source. A word without an entry of its own takes that of its lower-case form, with
    a capital letter; failing that it is copied.
  """

  def translate(match: re.Match[str]) -> str:
    word = match.group()
    if word in dictionary:
      return dictionary[word]
    meaning = dictionary.get(word.lower(), word)
    return meaning[:1].upper() + meaning[1:] if word[0].isupper() else meaning

  return [" ".join(_WORD.sub(translate, source).split()) for source in sources]


def nearest_training_sentence(
  train_sources: Sequence[str],
  train_targets: Sequence[str],
  sources: Sequence[str],
  order: int = 2,
) -> list[str]:
  r"""The translation of the training source most similar to each source.

  .. math:: \cos(x, y), \quad x_g = (1 + \log n_g) \left(1 + \log \tfrac{1 + N}{1 + d_g}\right)

  over n-grams g of up to `order` words and marks: n_g occurrences in the sentence, d_g training
  sources that contain g, N training sources. N-grams that no training source has are left out. Ties
  go to the lower index, so a source that shares nothing with any gets the first translation.

  Args:
    train_sources: sentences.
    train_targets: their translations, in the same order.
    sources: sentences to translate.
    order: longest n-gram, at least 1.

  Returns:
    One output a source: a training target, as it is.

  Raises:
    UserError: no training pairs, sides of unequal length, or order below 1.
  """
  _check_pairs(train_sources, train_targets)
  check(order >= 1, f"order is {order}; it must be at least 1.")
  vocabulary: dict[str, int] = {}
  # Only n-grams of `sources` can be shared; the others of the training set count in its norms.
  queries = _count_ngrams(sources, order, vocabulary)
  shared = len(vocabulary)
  train = _count_ngrams(train_sources, order, vocabulary)
  sentences = np.bincount(train.indices, minlength=len(vocabulary))
  weight = np.log((1 + len(train_sources)) / (1 + sentences)) + 1
  weight = np.where(sentences > 0, weight, 0.0)
  train = _weigh(train, weight)[:, :shared].tocsr()
  queries = _weigh(queries, weight[:shared])

  nearest: list[int] = []
  for start in range(0, len(sources), _CHUNK):
    part = queries[start : start + _CHUNK]
    used = np.unique(part.indices)
    similarity = train[:, used] @ part[:, used].T.toarray()
    # Rounding must not decide between equal sentences.
    nearest += np.argmax(similarity.round(5), axis=0).tolist()
  return [train_targets[i] for i in nearest]


def learn_dictionary(
  train_sources: Sequence[str],
  train_targets: Sequence[str],
  *,
  rounds: int = 5,
  most_pairs: int = 100_000,
) -> dict[str, str]:
  r"""The most probable translation of every source word, from sentence pairs alone.

  .. math:: t(f|e) \propto \sum_{\text{pairs}}
            \frac{t(f|e)}{\sum_{e' \in \text{source} \cup \{\mathrm{null}\}} t(f|e')}

  is iterated from a uniform t (IBM model 1, expectation maximisation with an empty word).

  Args:
    train_sources: sentences.
    train_targets: their translations, in the same order.
    rounds: iterations, at least 1.
    most_pairs: only the first `most_pairs` pairs are read: memory grows with the sum over pairs of
      source words times target words.

  Returns:
    Source word -> target word, for every word of the sources read that stood beside any target
    word. Ties go to the target word seen first.

  Raises:
    UserError: no training pairs, sides of unequal length, or rounds below 1.

  Source: Brown et al. 1993, model 1.
  """
  _check_pairs(train_sources, train_targets)
  check(rounds >= 1, f"rounds is {rounds}; it must be at least 1.")
  source_ids: dict[str, int] = {"": 0}  # the empty word
  target_ids: dict[str, int] = {}
  pairs = list(zip(train_sources[:most_pairs], train_targets[:most_pairs], strict=True))
  links, groups = _links(pairs, source_ids, target_ids)
  entries, link_entry = np.unique(links, return_inverse=True)
  source, target = np.divmod(entries, len(target_ids))

  table = np.ones(len(entries))
  for _ in range(rounds):
    likelihood = table[link_entry]
    likelihood /= np.bincount(groups, likelihood)[groups]
    table = np.bincount(link_entry, likelihood, minlength=len(entries))
    table /= np.bincount(source, table)[source]

  # Entries are sorted by source word, then by target word; the first of a group wins.
  best = np.lexsort((target, -table.round(9), source))
  first = np.unique(source[best], return_index=True)[1]
  names, meanings = list(source_ids), list(target_ids)
  chosen = best[first]
  return {names[s]: meanings[t] for s, t in zip(source[chosen], target[chosen], strict=True) if s}


def _check_pairs(sources: Sequence[str], targets: Sequence[str]) -> None:
  check(
    len(sources) == len(targets),
    f"there are {len(sources)} training sources for {len(targets)} targets; they must be pairs.",
  )
  check(len(sources) > 0, "there are 0 training pairs; a baseline needs at least one.")


def _count_ngrams(
  sentences: Sequence[str], order: int, vocabulary: dict[str, int]
) -> sparse.csr_array:
  """Counts [sentence, n-gram]; n-grams new to `vocabulary` are added to it."""
  columns: list[int] = []
  ends = [0]
  for sentence in sentences:
    words = _WORD_OR_MARK.findall(sentence)
    for n in range(1, order + 1):
      for start in range(len(words) - n + 1):
        gram = " ".join(words[start : start + n])
        columns.append(vocabulary.setdefault(gram, len(vocabulary)))
    ends.append(len(columns))
  counts = sparse.csr_array(
    (np.ones(len(columns)), np.asarray(columns, np.int64), np.asarray(ends, np.int64)),
    shape=(len(sentences), len(vocabulary)),
  )
  counts.sum_duplicates()
  return counts


def _weigh(counts: sparse.csr_array, weight: np.ndarray) -> sparse.csr_array:
  """Rows of tf-idf weights with Euclidean norm 1; rows without any weight stay zero."""
  sentences = len(counts.indptr) - 1
  values = (1 + np.log(counts.data)) * weight[counts.indices]
  rows = np.repeat(np.arange(sentences), np.diff(counts.indptr))
  norms = np.sqrt(np.bincount(rows, values**2, minlength=sentences))
  values = values / np.where(norms > 0, norms, 1.0)[rows]
  return sparse.csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def _links(
  pairs: Sequence[tuple[str, str]], source_ids: dict[str, int], target_ids: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
  """Every (source word or none, target word) of every pair, and the target word it explains.

  Returns:
    links int64: source id * number of target words + target id; groups int64: the running number
    of the target word occurrence, the same for all links that compete to explain it.
  """
  sides = []
  for source, target in pairs:
    s = [0, *(source_ids.setdefault(word, len(source_ids)) for word in _WORD.findall(source))]
    t = [target_ids.setdefault(word, len(target_ids)) for word in _WORD.findall(target)]
    sides.append((np.array(s, np.int64), np.array(t, np.int64)))
  vocab = len(target_ids)
  links = [(s[None] * vocab + t[:, None]).ravel() for s, t in sides]
  widths = np.concatenate([np.full(len(t), len(s)) for s, t in sides])
  return np.concatenate(links), np.repeat(np.arange(len(widths)), widths)
