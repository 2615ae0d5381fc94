"""Which expert took which transformation of images, and what experts make of images in turn."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.errors import UserError
from compmod_jax.core.sharding import fetch
from compmod_jax.data.transformed_digits import TRANSFORMATIONS
from compmod_jax.mechanisms.competing_experts import owners
from compmod_jax.tasks.image_experts import (
  ImageExperts,
  outputs_and_scores,
  won_and_restored,
)

# Translations in a chain go along different axes: twice in one direction would pass the border.
CHAINS = (
  ("up", "left"),
  ("down", "right"),
  ("right", "inverted"),
  ("inverted", "up left"),
  ("down", "noise"),
  ("inverted", "noise"),
)


class Chain(NamedTuple):
  """Images under two transformations, and experts applied one after the other.

  Attributes:
    names: of the transformations, in their order.
    experts: those that win most images of the second transformation, and of the first.
    images: of one image: as it was, under both, after one expert, after both,
      [4, height, width].
    error: mean squared difference from the images as they were: under both transformations, after
      one expert, after both.
  """

  names: tuple[str, str]
  experts: tuple[int, int]
  images: Float[np.ndarray, "4 height width"]
  error: tuple[float, float, float]


class Measured(NamedTuple):
  """What experts make of the images of a split.

  Attributes:
    task: the task.
    counts: images of every transformation that every expert wins, [transformations, experts].
    owner: expert that has a transformation to itself, or -1, [transformations].
    restored: mean squared difference of winners' outputs from untransformed images,
      [transformations].
    before: that of the transformed images, [transformations].
    original: one image as it was, [height, width].
    shown: that image under every transformation, [transformations, height, width].
    outputs: what every expert makes of it, [experts, transformations, height, width].
    winner: of each, [transformations].
    chains: images under two transformations.
  """

  task: ImageExperts
  counts: Float[np.ndarray, "transformations experts"]
  owner: Int[np.ndarray, " transformations"]
  restored: Float[np.ndarray, " transformations"]
  before: Float[np.ndarray, " transformations"]
  original: Float[np.ndarray, "height width"]
  shown: Float[np.ndarray, "transformations height width"]
  outputs: Float[np.ndarray, "experts transformations height width"]
  winner: Int[np.ndarray, " transformations"]
  chains: list[Chain]


@dataclasses.dataclass(frozen=True)
class ImageExpertsReport:
  """Which of the experts that compete for images took which transformation, how well they restore
  images, and what chains of two experts make of images that are transformed twice."""

  image: int = 0
  """Number of the image, in the half of the split that is transformed, that is drawn."""
  chained: int = 100
  """Images on which chains are measured, the first ones."""

  def __post_init__(self):
    errors.check(self.image >= 0, f"--image is {self.image}; it must not be negative.")
    errors.check(self.chained >= 1, f"--chained is {self.chained}; it must be at least 1.")

  def measure(self, subject: Subject) -> Measured:
    """Wins and errors on the subject's images.

    Raises:
      UserError: the model has no such experts, or the split no such image.
    """
    task = subject.task
    if not isinstance(task, ImageExperts):
      raise UserError(
        "The model has no experts that compete for images; give the workdir of a run such as that"
        " of configs/competing_experts.py."
      )
    run, total = task.model.jit(won_and_restored), np.zeros(())
    for number, batch in enumerate(subject.batches):
      found = fetch(run(subject.params, subject.place(batch)))
      total = total + np.asarray(found, np.float64)
      subject.status("batches", number + 1, len(subject.batches))
    counts, wrong = total[:, :-2], total[:, -2:]
    images = np.maximum(counts.sum(axis=1), 1)
    data, hidden = task.dataset.config.data, task.dataset.halves(subject.split).hidden
    errors.check(
      self.image < len(hidden),
      f"--image is {self.image}, but {subject.split} has {len(hidden)} images that are transformed,"
      " numbered from 0.",
    )
    draw = np.random.default_rng(subject.seed)
    one = np.repeat(hidden[self.image][None], len(TRANSFORMATIONS), axis=0)
    shown = data.transformed(one, np.arange(len(one)), draw)
    outputs, scores = _transform(subject, task, shown)
    return Measured(
      task=task,
      counts=counts,
      owner=owners(counts),
      restored=wrong[:, 0] / images,
      before=wrong[:, 1] / images,
      original=hidden[self.image],
      shown=shown,
      outputs=outputs,
      winner=scores.argmax(axis=0),
      chains=[self._chain(subject, task, names, counts, draw) for names in CHAINS],
    )

  def _chain(
    self,
    subject: Subject,
    task: ImageExperts,
    names: tuple[str, str],
    counts: np.ndarray,
    draw: np.random.Generator,
  ) -> Chain:
    hidden = task.dataset.halves(subject.split).hidden
    chosen = np.r_[self.image, 0 : min(self.chained, len(hidden))]
    images = twice = hidden[chosen]
    numbers = [TRANSFORMATIONS.index(name) for name in names]
    for number in numbers:
      twice = task.dataset.config.data.transformed(twice, np.full(len(images), number), draw)
    second, first = (int(counts[number].argmax()) for number in reversed(numbers))
    once = _transform(subject, task, twice)[0][second]
    both = _transform(subject, task, once)[0][first]
    steps = [twice, once, both]
    # The first image is the one that is drawn.
    wrong = [float(np.mean(np.square(step[1:] - images[1:]))) for step in steps]
    shown = np.stack([step[0] for step in (images, *steps)])
    return Chain(names, (second, first), shown, (wrong[0], wrong[1], wrong[2]))


def _transform(
  subject: Subject, task: ImageExperts, images: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """What every expert makes of images, and its score for it."""
  found = task.model.jit(outputs_and_scores)(subject.params, images.astype(np.float32))
  outputs, scores = fetch(found)
  return np.asarray(outputs), np.asarray(scores)


def make_page(settings: ImageExpertsReport, subject: Subject, found: Measured) -> Page:
  """Assignment, outputs of every expert, chains."""
  images = np.maximum(found.counts.sum(axis=1, keepdims=True), 1)
  shares = found.counts / images
  own = int((found.owner >= 0).sum())
  columns = ("transformation", "its own expert", "before", "restored")
  columns = (*columns, *(f"expert {i}, %" for i in range(shares.shape[1])))
  rows = [
    [
      name,
      "" if found.owner[i] < 0 else str(found.owner[i]),
      float(found.before[i]),
      float(found.restored[i]),
      *(100 * shares[i]).tolist(),
    ]
    for i, name in enumerate(TRANSFORMATIONS)
  ]
  chains = [
    [" then ".join(chain.names), " then ".join(map(str, chain.experts)), *chain.error]
    for chain in found.chains
  ]
  idle = int((found.counts.sum(axis=0) < 0.01 * found.counts.sum()).sum())
  sections = [
    Section(
      "Who takes what",
      [
        Picture(
          "assignment",
          _assignment(shares),
          "Share of the images of a transformation that an expert wins, in %.",
        ),
        Table(
          "assignment",
          columns,
          rows,
          "Before and restored: mean squared difference from the untransformed image, of the"
          " transformed image and of the winner's output. An expert has a transformation to itself"
          " if it wins more than half of its images and of no other transformation's.",
        ),
      ],
    ),
    Section(
      "What every expert makes of an image",
      [
        Picture(
          "outputs",
          _outputs(found),
          "Left: an image under every transformation. Then the output of every expert; the winner's"
          " has a frame.",
        )
      ],
    ),
    Section(
      "Two transformations, two experts",
      [
        Picture(
          "chains",
          _chains(found.chains),
          "Rows: the image, the image under both transformations, after the expert that wins most"
          " images of the second transformation, and then after that of the first.",
        ),
        Table(
          "chains",
          ("transformations", "experts", "before", "after one", "after both"),
          chains,
          f"Mean squared difference from the untransformed images, {settings.chained} at most.",
        ),
      ],
    ),
  ]
  return Page(
    f"Competing experts, on {subject.split}",
    f"{found.task.describe()} {int(found.counts.sum()):,} images.",
    [
      f"{own} of {len(TRANSFORMATIONS)} transformations have an expert of their own;"
      f" {idle} experts are idle.",
      f"Winners restore images to a mean squared error of {found.restored.mean():.4f}; that of the"
      f" transformed images is {found.before.mean():.4f}.",
    ],
    sections,
    {
      "split": subject.split,
      "images": int(found.counts.sum()),
      "transformations": list(TRANSFORMATIONS),
      "counts": found.counts.astype(int).tolist(),
      "owner": [int(one) if one >= 0 else None for one in found.owner],
      "specialised": own,
      "idle": idle,
      "before": found.before.tolist(),
      "restored": found.restored.tolist(),
      "chains": [
        {"names": list(c.names), "experts": list(c.experts), "error": list(c.error)}
        for c in found.chains
      ],
    },
    tiles=[("transformations with an expert of their own", str(own), f"of {len(TRANSFORMATIONS)}")],
  )


def _assignment(shares: np.ndarray) -> Figure:
  figure = style.canvas(0.75 * style.WIDTH, 0.8 + 0.36 * len(shares))
  axes = figure.add_subplot(1, 1, 1)
  image = axes.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
  for (row, column), value in np.ndenumerate(100 * shares):
    if value >= 1:
      shade = "black" if value > 60 else "white"
      axes.text(
        column, row, f"{value:.0f}", ha="center", va="center", color=shade, size=style.SMALL
      )
  style.label(axes, "", "expert", "")
  axes.set_xticks(range(shares.shape[1]))
  axes.set_yticks(range(len(shares)), TRANSFORMATIONS)
  axes.grid(visible=False)
  figure.colorbar(image, ax=axes, pad=0.02)
  style.finish(figure, "Images of every transformation by their winner")
  return figure


def _outputs(found: Measured) -> Figure:
  experts = len(found.outputs)
  figure = style.canvas(style.WIDTH, 0.5 + 0.8 * len(TRANSFORMATIONS))
  panels = figure.subplots(len(TRANSFORMATIONS), experts + 1, squeeze=False)
  for row, name in enumerate(TRANSFORMATIONS):
    for column, axes in enumerate(panels[row]):
      image = found.shown[row] if column == 0 else found.outputs[column - 1, row]
      axes.imshow(image, cmap="gray", vmin=0, vmax=1)
      axes.set_xticks([])
      axes.set_yticks([])
      wins = column > 0 and column - 1 == found.winner[row]
      for spine in axes.spines.values():
        spine.set_visible(wins)
        spine.set_color(style.PALETTE[1])
        spine.set_linewidth(2.5)
      if row == 0:
        axes.set_title("input" if column == 0 else f"expert {column - 1}", fontsize=style.SMALL)
    panels[row, 0].set_ylabel(name, fontsize=style.SMALL, rotation=0, ha="right", va="center")
  style.finish(figure, "What every expert makes of an image under every transformation")
  return figure


def _chains(chains: list[Chain]) -> Figure:
  names = ("image", "transformed twice", "after one expert", "after two")
  figure = style.canvas(style.WIDTH, 0.7 + 1.3 * len(names))
  panels = figure.subplots(len(names), len(chains), squeeze=False)
  for column, chain in enumerate(chains):
    for row, axes in enumerate(panels[:, column]):
      axes.imshow(chain.images[row], cmap="gray", vmin=0, vmax=1)
      axes.set_xticks([])
      axes.set_yticks([])
      axes.set_frame_on(False)
    panels[0, column].set_title("\nthen ".join(chain.names), fontsize=style.SMALL)
  for row, name in enumerate(names):
    panels[row, 0].set_ylabel(name, fontsize=style.SMALL, rotation=0, ha="right", va="center")
  style.finish(figure, "Images under two transformations, and experts one after the other")
  return figure
