r"""Characters drawn by programs, and sine waves: generated tasks of few-shot learning.

`glyphs`: 50 alphabets, 1,623 classes, 20 examples of each, 28 x 28 grey, as many as Omniglot has
(Lake et al. 2015). A class is one to four strokes. A stroke is a curve through 3 to 5 control
points, the path of a pen that goes on and turns by its alphabet's habits:

.. math:: p_{i+1} = p_i + l_i (\cos a_i, \sin a_i), \qquad a_{i+1} = a_i + t_i

An example moves the control points, and turns, shears, scales and shifts the whole. Its ink is the
line integral of a Gaussian along the strokes, cut off at 1:

.. math:: I(x) = \min\Bigl(1, \frac{g}{\sqrt{2 \pi} \sigma}
          \sum_q \Delta_q e^{-|x - q|^2 / 2 \sigma^2}\Bigr)

over points q of the strokes, :math:`\Delta_q` of their length apart. Everything is a function of
(seed, class, example).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.base import ClassExamples

ALPHABETS, CLASSES, EXAMPLES, SIZE = 50, 1623, 20, 28
TRAIN_ALPHABETS, TRAIN_CLASSES = 30, 964
_STROKES, _POINTS = 4, 5  # most of a class, and of a stroke
_FINE = 32  # points of a stroke that ink is laid on
_GAIN = 1.6  # over 1, so that the middle of a stroke is black
# Keep the draws of alphabets, classes and examples apart.
_STYLE, _CLASS, _EXAMPLE, _SIZES = 1, 2, 3, 4


@dataclasses.dataclass(frozen=True)
class GlyphData:
  """Generated characters; alphabets of meta-training, validation and test are disjoint."""

  seed: int = 0
  """Of alphabets, classes and examples."""
  examples: int = EXAMPLES
  """Examples of a class."""
  valid_alphabets: int = 5
  """Alphabets of the 30 of meta-training that are held out for validation."""
  jitter: float = 1.0
  """How much examples of a class differ; 0 draws all alike."""

  def __post_init__(self):
    check(self.seed >= 0, f"task.data.seed is {self.seed}; it must not be negative.")
    check(
      2 <= self.examples <= 1000,
      f"task.data.examples is {self.examples}; it must be 2 to 1,000: a class needs a support and a"
      " query, and all are kept in memory.",
    )
    check(
      1 <= self.valid_alphabets < TRAIN_ALPHABETS,
      f"task.data.valid_alphabets is {self.valid_alphabets}; it must be 1 to {TRAIN_ALPHABETS - 1},"
      f" so that training keeps some of {TRAIN_ALPHABETS}.",
    )
    check(
      0 <= self.jitter <= 4,
      f"task.data.jitter is {self.jitter}; it must be 0 (all examples of a class alike) to 4.",
    )

  def splits(self) -> tuple[str, ...]:
    """Names for `load`."""
    return ("train", "valid", "test")

  def describe(self) -> str:
    """What the classes are, in a few words."""
    return f"generated characters of {ALPHABETS} alphabets"

  def load(self, split: str) -> ClassExamples:
    """The classes of a split, drawn once in a process.

    Raises:
      UserError: unknown split.
    """
    check_choice("split", split, self.splits())
    alphabet, number = alphabets(self.seed)
    last = TRAIN_ALPHABETS - self.valid_alphabets
    first, end = {"train": (0, last), "valid": (last, TRAIN_ALPHABETS), "test": (30, ALPHABETS)}[
      split
    ]
    chosen = np.flatnonzero((first <= alphabet) & (alphabet < end))
    return ClassExamples(
      inputs=_drawn(self)[chosen].reshape(-1, SIZE, SIZE, 1),
      classes=np.repeat(np.arange(len(chosen)), self.examples),
      names=tuple(f"alphabet_{alphabet[c]:02d}/character_{number[c]:02d}" for c in chosen),
    )


@functools.lru_cache(maxsize=4)
def _drawn(data: GlyphData) -> np.ndarray:
  """All classes, uint8 [classes, examples, size, size]."""
  made = draw(np.arange(CLASSES), np.arange(data.examples), seed=data.seed, jitter=data.jitter)
  made.flags.writeable = False  # it is shared
  return made


def alphabets(seed: int) -> tuple[np.ndarray, np.ndarray]:
  """The alphabet of every class, and its number in it, each int [classes]."""
  random = np.random.default_rng([seed, _SIZES])
  sizes = np.concatenate(
    [
      _parts(random, TRAIN_CLASSES, TRAIN_ALPHABETS),
      _parts(random, CLASSES - TRAIN_CLASSES, ALPHABETS - TRAIN_ALPHABETS),
    ]
  )
  return np.repeat(np.arange(ALPHABETS), sizes), np.concatenate([np.arange(n) for n in sizes])


def _parts(random: np.random.Generator, total: int, count: int) -> np.ndarray:
  """Sizes of 14 at least that add up to a total."""
  return 14 + random.multinomial(total - 14 * count, random.dirichlet(np.full(count, 4.0)))


class Style(NamedTuple):
  """An alphabet's habits.

  Attributes:
    strokes: probability of 1, 2, 3 and 4 strokes.
    points: of 3, 4 and 5 control points of a stroke.
    roundness: 0 joins control points by straight lines, 1 by smooth curves.
    length: of a stroke, in widths of a character.
    turn: size of the angle by which the pen turns at a control point, in radians.
    wave: probability that it then turns the other way.
    quantum: angles are multiples of this; 0 for any.
    joined: probability that a stroke begins on one before it.
    aspect: height over width.
    slant: shear to the right.
  """

  strokes: np.ndarray
  points: np.ndarray
  roundness: float
  length: float
  turn: float
  wave: float
  quantum: float
  joined: float
  aspect: float
  slant: float


def style(seed: int, alphabet: int) -> Style:
  """The habits of an alphabet."""
  random = np.random.default_rng([seed, _STYLE, alphabet])
  return Style(
    strokes=random.dirichlet([1.0, 3.0, 3.0, 1.5]),
    points=random.dirichlet([2.0, 2.0, 2.0]),
    roundness=float(random.choice([0.0, 0.6, 1.0, 1.0])),
    length=random.uniform(0.7, 1.3),
    turn=random.uniform(0.4, 1.7),
    wave=random.uniform(0.1, 0.6),
    quantum=float(random.choice([0.0, 0.0, math.pi / 4, math.pi / 6])),
    joined=random.uniform(0.2, 0.8),
    aspect=random.uniform(0.75, 1.35),
    slant=random.uniform(-0.25, 0.25),
  )


class Strokes(NamedTuple):
  """Classes as control points.

  Attributes:
    points: [classes, strokes, points, 2], right and down from the middle, in widths of a character.
    counts: control points of every stroke, [classes, strokes]; 0 where there is no stroke.
    roundness: [classes].
  """

  points: np.ndarray
  counts: np.ndarray
  roundness: np.ndarray


def strokes(classes: np.ndarray, seed: int) -> Strokes:
  """The programs of classes.

  Args:
    classes: their numbers, [classes].
    seed: of the alphabets.
  """
  alphabet, _ = alphabets(seed)
  points = np.zeros((len(classes), _STROKES, _POINTS, 2))
  counts, roundness = np.zeros(points.shape[:2], np.int64), np.zeros(len(classes))
  for row, number in enumerate(classes):
    habits = style(seed, int(alphabet[number]))
    random = np.random.default_rng([seed, _CLASS, int(number)])
    found = _one_class(random, habits)
    roundness[row] = habits.roundness
    for place, stroke in enumerate(found):
      points[row, place, : len(stroke)], counts[row, place] = stroke, len(stroke)
  return Strokes(points, counts, roundness)


def _one_class(random: np.random.Generator, habits: Style) -> list[np.ndarray]:
  """Control points of its strokes, within a box around the middle."""
  count = 1 + int(random.choice(4, p=habits.strokes))
  found: list[np.ndarray] = []
  for _ in range(count):
    many = 3 + int(random.choice(3, p=habits.points))
    if count == 1:
      many = _POINTS  # a single stroke has to tell classes apart
    start = random.uniform(-0.5, 0.5, 2)
    if found and random.random() < habits.joined:
      before = found[int(random.integers(len(found)))]
      start = before[int(random.integers(len(before)))]
    angle, side = random.uniform(0, 2 * math.pi), random.choice([-1, 1])
    length = habits.length * random.uniform(0.6, 1.4) / (many - 1)
    path = [start]
    for _ in range(many - 1):
      angle = round(angle / habits.quantum) * habits.quantum if habits.quantum else angle
      step = length * random.uniform(0.7, 1.3)
      path.append(path[-1] + step * np.array([math.cos(angle), math.sin(angle)]))
      side = -side if random.random() < habits.wave else side
      angle += side * habits.turn * random.uniform(0.5, 1.5)
    found.append(np.array(path))
  whole = np.concatenate(found)
  low, high = whole.min(axis=0), whole.max(axis=0)
  # Most of the box is used; flat shapes, which all look like a line, get some height.
  scale = 1 / np.maximum(high - low, 0.5 * (high - low).max())
  box = np.array([min(1, 1 / habits.aspect), min(1, habits.aspect)])
  made = []
  for path in found:
    path = (path - (low + high) / 2) * scale * box
    path[:, 0] -= habits.slant * path[:, 1]
    made.append(path)
  return made


@functools.cache
def _basis(count: int) -> tuple[np.ndarray, np.ndarray]:
  """From control points to fine points, by straight lines and by Catmull-Rom splines.

  Each [fine, control points]; those beyond the last have weight 0.
  """
  straight, smooth = np.zeros((_FINE, _POINTS)), np.zeros((_FINE, _POINTS))
  for row, at in enumerate(np.linspace(0, count - 1, _FINE)):
    left = min(int(at), count - 2)
    t = at - left
    straight[row, left : left + 2] = 1 - t, t
    weights = (
      (-t + 2 * t**2 - t**3) / 2,
      (2 - 5 * t**2 + 3 * t**3) / 2,
      (t + 4 * t**2 - 3 * t**3) / 2,
      (t**3 - t**2) / 2,
    )
    for offset, weight in enumerate(weights):
      smooth[row, min(max(left - 1 + offset, 0), count - 1)] += weight
  return straight, smooth


def _paths(of: Strokes, points: np.ndarray) -> np.ndarray:
  """Fine points of the strokes with these control points: [classes, examples, strokes, fine, 2].

  Args:
    of: the programs.
    points: [classes, examples, strokes, points, 2].
  """
  both = np.zeros((2, _POINTS + 1, _FINE, _POINTS))
  for count in range(3, _POINTS + 1):
    both[:, count] = _basis(count)
  round_, straight = of.roundness[:, None, None, None], both[0][of.counts]
  basis = straight + round_ * (both[1][of.counts] - straight)
  return np.einsum("csfp,cespx->cesfx", basis, points, optimize=True)


def draw(
  classes: np.ndarray, examples: np.ndarray, *, seed: int = 0, jitter: float = 1.0
) -> np.ndarray:
  """Pictures, uint8 [classes, examples, size, size]; 0 is paper, 255 ink.

  Args:
    classes: numbers of classes, 0 to 1,622.
    examples: numbers of examples, >= 0.
    seed: of the alphabets.
    jitter: how much examples differ; 0 draws all alike.
  """
  out = np.zeros((len(classes), len(examples), SIZE, SIZE), np.uint8)
  for first in range(0, len(classes), 64):  # what is in between is a hundred times larger
    part = slice(first, first + 64)
    out[part] = _draw(np.asarray(classes)[part], np.asarray(examples), seed, jitter)
  return out


def _draw(classes: np.ndarray, examples: np.ndarray, seed: int, jitter: float) -> np.ndarray:
  of = strokes(classes, seed)
  shape = (len(classes), len(examples))
  noise = np.stack(
    [
      np.random.default_rng([seed, _EXAMPLE, int(c), int(e)]).normal(size=8 + of.points[0].size)
      for c in classes
      for e in examples
    ]
  ).reshape(*shape, -1)
  noise = jitter * np.clip(noise, -2.5, 2.5)
  moved = noise[..., 8:].reshape(*shape, *of.points.shape[1:])
  paths = _paths(of, of.points[:, None] + 0.035 * moved)
  # Rotation, shear, two scales, shift.
  angle, shear = 0.13 * noise[..., 0], 0.10 * noise[..., 1]
  wide, high = np.exp(0.09 * noise[..., 2]), np.exp(0.09 * noise[..., 3])
  cos, sin = np.cos(angle), np.sin(angle)
  matrix = np.stack(
    [
      np.stack([wide * cos, high * (shear * cos - sin)], axis=-1),
      np.stack([wide * sin, high * (shear * sin + cos)], axis=-1),
    ],
    axis=-2,
  )
  places = np.einsum("cexy,cesfy->cesfx", matrix, paths, optimize=True)
  places = places * 0.67 * SIZE + SIZE / 2 - 0.5 + 1.5 * noise[..., None, None, 4:6]
  gaps = np.linalg.norm(np.diff(places, axis=3), axis=-1)
  lengths = (np.pad(gaps, [*[(0, 0)] * 3, (0, 1)]) + np.pad(gaps, [*[(0, 0)] * 3, (1, 0)])) / 2
  lengths = lengths * (of.counts > 0)[:, None, :, None]
  sigma = 0.75 * np.exp(0.13 * noise[..., 6])
  return _ink(places.reshape(*shape, -1, 2), lengths.reshape(*shape, -1), sigma)


def _ink(places: np.ndarray, lengths: np.ndarray, sigma: np.ndarray) -> np.ndarray:
  """Pictures of points with lengths, uint8 [classes, examples, size, size].

  The Gaussian is a product over the axes, so that the sum over points is one of matrices.
  """
  shape = sigma.shape
  at = places.reshape(-1, places.shape[2], 2).astype(np.float32)
  width = sigma.reshape(-1, 1, 1).astype(np.float32)
  pixels = np.arange(SIZE, dtype=np.float32)
  across, down = (np.exp(-(((at[..., i, None] - pixels) / width) ** 2) / 2) for i in (0, 1))
  weight = (lengths.reshape(len(at), -1, 1) * (_GAIN / math.sqrt(2 * math.pi))).astype(np.float32)
  ink = np.matmul(down.swapaxes(1, 2), across * (weight / width))
  return np.rint(255 * np.clip(ink, 0, 1)).astype(np.uint8).reshape(*shape, SIZE, SIZE)


@dataclasses.dataclass(frozen=True)
class SineData:
  r"""Sine waves: regression tasks without end.

  .. math:: y = A \sin(x + \phi), \quad A \in [0.1, 5], \quad \phi \in [0, \pi], \quad x \in [-5, 5]

  Source: Finn et al. 2017, section 5.1.
  """

  seed: int = 0
  """Of the waves."""

  def __post_init__(self):
    check(self.seed >= 0, f"seed is {self.seed}; it must not be negative.")

  def episodes(self, numbers: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """Waves as episodes: `inputs` and `targets`, each float32 [episodes, rows, 1].

    Args:
      numbers: of the waves, >= 0, [episodes]; each a task of its own, always the same.
      rows: support and query together; `data.episodes.split_episode` parts them.
    """
    draws = np.stack([
      np.random.default_rng([self.seed, int(number)]).random(2 + rows) for number in numbers
    ])  # fmt: skip
    height, phase = 0.1 + 4.9 * draws[:, :1], math.pi * draws[:, 1:2]
    x = -5 + 10 * draws[:, 2:]
    y = height * np.sin(x + phase)
    return {"inputs": x[..., None].astype(np.float32), "targets": y[..., None].astype(np.float32)}
