"""Few-shot classification without a network: what any method must be compared with."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from compmod_jax.data.class_episodes import ClassEpisodeConfig, ClassEpisodes


def nearest_means(inputs: np.ndarray, episodes: ClassEpisodeConfig) -> np.ndarray:
  """The class of each query by the nearest mean of a class's support, by squared difference.

  Args:
    inputs: [rows, ...] of an episode, numbers of any range; with one shot a mean is the example.
    episodes: what it holds.

  Returns:
    Classes [queries], from 0.
  """
  rows = inputs.reshape(len(inputs), -1).astype(np.float64)
  support = rows[: episodes.support].reshape(episodes.ways, episodes.shots, -1).mean(axis=1)
  query = rows[episodes.support :]
  squares = np.square(support).sum(axis=1) - 2 * query @ support.T  # but for what queries share
  return np.argmin(squares, axis=1)


def nearest_mean_scores(
  dataset: ClassEpisodes[Any], splits: Sequence[str], ways: Sequence[int], count: int
) -> list[dict[str, Any]]:
  """Accuracy of `nearest_means` on the episodes on which models are scored, with a 95 % interval.

  Args:
    dataset: the classes.
    splits: names of splits.
    ways: numbers of classes of an episode.
    count: episodes.

  Returns:
    Rows with `baseline`, `split`, `ways`, `episodes`, `accuracy`, `accuracy_low` and
    `accuracy_high`.

  Raises:
    UserError: an unknown split, or one that has too few classes or examples.
  """
  rows = []
  for split in splits:
    for number in ways:
      episodes = dataset.config.episodes.of_ways(number)
      right = episodes.labels[episodes.support :]
      found = np.array([
        np.mean(nearest_means(inputs, episodes) == right)
        for batch in dataset.episodes(split, count=count, config=episodes)
        for inputs, index in zip(batch["inputs"], batch["index"], strict=True)
        if index[0] >= 0
      ])  # fmt: skip
      half = 1.96 * found.std(ddof=1) / math.sqrt(len(found))
      accuracy = float(found.mean())
      rows.append({
        "baseline": "nearest mean of the raw examples", "split": split, "ways": number,
        "episodes": len(found), "accuracy": accuracy, "accuracy_low": accuracy - half,
        "accuracy_high": accuracy + half,
      })  # fmt: skip
  return rows
