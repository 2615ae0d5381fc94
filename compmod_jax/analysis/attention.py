"""Pictures of attention: where every head looks in single texts, and how much each head counts."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors
from compmod_jax.core.sharding import fetch
from compmod_jax.trained import TrainedModel

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_SITE, _ROUTER = "attention", "router/weights"
_CELL = 0.2  # inches of a token in a heat map
_LEAST, _MOST = 1.6, 5.0  # inches of a heat map
_WIDEST = 12.0  # inches of a picture


def attention_modules(model: TrainedModel) -> list[str]:
  """Names of a model's attention modules in its order, such as `decoder/layer_0/cross`."""
  ends = f"/{_SITE}"
  return [site.removesuffix(ends) for site in model.sites() if site.endswith(ends)]


def attention_pictures(
  model: TrainedModel, text: Any, modules: Sequence[str] | None = None
) -> "dict[str, Figure]":
  """Where the heads of attention modules look while the model reads a text.

  Every head is a panel: a row for each token that looks, a column for each token that is looked at,
  all on one scale from 0 to 1; the weights of a row sum to 1. Where heads compete, the router's
  weight of the head stands beside each row, on a scale from 0 to the largest weight of the module.

      pictures = attention_pictures(model, "Der Hund schläft.", ["decoder/layer_0/cross"])
      pictures["decoder/layer_0/cross"].savefig("cross.png", dpi=150)

  Args:
    model: with attention; a translation model is given a sentence, which it translates, or a pair
      (source, target).
    text: what the model reads, as one element of what `capture` takes.
    modules: names from `attention_modules`; None for all.

  Returns:
    Module -> a matplotlib figure.

  Raises:
    UserError: the model has no attention, or no module of that name; or as `capture`.
  """
  known = attention_modules(model)
  errors.check(
    bool(known), f"The model in {model.folder} has no attention, so there is nothing to draw."
  )
  chosen = known if modules is None else list(modules)
  for module in chosen:
    errors.check_choice("attention module", module, known)
  return {module: _picture(one) for module, one in read_attention(model, text, chosen).items()}


@dataclasses.dataclass(frozen=True)
class Weights:
  """The attention of one module on one text.

  Attributes:
    module: its name.
    attention: float32 [head, query, key].
    router: weight of each head at every query, float32 [query, head]; None where heads do not
      compete.
    queries: text of the tokens that look.
    keys: text of the tokens that are looked at.
  """

  module: str
  attention: np.ndarray
  router: np.ndarray | None
  queries: list[str]
  keys: list[str]


def read_attention(model: TrainedModel, text: Any, modules: Sequence[str]) -> dict[str, Weights]:
  """What attention modules do while a model reads a text; module -> its weights."""
  known = set(model.sites())
  sites = [f"{module}/{name}" for module in modules for name in (_SITE, _ROUTER)]
  found, read = model.capture([text], [site for site in sites if site in known]), {}
  for module in modules:
    site, router = f"{module}/{_SITE}", f"{module}/{_ROUTER}"
    read[module] = Weights(
      module,
      found[site][0],
      found[router][0] if router in found else None,
      found.words(site)[0],
      found.words(site, keys=True)[0],
    )
  return read


def _picture(weights: Weights) -> "Figure":
  heads, queries, keys = weights.attention.shape
  wide, high = (min(_MOST, max(_LEAST, _CELL * count)) for count in (keys, queries))
  # Words stand beside each heat map, and beside that the router's column.
  width, height = wide + (1.5 if weights.router is not None else 1.1), high + 1.1
  columns = max(1, min(heads, int(_WIDEST / width)))
  rows = math.ceil(heads / columns)
  figure = style.canvas(columns * width + 1.6, rows * height + 0.6)
  grid = figure.add_gridspec(rows, columns)
  panels = [figure.add_subplot(grid[head // columns, head % columns]) for head in range(heads)]
  meshes = [_heat(axes, weights, head) for head, axes in enumerate(panels)]
  small = {"fraction": 0.03, "pad": 0.02, "aspect": 25}
  _scale(figure.colorbar(meshes[-1], ax=panels, **small), "attention")
  if weights.router is not None:
    top = float(max(weights.router.max(initial=0.0), 1e-6))
    marks = [_beside(axes, weights.router[:, i], top) for i, axes in enumerate(panels)]
    _scale(figure.colorbar(marks[-1], ax=panels, **small), "router's weight of the head")
  style.finish(figure, style.site_title(weights.module))
  return figure


def _heat(axes: "Axes", weights: Weights, head: int) -> Any:
  """One head's attention."""
  mesh = axes.pcolormesh(weights.attention[head], cmap="Blues", vmin=0, vmax=1, linewidth=0)
  title = f"head {head}"
  if weights.router is not None:
    title += f", mean weight {weights.router[:, head].mean():.2f}"
  style.label(axes, title, "", "")
  axes.grid(False)
  for ticks, words in ((axes.set_xticks, weights.keys), (axes.set_yticks, weights.queries)):
    every = math.ceil(len(words) / 40)
    shown = range(0, len(words), every)
    ticks([at + 0.5 for at in shown], [words[at].strip() for at in shown], parse_math=False)
  axes.tick_params(axis="x", rotation=90)
  axes.invert_yaxis()
  return mesh


def _beside(axes: "Axes", values: np.ndarray, top: float) -> Any:
  """The router's weight of a head at every query, at the right of its panel."""
  axes = axes.inset_axes((1.04, 0.0, 0.07, 1.0))
  mesh = axes.pcolormesh(values[:, None], cmap="Oranges", vmin=0, vmax=top, linewidth=0)
  axes.set_xticks([])
  axes.set_yticks([])
  axes.invert_yaxis()
  for spine in axes.spines.values():
    spine.set_color(style.GRID)
  return mesh


def _scale(bar: Any, name: str) -> None:
  bar.set_label(name, color=style.MUTED, fontsize=style.BODY)
  bar.ax.tick_params(colors=style.MUTED, labelsize=style.SMALL)
  bar.outline.set_visible(False)


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

  def run(self, subject: Subject) -> Page:
    """Reads the texts and draws the attention.

    Raises:
      UserError: the model has no attention or no such module, or a text cannot be read.
    """
    from compmod_jax.api import AnsweringModel, TranslationModel, model_of
    from compmod_jax.data.qa.typed import typed_question

    # Single texts are not laid over devices.
    model = model_of(subject.task, jax.tree.map(jnp.asarray, fetch(subject.params)))
    errors.check(
      not self.target or isinstance(model, TranslationModel),
      "--target is of translation models; leave it out for this one.",
    )
    given: Sequence[Any] = self.text
    if self.target:
      given = list(zip(self.text, self.target, strict=True))
    elif isinstance(model, AnsweringModel):
      given = [typed_question(text) for text in self.text]
    modules = list(self.module) or attention_modules(model)
    sections, rows = [], []
    for number, (text, one) in enumerate(zip(self.text, given, strict=True)):
      read = read_attention(model, one, modules)
      sections.append(Section(text, list(_shown(number, read))))
      rows += [row for weights in read.values() for row in _rows(number, weights)]
      subject.status("texts", number + 1, len(self.text))
    table = Table("attention", _COLUMNS, rows, shown=False)
    sections.append(Section("All weights", [table], ["attention.csv has every weight drawn."]))
    return Page(
      "Attention",
      f"{subject.task.describe()} Rows: the token that looks; columns: the token that it looks at."
      " A decoder's row is the token that it has read, from which it predicts the next one.",
      [f"{len(modules)} attention modules of {len(self.text)} texts."],
      sections,
      {"texts": list(self.text), "targets": list(self.target), "modules": modules},
    )


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


def _shown(number: int, read: dict[str, Weights]) -> Iterator[Picture]:
  """The pictures of a text with their captions."""
  for module, weights in read.items():
    caption = f"{module}: attention of every head; rows sum to 1."
    if weights.router is not None:
      caption += " Orange: the router's weight of the head at that token."
    yield Picture(f"text_{number}_{module.replace('/', '_')}", _picture(weights), caption)


def _rows(number: int, weights: Weights) -> Iterator[tuple[Any, ...]]:
  """Every weight of a module on a text."""
  for (head, query, key), value in np.ndenumerate(weights.attention):
    router = None if weights.router is None else float(weights.router[query, head])
    words = query, weights.queries[query], key, weights.keys[key]
    yield (number, weights.module, head, *words, float(value), router)
