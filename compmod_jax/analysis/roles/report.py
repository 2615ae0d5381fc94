"""The report on roles: maps of heads by layer beside their controls, and tables sorted by role."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compmod_jax.analysis.heads.specialisation import spearman
from compmod_jax.analysis.report import panels, style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.roles.importance import WAYS, Importance, correlations, mean
from compmod_jax.analysis.roles.measure import (
  FIRST,
  KINDS,
  PLACES,
  RAREST,
  ROLES,
  SEPARATOR,
  Heads,
  Look,
  Measured,
  Pass,
  Role,
  Roles,
  classical_scaling,
  role_of,
)
from compmod_jax.analysis.roles.pruning import DRAWS
from compmod_jax.analysis.subject import Module, Subject

_NUMBERED = 16  # heads of a layer up to which maps have numbers
_MARKS: dict[str, str] = dict(zip(ROLES, ("s", "^", "D", "o"), strict=True))
_WAY_NAMES = {
  "ablation": "ablation: rise of the loss, nats per token",
  "gradient": "gradient times activation, nats per token",
  "attribution": "integrated gradients, nats per token",
  "relevance": "layer-wise relevance propagation, logits per token",
}
Values = Callable[[Look, bool], np.ndarray | None]


def make_page(settings: Roles, subject: Subject, found: Measured) -> Page:
  """What attention heads do."""
  roles = _roles(found)
  heads = len(roles)
  counts = collections.Counter(role.kind for role in roles.values())
  sentences = " and ".join(f"{count:,}" for count in found.counted)
  weighed = f"; importance on {' and '.join(map(str, found.weighed))}" if found.weighed else ""
  return Page(
    title=f"What attention heads do, on {subject.split}",
    description=f"{subject.task.describe()} Read in two halves: {sentences} examples of the split"
    f" {subject.split!r}{weighed}. A query is a position that looks, a key one that it may look at;"
    " queries with a single key are left out, as are those that may not read what is asked for."
    " Shuffled: each query's weights dealt out anew to the keys that it may read. Untrained: fresh"
    f" parameters, drawn by the seed {subject.seed}, on the first half. Values of the trained model"
    " are means of the halves.",
    summary=list(_summary(found, roles)),
    sections=list(_sections(found, roles)),
    tiles=[
      ("heads", f"{heads}", f"in {len(found.modules)} modules"),
      *((kind, str(counts[kind]), "heads, in both halves") for kind in ROLES),
    ],
    data=_data(settings, subject, found, roles),
  )


Named = dict[tuple[str, int], Role]


def _roles(found: Measured, passes: Sequence[Pass] = (), *, shuffled: bool = False) -> Named:
  """Module and number of a head -> its role."""
  passes = passes or found.halves
  return {
    (module.name, head): role_of([p.looks[module.name] for p in passes], head, shuffled=shuffled)
    for module in found.modules
    for head in range(module.units)
  }


def _text(role: Role) -> str:
  return f"{role.kind}: {role.target}" if role.target else role.kind


def _summary(found: Measured, roles: Named) -> Iterator[str]:
  """What stands out, beside what the controls give."""
  controls = [("shuffled attention", _roles(found, shuffled=True))]
  if found.untrained is not None:
    controls.append(("the untrained model, which read one half", _roles(found, [found.untrained])))
  for kind in ROLES[:-1]:
    if kind == "syntactic" and not found.relations:
      yield "Syntax: the data know no relations between words, so no head is called syntactic."
      continue
    mine = [key for key, role in roles.items() if role.kind == kind]
    others = " and ".join(
      f"{sum(role.kind == kind for role in those.values())} in {name}" for name, those in controls
    )
    best = max(mine, key=lambda key: roles[key].share, default=None)
    example = ""
    if best is not None:
      role = roles[best]
      example = (
        f"; clearest: {_head_title(found, *best)}, {role.target},"
        f" {100 * role.share:.0f} % (held against {100 * role.beyond:.0f} %)"
      )
    yield f"{kind.capitalize()} heads: {len(mine)} of {len(roles)}; {others}{example}."
  for name, heads in found.halves[0].groups.items():
    within, between = _by_layer(found, name)
    if math.isfinite(within) and math.isfinite(between):
      yield (
        f"Heads that read {name}: the Jensen-Shannon divergence of two heads is {within:.3f} nats"
        f" within a layer and {between:.3f} between layers (at most {math.log(2):.3f});"
        f" {len(heads.heads)} heads."
      )
  if found.importance:
    matrix = _mean_correlations(found.importance)
    pairs = [(matrix[i, j], WAYS[i], WAYS[j]) for i in range(len(WAYS)) for j in range(i)]
    pairs = [pair for pair in pairs if math.isfinite(pair[0])]
    if pairs:
      low, high = min(pairs), max(pairs)
      yield (
        f"Importance: rank correlations of the four ways over heads go from {low[0]:+.2f}"
        f" ({low[2]}, {low[1]}) to {high[0]:+.2f} ({high[2]}, {high[1]})."
      )


def _number(module: Module, head: int) -> str:
  """Layer and head, as `2.0`."""
  layer = module.title.rpartition(", layer ")[2] if ", layer" in module.title else ""
  return f"{layer}.{head}" if layer else str(head)


def _head_title(found: Measured, name: str, head: int) -> str:
  """Kind of module, layer and head, as `encoder self 2.0`."""
  module = next(module for module in found.modules if module.name == name)
  return f"{module.title.partition(', layer')[0]} {_number(module, head)}"


def _sections(found: Measured, roles: Named) -> Iterator[Section]:
  yield Section(
    "Roles",
    [_heads_table(found, roles), _measures_table(found)],
    (
      "A head is positional if at least 90 % of its largest weights are at one offset, at the first"
      " token or at separators; syntactic if it follows a relation at least 10 points more often"
      " than the best fixed offset does; rare if at least half of its largest weights are at the"
      " sentence's rarest token, and twice as many as chance gives. All must hold in both halves.",
    ),
  )
  yield Section("Positions", list(_positions(found)))
  syntax = [*_syntax(found)] if found.relations else []
  yield Section(
    "Syntax", syntax, () if syntax else ("The data know no relations between words: no gold.",)
  )
  yield Section(
    "Rarest token",
    [
      _maps(
        found,
        "rarest",
        "Largest weight on the rarest token of the text, against chance",
        lambda look, dealt: look.share(RAREST, shuffled=dealt) - look.chance(RAREST),
        "share − chance",
        "Rarest by counts in training, among the words that a query may read; orange: more often"
        " than a key that is drawn at random.",
        centre=0.0,
      )
    ],
  )
  every = all(_distributed(look) for look in found.halves[0].looks.values())
  remark = () if every else (_NO_DISTRIBUTION,)
  yield Section("Spread and separators", [*_spread(found)], remark)
  yield Section("How alike heads are", [*_alike(found, roles)], remark)
  if found.importance:
    yield Section("Importance", [*_importance(found)], (_IMPORTANCE,))
  else:
    yield Section("Importance", [], ("It was not measured, or no module shows heads' outputs.",))
  if found.pruned:
    yield Section("Pruning", [*_pruning(found, roles)], (_PRUNING,))
  if found.spectra:
    yield Section("Spectra of W_Q W_K^T", [*_spectra(found)])


_NO_DISTRIBUTION = (
  "Weights of geometric and differential attention are no distribution over keys: of their heads"
  " there is neither an entropy nor a divergence."
)


_IMPORTANCE = (
  "Ablation: rise of the loss where the head's output is zero. Gradient: absolute inner product of"
  " output and gradient of the loss, by sentence. Attribution: integrated gradients while the"
  " outputs of all heads of a module go from zero to what they are; those of a module add up to the"
  " loss without all of them, less the loss. Relevance: absolute relevance of the largest logits,"
  " by sentence, by gradients in a model whose attention weights, routers' weights, gates and"
  " deviations of norms are constants: for linear layers and ReLU the epsilon rule with epsilon 0."
)


_PRUNING = (
  "Every head has a gate, and an open gate a price in nats per token; gates learn on training"
  " sentences, while the model's parameters stand still, and end closed (0) or open. Loss: with the"
  " heads that are left, the others' outputs zero. By ablation: with as many heads, those whose"
  f" ablation alone costs most. At random: mean of {DRAWS} draws of as many."
)


# Maps of heads by layer.


def _kind(module: Module) -> str:
  """The kind of module, as a path: `encoder/self`."""
  return module.title.partition(", layer")[0].replace(" ", "/")


def _heats(found: Measured, values: Mapping[str, np.ndarray], panel: str = "{}") -> dict[str, Any]:
  """Name of a panel, from that of a kind of module -> map [layer, head]."""
  kinds: dict[str, list[Module]] = {}
  for module in found.modules:
    if module.name in values:
      kinds.setdefault(_kind(module), []).append(module)
  maps = {}
  for kind, modules in kinds.items():
    table = np.full((len(modules), max(m.units for m in modules)), np.nan)
    for row, module in enumerate(modules):
      table[row, : module.units] = values[module.name]
    layers = [m.title.rpartition(" ")[2] if ", layer" in m.title else "" for m in modules]
    columns = [str(head) for head in range(table.shape[1])]
    maps[panel.format(kind)] = panels.Heat(table, layers, columns)
  return maps


def _by_module(passes: Sequence[Pass], values: Values, shuffled: bool) -> dict[str, np.ndarray]:
  """Module -> mean over passes, of those that have a value."""
  found = {}
  for name in passes[0].looks:
    each = [values(one.looks[name], shuffled) for one in passes]
    known = [value for value in each if value is not None]
    if known:
      found[name] = np.mean(known, axis=0)
  return found


def _maps(
  found: Measured,
  name: str,
  title: str,
  values: Values,
  unit: str,
  caption: str,
  *,
  centre: float | None = None,
  shuffled: bool = True,
) -> Picture:
  """A picture of a measure: the trained model, and its controls beside it."""
  trained = _by_module(found.halves, values, False)
  before = None if found.untrained is None else _by_module([found.untrained], values, False)
  if not shuffled:
    return Picture(name, _beside_untrained(found, title, trained, before, unit, centre), caption)
  maps = _heats(found, trained)
  maps |= _heats(found, _by_module(found.halves, values, True), "{}/shuffled")
  maps |= _heats(found, before or {}, "{}/untrained")
  return Picture(name, _heat_figure(title, maps, unit, centre), caption)


def _beside_untrained(
  found: Measured,
  title: str,
  trained: Mapping[str, np.ndarray],
  before: Mapping[str, np.ndarray] | None,
  unit: str,
  centre: float | None,
) -> Figure:
  """Two panels a kind of module: a row is all kinds, or one where these are too many for a row."""
  maps = _heats(found, trained)
  many = len(maps) > 3
  maps |= _heats(found, before or {}, "{}/untrained" if many else "untrained/{}")
  return _heat_figure(title, maps, unit, centre, most=2 if many and before else 3)


def _heat_figure(
  title: str,
  maps: Mapping[str, panels.Heat],
  unit: str,
  centre: float | None,
  *,
  most: int = 3,
) -> Figure:
  heads = max((len(heat.columns) for heat in maps.values()), default=0)
  return panels.heat_maps(
    title,
    maps,
    across="head",
    down="layer",
    unit=unit,
    centre=centre,
    numbers=heads <= _NUMBERED,
    most=most,
  )


_PLACE_TITLES = {
  "previous": "the previous token",
  "itself": "the query's own position",
  "next": "the next token",
  FIRST: "the first token that may be read",
  SEPARATOR: "a separator",
}


def _positions(found: Measured) -> Iterator[Picture]:
  captions = {
    SEPARATOR: "Separators are control tokens: start and end of a text, and auxiliary tokens.",
    "next": "Decoders do not see the next token of their own text.",
  }
  for target in (*PLACES, FIRST, SEPARATOR):
    caption = captions.get(target, "Of the queries that may read it.")
    if target in PLACES:
      caption += " Across two texts, offsets are between numbers of positions."
    yield _maps(
      found,
      f"at_{target}",
      f"Largest weight at {_PLACE_TITLES[target]}",
      lambda look, dealt, target=target: (
        look.share(target, shuffled=dealt) if look.count(target) else None
      ),
      "share of queries",
      caption,
    )


def _gain(look: Look, shuffled: bool) -> np.ndarray | None:
  """How much more often than the best fixed offset a head follows its best relation, [heads]."""
  gains = [
    look.share(name, shuffled=shuffled) - look.best_offset(name)[1]
    for name in look.targets
    if " → " in name
  ]
  return np.max(gains, axis=0) if gains else None


def _syntax(found: Measured) -> Iterator[Picture | Table]:
  yield _maps(
    found,
    "syntax",
    "Largest weight along the head's best relation, against the best fixed offset",
    _gain,
    "share − best offset's share",
    "Of all relations and both directions, the one with the largest gain; orange: more often than"
    f" any fixed offset of at most 10 tokens. A gain of {0.1} makes a head syntactic.",
    centre=0.0,
  )
  rows = []
  for name in found.relations:
    for looks in _kinds(found, found.halves).values():
      those = [pair for pair in looks if all(look.count(name) for look in pair[1])]
      if not those:
        continue
      shares = {
        (module.name, head): float(np.mean([look.share(name)[head] for look in halves]))
        for module, halves in those
        for head in range(module.units)
      }
      best = max(shares, key=lambda key: shares[key])
      halves = those[0][1]
      dealt = [look.share(name, shuffled=True).max() for _, pair in those for look in pair]
      before = None
      if found.untrained is not None:
        before = max(float(found.untrained.looks[m.name].share(name).max()) for m, _ in those)
      offsets = [look.best_offset(name) for look in halves]
      rows.append(
        [
          name,
          sum(look.count(name) for look in halves),
          _head_title(found, *best),
          shares[best],
          float(np.mean([share for _, share in offsets])),
          str(offsets[0][0]),
          before,
          float(max(dealt)),
          float(np.mean([look.chance(name) for look in halves])),
        ]
      )
  columns = (
    "relation", "queries", "best head", "share", "best offset's share", "offset",
    "best untrained", "best shuffled", "chance",
  )  # fmt: skip
  yield Table(
    "relations",
    columns,
    rows,
    "The head that follows each relation most often. Queries: tokens of the word before the arrow"
    " that may read the word behind it. Untrained and shuffled: their best heads.",
  )


def _kinds(found: Measured, passes: Sequence[Pass]) -> dict[str, list[tuple[Module, list[Look]]]]:
  kinds: dict[str, list[tuple[Module, list[Look]]]] = {}
  for module in found.modules:
    looks = [one.looks[module.name] for one in passes]
    kinds.setdefault(_kind(module), []).append((module, looks))
  return kinds


def _spread(found: Measured) -> Iterator[Picture]:
  looks = [found.halves[0].looks[module.name] for module in found.modules]
  limits = [look.most_entropy for look in looks if _distributed(look)]
  if limits:
    yield _maps(
      found,
      "entropy",
      "Mean entropy of a query's weights",
      lambda look, _: look.entropy if _distributed(look) else None,
      "nats",
      "Low: few keys get the weight. Uniform weights would give"
      f" {min(limits):.2f} to {max(limits):.2f} nats, depending on the module. Shuffling does not"
      " change it.",
      shuffled=False,
    )
  for kind in ("separator", "punctuation"):
    yield _maps(
      found,
      f"weight_on_{kind}",
      f"Mean weight on {_KIND_TITLES[kind]}",
      lambda look, dealt, kind=kind: look.weight(kind, shuffled=dealt),
      "weight",
      "Of all keys of this kind together.",
    )
  if any("gradient" in look.sums for look in found.halves[0].looks.values()):
    yield _maps(
      found,
      "gradient_at_separator",
      "Gradient of the loss at weights on separators, against the mean over all weights",
      _relative_gradient,
      "log₂ ratio",
      "Of absolute values. Purple: to move weight there changes the loss less than elsewhere.",
      centre=0.0,
      shuffled=False,
    )
    for name, title, up, of in (
      ("weight_by_layer", "Weight by kind of key and layer", "mean weight", Look.weight),
      (
        "gradient_by_layer",
        "Gradient of the loss at a weight, by kind of key and layer",
        "mean |gradient|, nats",
        Look.gradient,
      ),
    ):
      curves = _by_layers(found, of)
      if max(len(layers) for lines in curves.values() for layers, _ in lines.values()) < 2:
        continue
      yield Picture(
        name,
        panels.lines(title, curves, across="layer", up=up),
        "Means over heads; weights of all keys of a kind together, gradients of one weight, of a"
        " batch's loss.",
      )


_KIND_TITLES = {"separator": "separators", "punctuation": "punctuation"}


def _distributed(look: Look) -> bool:
  """Whether the weights of a query are a distribution, or there is no query."""
  return look.sums["queries"] == 0 or not np.isnan(look.entropy).all()


def _relative_gradient(look: Look, _: bool) -> np.ndarray | None:
  if "gradient" not in look.sums:
    return None
  own, every = look.gradient("separator"), look.sums
  total = every["gradient"][:, look.heads].sum(0) / max(every["weights"].sum(), 1)
  assert own is not None
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.log2(np.where(own > 0, own, np.nan) / np.where(total > 0, total, np.nan))


def _by_layers(
  found: Measured, of: Callable[[Look, str], np.ndarray | None]
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
  """Kind of module -> kind of key -> layers and means over heads."""
  curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
  passes = [("", found.halves)]
  if found.untrained is not None:
    passes.append((" untrained", [found.untrained]))
  for name, those in passes:
    for kind, looks in _kinds(found, those).items():
      layers = np.arange(len(looks))
      for of_key in reversed(KINDS):
        values = [
          np.mean([np.mean(v) for look in halves if (v := of(look, of_key)) is not None] or np.nan)
          for _, halves in looks
        ]
        if np.isfinite(values).any():
          curves.setdefault(kind, {})[of_key + name] = (layers, np.array(values))
  return curves


# How alike heads are.


def _mean_groups(passes: Sequence[Pass], name: str) -> Heads:
  first = passes[0].groups[name]
  return first._replace(divergence=np.mean([p.groups[name].divergence for p in passes], axis=0))


def _by_layer(found: Measured, name: str) -> tuple[float, float]:
  """Mean divergence of two heads of the same module, and of two of different ones."""
  heads, divergence = _mean_groups(found.halves, name)
  modules = np.array([module.name for module, _ in heads])
  same = modules[:, None] == modules[None]
  other = ~np.eye(len(heads), dtype=bool)
  within, between = divergence[same & other], divergence[~same]
  return (
    float(within.mean()) if within.size else float("nan"),
    float(between.mean()) if between.size else float("nan"),
  )


def _alike(found: Measured, roles: Named) -> Iterator[Picture | Table]:
  for number, name in enumerate(found.halves[0].groups):
    heads, divergence = _mean_groups(found.halves, name)
    if len(heads) < 3 or not np.isfinite(divergence).all():
      continue
    before = None if found.untrained is None else found.untrained.groups[name].divergence
    figure = map_of_heads(f"Heads that read {name}", heads, divergence, before, roles)
    yield Picture(
      f"map_{number + 1}",
      figure,
      "Classical multidimensional scaling of the root of the mean Jensen-Shannon divergence: near"
      " each other are heads that look at the same keys. Numbers: layer and head; squares are"
      " positional, triangles syntactic, diamonds rare. One scale for all panels.",
    )
  rows = []
  for name, first in found.halves[0].groups.items():
    of = [p.groups[name].divergence for p in found.halves]
    for one in range(len(first.heads)):
      for other in range(one):
        ends = [f"{first.heads[i][0].name}:{first.heads[i][1]}" for i in (other, one)]
        before = found.untrained.groups[name].divergence if found.untrained is not None else None
        rows.append(
          [
            name,
            *ends,
            float(np.mean([d[one, other] for d in of])),
            None if before is None else float(before[one, other]),
          ]
        )
  columns = ("reads", "head", "other head", "divergence", "untrained")
  yield Table("divergence", columns, rows, shown=False)


def map_of_heads(
  title: str,
  heads: Sequence[tuple[Module, int]],
  divergence: np.ndarray,
  untrained: np.ndarray | None,
  roles: Named,
) -> Figure:
  """Heads as points: the trained model's in the colours of layers, and the untrained ones."""
  names = list(dict.fromkeys(module.name for module, _ in heads))
  maps = [("trained", divergence)] + ([] if untrained is None else [("untrained", untrained)])
  figure = style.canvas(style.WIDTH, 0.8 + 4.0)
  axes = [figure.add_subplot(1, len(maps), number + 1) for number in range(len(maps))]
  points = [classical_scaling(np.sqrt(np.maximum(values, 0))) for _, values in maps]
  reach = 1.1 * max(float(np.abs(p).max()) for p in points) or 1.0
  for panel, (name, _), places in zip(axes, maps, points, strict=True):
    for number, module in enumerate(names):
      mine = [i for i, (one, _) in enumerate(heads) if one.name == module]
      _points(panel, [heads[i] for i in mine], places[mine], number, roles, name == "trained")
    style.label(panel, name, "", "")
    panel.set_xlim(-reach, reach)
    panel.set_ylim(-reach, reach)
    panel.set_aspect("equal")
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(6, len(labels)),
    frameon=False,
    fontsize=style.SMALL,
    labelcolor=style.INK,
  )
  style.finish(figure, title)
  return figure


def _points(
  axes: Axes,
  heads: Sequence[tuple[Module, int]],
  places: np.ndarray,
  number: int,
  roles: Named,
  trained: bool,
) -> None:
  """The heads of a module, each with its layer and number."""
  colour = style.PALETTE[number % len(style.PALETTE)]
  axes.plot([], [], "o", color=colour, label=heads[0][0].title)
  for (module, head), (x, y) in zip(heads, places, strict=True):
    kind = roles[module.name, head].kind if trained else "other"
    axes.plot([x], [y], _MARKS[kind], color=colour, markersize=6)
    axes.annotate(
      _number(module, head),
      (x, y),
      xytext=(4, 3),
      textcoords="offset points",
      fontsize=style.SMALL - 1,
      color=style.MUTED,
    )


# Importance and spectra.


def _mean_correlations(halves: Sequence[Importance]) -> np.ndarray:
  return np.mean([correlations(half) for half in halves], axis=0)


def _importance(found: Measured) -> Iterator[Picture | Table]:
  before = found.untrained_importance
  for way in WAYS:
    fresh = None if before is None else before.values[way]
    centre = 0.0 if way in ("ablation", "attribution") else None
    title, _, unit = _WAY_NAMES[way].rpartition(", ")
    yield Picture(
      f"importance_{way}",
      _beside_untrained(
        found, f"Importance by {title}", mean(found.importance, way), fresh, unit, centre
      ),
      "Orange: the loss is higher without the head." if centre == 0 else "Bright: more.",
    )
  maps = {"trained": panels.Heat(_mean_correlations(found.importance), WAYS, WAYS)}
  if before is not None:
    maps["untrained"] = panels.Heat(correlations(before), WAYS, WAYS)
  yield Picture(
    "importance_correlations",
    panels.heat_maps(
      "Spearman's correlation of importance over heads",
      maps,
      across="",
      down="",
      unit="correlation",
      centre=0.0,
      numbers=True,
    ),
    "Over all heads of the model; means of the halves.",
  )
  if len(found.importance) == 2:
    first, second = found.importance
    rows = [[way, spearman(first.over_heads(way), second.over_heads(way))] for way in WAYS]
    caption = "Spearman's correlation over heads of the importance in one half and in the other."
    yield Table("repeats", ("importance by", "correlation of the halves"), rows, caption)
  rows = [
    [
      next(m.title for m in found.modules if m.name == name),
      float(mean(found.importance, "attribution")[name].sum()),
      float(np.mean([half.attributed[name] for half in found.importance])),
    ]
    for name in found.importance[0].attributed
  ]
  columns = ("module", "attributions of its heads together", "rise of the loss without all")
  caption = "Integrated gradients add up to the rise but for the steps of their integral."
  yield Table("completeness", columns, rows, caption)


def _pruning(found: Measured, roles: Named) -> Iterator[Picture | Table]:
  """Losses by heads that are left, which heads these are, and their roles."""
  whole = float(np.mean([half.loss for half in found.importance]))
  heads, ordered = len(roles), sorted(found.pruned, key=lambda one: one.price)
  rows = []
  for one in ordered:
    kinds = collections.Counter(
      roles[name, head].kind
      for name, kept in one.kept.items()
      for head in np.flatnonzero(kept).tolist()
    )
    counts = [kinds[kind] for kind in ROLES]
    rows.append(
      [one.price, one.count, one.undecided, *counts, one.loss, one.by_ablation, one.at_random]
    )
  every = collections.Counter(role.kind for role in roles.values())
  rows.insert(0, [0.0, heads, 0, *(every[kind] for kind in ROLES), whole, whole, whole])
  yield Picture(
    "pruning",
    _pruning_figure(found, whole, heads),
    "Loss with the heads that are left, against how many they are.",
  )
  survived = {name: np.sum([one.kept[name] for one in ordered], axis=0) for name in ordered[0].kept}
  yield Picture(
    "pruned_heads",
    _heat_figure(
      "Prices at which a head is left", _heats(found, survived), f"of {len(ordered)} prices", None
    ),
    "A head with the largest number is left at every price.",
  )
  columns = (
    "price", "heads left", "undecided", *ROLES, "loss", "loss by ablation", "loss at random",
  )  # fmt: skip
  yield Table(
    "pruning",
    columns,
    rows,
    "First row: the whole model. Undecided: open gates that are not 1; the losses are with 1.",
  )


def _pruning_figure(found: Measured, whole: float, heads: int) -> Figure:
  figure = style.canvas(0.6 * style.WIDTH, 3.2)
  axes = figure.add_subplot(1, 1, 1)
  ordered = sorted(found.pruned, key=lambda one: -one.count)
  counts = np.array([heads, *(one.count for one in ordered)])
  series = {
    "gates": [one.loss for one in ordered],
    "by ablation": [one.by_ablation for one in ordered],
    "at random": [one.at_random for one in ordered],
  }
  for number, (name, values) in enumerate(series.items()):
    style.line(axes, counts, np.array([whole, *values]), name, number)
  style.label(axes, "", "heads that are left", "nats per token")
  axes.invert_xaxis()  # names stand at the right, where few heads are left
  style.name_lines(axes)
  style.finish(figure, "Loss by number of heads")
  return figure


def _spectra(found: Measured) -> Iterator[Picture | Table]:
  captions = {
    "heads": "Mean over heads of the product of each head's own matrices.",
    "together": "The product of all heads' matrices side by side.",
  }
  titles = {"heads": "single heads", "together": "all heads together"}
  for field, caption in captions.items():
    curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for name, spectra in (("trained", found.spectra), ("untrained", found.untrained_spectra)):
      for module, spectrum in spectra.items():
        shares = np.atleast_2d(getattr(spectrum, field)).mean(0)
        ranks = np.arange(len(shares) + 1)
        curves.setdefault(module, {})[name] = (ranks, np.concatenate([[0.0], shares]))
    yield Picture(
      f"spectrum_{field}",
      panels.lines(
        f"Cumulative share of squared singular values of W_Q W_K^T, {titles[field]}",
        curves,
        across="rank",
        up="share",
      ),
      f"{caption} A line that rises fast: few directions of queries and keys count.",
    )
  rows = []
  for name, spectrum in found.spectra.items():
    before = found.untrained_spectra.get(name)
    title = next((m.title for m in found.modules if m.name == name), name)
    rows.append(
      [
        title,
        *(_rank_of(spectrum.heads.mean(0)), spectrum.heads.shape[1]),
        None if before is None else _rank_of(before.heads.mean(0)),
        *(_rank_of(spectrum.together), len(spectrum.together)),
        None if before is None else _rank_of(before.together),
      ]
    )
  columns = (
    "module", "rank, single heads", "of", "untrained", "rank, together", "of ", "untrained ",
  )  # fmt: skip
  caption = "Rank at which 90 % of the squared singular values are reached."
  yield Table("spectra", columns, rows, caption)


def _rank_of(shares: np.ndarray, share: float = 0.9) -> int:
  return int(np.searchsorted(shares, share - 1e-12)) + 1


# Tables and numbers.


def _heads_table(found: Measured, roles: Named) -> Table:
  """A row for each head, sorted by role."""
  ways = {way: mean(found.importance, way) for way in WAYS} if found.importance else {}
  rows = []
  for (name, head), role in roles.items():
    looks = [one.looks[name] for one in found.halves]

    def share(target: str, looks: list[Look] = looks, head: int = head) -> float | None:
      known = [look.share(target)[head] for look in looks if look.count(target)]
      return float(np.mean(known)) if known else None

    rows.append(
      [
        _text(role),
        _head_title(found, name, head),
        role.share,
        role.beyond,
        *(share(target) for target in ("previous", "next", FIRST, SEPARATOR, RAREST)),
        float(np.mean([look.entropy[head] for look in looks])),
        *(float(of[name][head]) if name in of else None for of in ways.values()),
      ]
    )
  order = {kind: number for number, kind in enumerate(ROLES)}
  rows.sort(key=lambda row: (order[row[0].partition(":")[0]], row[0], -np.nan_to_num(row[2])))
  columns = (
    "role", "head", "share", "against", "previous", "next", "first", "separator", "rarest",
    "entropy", *ways,
  )  # fmt: skip
  caption = (
    "Heads are called by kind of module, layer and number. Share: of the largest weights that are"
    " where the role says, in the half with fewer; against: chance, or the best fixed offset of a"
    " relation. The next columns are shares, too; the entropy is in nats, the last columns are"
    " importance."
  )
  return Table("heads", columns, rows, caption)


def _measures_table(found: Measured) -> Table:
  """Every share of every head in each half and in the controls; for the CSV file."""
  rows = []
  for module in found.modules:
    looks = [one.looks[module.name] for one in found.halves]
    before = None if found.untrained is None else found.untrained.looks[module.name]
    for target in looks[0].targets:
      for head in range(module.units):
        both = [float(look.share(target)[head]) for look in looks]
        rows.append(
          [
            module.name,
            head,
            target,
            *(*both, None)[:2],
            None if before is None else float(before.share(target)[head]),
            float(np.mean([look.share(target, shuffled=True)[head] for look in looks])),
            looks[0].chance(target),
            looks[0].best_offset(target)[1] if " → " in target else None,
            sum(look.count(target) for look in looks),
          ]
        )
  columns = (
    "module", "head", "target", "first half", "second half", "untrained", "shuffled", "chance",
    "best offset", "queries",
  )  # fmt: skip
  return Table("measures", columns, rows, shown=False)


def _data(settings: Roles, subject: Subject, found: Measured, roles: Named) -> dict[str, Any]:
  """Everything as plain values."""
  controls = {"shuffled": _roles(found, shuffled=True)}
  if found.untrained is not None:
    controls["untrained"] = _roles(found, [found.untrained])
  record: dict[str, Any] = {
    "split": subject.split,
    "settings": dataclasses.asdict(settings),
    "examples": found.counted,
    "examples_of_importance": found.weighed,
    "relations": found.relations,
    "roles": {
      f"{name}:{head}": {**role._asdict(), **{c: _text(r[name, head]) for c, r in controls.items()}}
      for (name, head), role in roles.items()
    },
    "modules": {module.name: _record(module, found) for module in found.modules},
    "groups": {
      name: {
        "heads": [f"{module.name}:{head}" for module, head in group.heads],
        "divergence": [one.groups[name].divergence.tolist() for one in found.halves],
        "untrained": None
        if found.untrained is None
        else found.untrained.groups[name].divergence.tolist(),
      }
      for name, group in found.halves[0].groups.items()
    },
    "importance": {
      "halves": [_importance_record(one) for one in found.importance],
      "untrained": found.untrained_importance and _importance_record(found.untrained_importance),
    },
    "pruning": [{**one._asdict(), "kept": one.kept, "heads": one.count} for one in found.pruned],
    "spectra": {
      name: {module: one._asdict() for module, one in those.items()}
      for name, those in (("trained", found.spectra), ("untrained", found.untrained_spectra))
    },
  }
  return _lists(record)


def _lists(value: Any) -> Any:
  """The same with arrays as lists, as JSON has them."""
  if isinstance(value, Mapping):
    return {key: _lists(inner) for key, inner in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    return value.tolist()
  return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _importance_record(one: Importance) -> dict[str, Any]:
  return {**one._asdict(), "ways": WAYS, "correlations": correlations(one)}


def _record(module: Module, found: Measured) -> dict[str, Any]:
  def of(look: Look) -> dict[str, Any]:
    return {
      "shares": {name: look.share(name) for name in look.targets},
      "shuffled": {name: look.share(name, shuffled=True) for name in look.targets},
      "chance": {name: look.chance(name) for name in look.targets},
      "best_offset": {name: look.best_offset(name) for name in look.targets if " → " in name},
      "queries": {name: look.count(name) for name in look.targets},
      "entropy": look.entropy,
      "entropy_of_uniform": look.most_entropy,
      "weight": {kind: look.weight(kind) for kind in KINDS},
      "gradient": {kind: look.gradient(kind) for kind in KINDS},
    }

  before = None if found.untrained is None else of(found.untrained.looks[module.name])
  halves = [of(one.looks[module.name]) for one in found.halves]
  return {"title": module.title, "heads": module.units, "halves": halves, "untrained": before}
