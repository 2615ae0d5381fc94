"""How sentences are padded and batched, and the padded lengths that waste least."""

import dataclasses

import numpy as np

from compmod_jax.core.bounds import check_least
from compmod_jax.core.errors import check


@dataclasses.dataclass(frozen=True)
class BatchConfig:
  """How many sentences make a batch, and the lengths they are padded to."""

  tokens: int = 4096
  """Padded positions of the longer side in a global batch; rows = tokens // padded length."""
  buckets: tuple[int, ...] = ()
  """Padded lengths, ascending, end-of-sentence included; longer pairs are dropped in training.
  Empty: chosen from the training lengths so that least is padded."""
  bucket_count: int = 6
  """Automatic buckets: how many at most. Each is a shape to compile."""
  ceiling: int = 128
  """Automatic buckets: the longest sentence kept, in tokens, end-of-sentence included."""
  bucket_multiple: int = 2
  """Automatic buckets: padded lengths are multiples of this (8 suits GPUs, 128 TPUs)."""
  prefetch: int = 16
  """Batches that a thread prepares ahead."""
  short_first: int = 0
  """Curriculum: in so many epochs, the first ones, batches come by their padded length, the short
  ones first; then at random."""
  short_batches: int = 0
  """Curriculum: training begins with so many of the first epoch's batches, the shortest ones; then
  come all others."""
  own_lengths: bool = False
  """Of all pairs whose longer side is in a bucket, the sources are padded to the least bucket that
  holds them all, and so are the targets: for data of which one side is much shorter. Else, and in
  episodes and learning at two levels, both sides are padded to the bucket."""

  def __post_init__(self) -> None:
    check_least(self, tokens=1, bucket_count=1, bucket_multiple=1, prefetch=1)
    for field in ("short_first", "short_batches"):
      value = getattr(self, field)
      check(value >= 0, f"{field} is {value}; it must not be negative.")
    check(self.ceiling >= 2, f"ceiling is {self.ceiling}; one word and its end need at least 2.")
    check(
      all(a < b for a, b in zip((1, *self.buckets), self.buckets, strict=False)),
      f"buckets is {self.buckets}; give ascending padded lengths, each at least 2.",
    )
    check(
      self.tokens >= self.longest,
      f"tokens is {self.tokens}, but a sentence may have {self.longest} tokens (the last of"
      " buckets, or ceiling); a batch must hold at least one: raise tokens, or lower the other.",
    )

  @property
  def longest(self) -> int:
    """Tokens of the longest sentence kept, end included."""
    return self.buckets[-1] if self.buckets else self.ceiling

  def resolve(self, lengths: np.ndarray) -> "BatchConfig":
    """The configuration with its automatic buckets filled in.

    Use it to give training and evaluation the same shapes. Fixed buckets stay as they are. The last
    bucket is the ceiling, so that evaluation keeps sentences longer than any in training.

    Args:
      lengths: tokens of every training example, int [n].
    """
    edges = edges_for(lengths, self)
    return dataclasses.replace(
      self, buckets=(*(e for e in edges if e < self.longest), self.longest)
    )


def auto_buckets(
  lengths: np.ndarray, count: int, ceiling: int, *, multiple: int = 1
) -> tuple[int, ...]:
  r"""At most `count` padded lengths that minimise the padded positions of these lengths.

  .. math:: \min_{e_1 < \dots < e_n} \sum_i \min \{ e_k : e_k \ge l_i \}

  Solved exactly by dynamic programming over the histogram of lengths.

  Args:
    lengths: tokens of every example, int [n]; those over `ceiling` do not count.
    count: most buckets, at least 1.
    ceiling: no bucket is longer, in tokens.
    multiple: buckets are multiples of this, except that `ceiling` may be one too.

  Returns:
    Ascending edges. The last is the least that holds the longest example; (ceiling,) if there are
    no examples.

  Raises:
    UserError: `count`, `ceiling` or `multiple` is not positive.
  """
  for field, value in (("count", count), ("ceiling", ceiling), ("multiple", multiple)):
    check(value >= 1, f"{field} is {value}; it must be at least 1.")
  lengths = np.asarray(lengths, np.int64)
  lengths = lengths[lengths <= ceiling]
  if not len(lengths):
    return (ceiling,)
  top = -(-int(lengths.max()) // multiple) * multiple
  edges = np.minimum(np.arange(multiple, top + 1, multiple), ceiling)
  # below[j]: examples that fit into edges[j - 1]; below[0] = 0.
  below = np.concatenate([[0], np.searchsorted(np.sort(lengths), edges, side="right")])
  # cost[j]: least positions for the examples within edges[j - 1] with the buckets used so far.
  cost = below * np.concatenate([[0], edges])
  choices = []
  for _ in range(min(count, len(edges)) - 1):
    # through[i, j]: the last bucket is edges[j - 1] and holds what edges[i - 1] does not.
    through = cost[:, None] + (below[None, :] - below[:, None]) * np.append(0, edges)[None, :]
    through[np.tril_indices(len(cost), -1)] = np.iinfo(np.int64).max
    choices.append(through.argmin(axis=0))
    cost = through.min(axis=0)
  chosen, j = [], len(edges)
  for choice in [*reversed(choices), np.zeros(len(cost), np.int64)]:
    if j > 0 and below[j] > below[choice[j]]:
      chosen.append(int(edges[j - 1]))
    j = int(choice[j])
  return tuple(reversed(chosen))


def edges_for(lengths: np.ndarray, config: BatchConfig) -> tuple[int, ...]:
  """The configured buckets, or automatic ones for these lengths (tokens, int [n])."""
  if config.buckets:
    return config.buckets
  return auto_buckets(lengths, config.bucket_count, config.ceiling, multiple=config.bucket_multiple)
