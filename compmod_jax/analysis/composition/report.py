"""The page on composition: what patching and exchanging words do."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from compmod_jax.analysis.codes import ALL, STREAM, Share
from compmod_jax.analysis.composition.homomorphism import ADDITIVE, LINEAR, MEAN, Errors
from compmod_jax.analysis.composition.measure import Composed, Composition
from compmod_jax.analysis.composition.patching import (
  ELSE,
  SOURCE,
  UNCHANGED,
  Outcome,
  Patches,
)
from compmod_jax.analysis.report import style
from compmod_jax.analysis.report.page import Page, Picture, Section, Table
from compmod_jax.analysis.subject import Subject
from compmod_jax.metrics.bootstrap import Interval, ratio_interval

_MOST = 30  # pairs of words that have a row
_SHUFFLED = "shuffled words"


def make_page(settings: Composition, subject: Subject, found: Composed) -> Page:
  """What is exchanged when words are, in one section for each measure."""
  patches, layers = found.patches, _layers(found.errors, subject.seed)
  summary = [*_patching_summary(patches), *_error_summary(layers)]
  sections = [Section("Patching", _patching(found), [_WHAT_IS_PATCHED])]
  if layers:
    sections.append(Section("Homomorphism error", _homomorphism(found, layers), [_WHAT_IS_LINEAR]))
  return Page(
    title=f"What is exchanged when words are, on {subject.split}",
    description=f"{subject.task.describe()} {found.pairs:,} pairs of sentences that differ in one"
    f" word, no sentence in two of them; {found.training:,} pairs of training sentences.",
    summary=summary,
    sections=sections,
    data={
      "pairs": found.pairs,
      "training_pairs": found.training,
      "patching": {
        "pairs": len(patches.pairs),
        "equal_outputs": patches.equal,
        "both_right": patches.both_right,
        "replaced": {
          name: {"patched": _as_json(one), "control": _as_json(patches.controls[name])}
          for name, one in patches.patched.items()
        },
      },
      "homomorphism": {
        name: {
          "pairs": len(found.errors[name].words),
          **{label: vars(interval) for label, interval in one.items()},
        }
        for name, one in layers.items()
      },
    },
    tiles=[
      ("pairs", f"{found.pairs:,}", f"{len(patches.pairs):,} patched"),
      ("both outputs right", f"{patches.both_right:,}", f"of {len(patches.pairs):,} patched"),
    ],
  )


# Patching.

_WHAT_IS_PATCHED = (
  "The model reads one sentence of a pair, but at the word in which they differ some of its"
  " activations are those that it has when it reads the other, the source. Control: those of a"
  " random other word, from a sentence of the same length. Pairs for whose sentences the model has"
  " one output are left out."
)


def _share(one: Outcome, kind: str) -> Share:
  return Share.of(one.kinds == kind)


def _changed(one: Outcome) -> Share:
  return Share.of(one.kinds != UNCHANGED)


def _headlines(patches: Patches) -> list[str]:
  """The codes of all modules, and the layer whose residual stream exchanges most outputs."""
  codes = [name for name in patches.patched if not name.startswith(STREAM)]
  streams = [name for name in patches.patched if name.startswith(STREAM)]
  best = sorted(streams, key=lambda n: -np.sum(patches.patched[n].kinds == SOURCE))
  return ([ALL] if ALL in codes else codes[:1]) + best[:1]


def _patching_summary(patches: Patches) -> Iterator[str]:
  if not patches.pairs:
    yield f"The model has one output for both sentences of all {patches.equal} pairs."
    return
  for name in _headlines(patches):
    one, control = patches.patched[name], patches.controls[name]
    yield (
      f"With {name} at the word from the source, {_percent(_share(one, SOURCE))} of"
      f" {len(patches.pairs)} outputs become the source's, {_percent(_share(one, UNCHANGED))} stay"
      f" unchanged; from a random other word {_percent(_share(control, SOURCE))} and"
      f" {_percent(_share(control, UNCHANGED))}."
    )


def _percent(share: Share) -> str:
  return f"{100 * share.share:.1f} %"


def _patching(found: Composed) -> list[Picture | Table]:
  patches = found.patches
  if not patches.pairs:
    return []
  rows = []
  for name, one in patches.patched.items():
    control, source = patches.controls[name], _share(one, SOURCE)
    rows.append([
      name, source.share, source.low, source.high, float(np.mean(one.right)),
      _share(one, ELSE).share, *_changed(one)[:3],
      _share(control, SOURCE).share, *_changed(control)[:3],
    ])  # fmt: skip
  columns = (
    "replaced", "source's output", "source's output, low", "source's output, high",
    "source's right output", "something else", "changed", "changed, low", "changed, high",
    "control: source's output", "control: changed", "control: changed, low",
    "control: changed, high",
  )  # fmt: skip
  caption = (
    "Shares of outputs, with 95 % intervals (Wilson 1927): the model's output on the source, the"
    " source's reference, or neither the model's output on the source nor that on the base."
  )
  table = Table("patching", columns, rows, caption)
  return [_bars(patches), table, _by_words(found)]


def _by_words(found: Composed) -> Table:
  """The same for every two words, of the headlines."""
  patches = found.patches
  names = _headlines(patches)
  words = [frozenset(pair.words) for pair in patches.pairs]
  rows = []
  for both, count in Counter(words).most_common(_MOST):
    here = np.array([one == both for one in words])
    kinds = [patches.patched[name].kinds[here] for name in names]
    shares = [float(np.mean(one == kind)) for one in kinds for kind in (SOURCE, UNCHANGED)]
    rows.append([_title(found, sorted(both)), count, *shares])
  return Table(
    "patching_by_words",
    ("words", "pairs", *(f"{name}: {kind}" for name in names for kind in (SOURCE, UNCHANGED))),
    rows,
    f"Shares of outputs by the two words in which sentences differ, the {_MOST} commonest.",
  )


def _title(found: Composed, words: Sequence[int]) -> str:
  return " / ".join(found.names[word] for word in words)


def _bars(patches: Patches) -> Picture:
  """A bar for what became of outputs, and below it one of the control."""
  names = list(patches.patched)
  figure = style.canvas(style.WIDTH, 1.1 + 0.42 * len(names))
  axes = figure.add_subplot()
  colours = {SOURCE: style.PALETTE[0], ELSE: style.PALETTE[3], UNCHANGED: style.GRID}
  for outcomes, shift, height in ((patches.patched, -0.14, 0.38), (patches.controls, 0.24, 0.2)):
    places, left = np.arange(len(names)) + shift, np.zeros(len(names))
    for kind, colour in colours.items():
      shares = np.array([_share(outcomes[name], kind).share for name in names])
      label = kind if shift < 0 else None
      axes.barh(places, shares, height, left=left, color=colour, label=label)
      left += shares
    source = [_share(outcomes[name], SOURCE) for name in names]
    value = np.array([share.share for share in source])
    spread = np.abs(np.array([(share.low, share.high) for share in source]).T - value)
    axes.errorbar(value, places, xerr=spread, fmt="none", ecolor=style.INK, linewidth=0.8)
  axes.set_yticks(np.arange(len(names)), names)
  axes.invert_yaxis()
  axes.set_xlim(0, 1)
  axes.legend(fontsize=style.SMALL, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
  style.label(axes, "", "share of outputs", "")
  axes.grid(visible=False)
  style.finish(figure, "Outputs with activations of a sentence that has another word")
  return Picture(
    "patching",
    figure,
    "What outputs become when activations at the word come from the source; narrow bars: from a"
    " random other word. Lines: 95 % intervals of the share that becomes the source's.",
  )


def _as_json(one: Outcome) -> dict[str, Any]:
  if not len(one.kinds):
    return {}
  named = {"unchanged": UNCHANGED, "source": SOURCE, "else": ELSE}
  return {
    **{key: _share(one, kind)._asdict() for key, kind in named.items()},
    "source_right": Share.of(one.right)._asdict(),
  }


# Homomorphism error.

_WHAT_IS_LINEAR = (
  "Sums of the residual stream over a sentence's positions. Of two sentences that differ in one"
  " word the second is predicted from the first, by an operation that depends on the two words"
  " alone and was estimated from pairs of training sentences: a vector that is added (additive),"
  " and a linear map besides (linear). Errors are relative to no operation: 0 is a homomorphism, 1"
  " no better than the representation of the first sentence. Shuffled words: operations of random"
  " words, which tell what is gained without them."
)


def _layers(found: Mapping[str, Errors], seed: int) -> dict[str, dict[str, Interval]]:
  """Layer -> name of the operations -> their relative error."""
  return {
    name: {
      label: ratio_interval(squares, one.identity, seed=seed)
      for label, squares in (
        *one.found.items(), *((f"{_SHUFFLED}, {label}", s) for label, s in one.shuffled.items()),
      )
    }
    for name, one in found.items()
    if len(one.words)
  }  # fmt: skip


def _error_summary(layers: Mapping[str, Mapping[str, Interval]]) -> Iterator[str]:
  if not layers:
    yield (
      "No homomorphism error: no two words are exchanged in pairs of training sentences and of"
      " others."
    )
  for name, one in layers.items():
    yield (
      f"Homomorphism error of the {name}: {one[ADDITIVE].value:.2f} additive,"
      f" {one[LINEAR].value:.2f} linear; with shuffled words"
      f" {one[f'{_SHUFFLED}, {ADDITIVE}'].value:.2f} and"
      f" {one[f'{_SHUFFLED}, {LINEAR}'].value:.2f}."
    )


def _homomorphism(
  found: Composed, layers: Mapping[str, Mapping[str, Interval]]
) -> list[Picture | Table]:
  labels = list(next(iter(layers.values())))
  rows = [
    [
      name,
      len(found.errors[name].words),
      *(value for label in labels for value in _bounds(one[label])),
    ]
    for name, one in layers.items()
  ]
  bounds = [f"{label}{end}" for label in labels for end in ("", ", low", ", high")]
  table = Table(
    "homomorphism",
    ("representation", "pairs", *bounds),
    rows,
    "Relative squared errors with 95 % bootstrap intervals over pairs. Mean: the mean of training"
    " sentences with the second word, whatever the rest of the sentence.",
  )
  return [_points(layers), table, _errors_by_words(found)]


def _bounds(one: Interval) -> tuple[float, float, float]:
  return one.value, one.low, one.high


def _errors_by_words(found: Composed) -> Table:
  """The same for every two words, of the last layer."""
  name, last = list(found.errors.items())[-1]
  rows = []
  for words, count in Counter(last.words).most_common(_MOST):
    here = np.array([one == words for one in last.words])
    total = last.identity[here].sum()
    values = [float(squares[here].sum() / total) for squares in last.found.values()]
    rows.append([_title(found, words), count, *values])
  return Table(
    "homomorphism_by_words",
    ("words", "pairs", *last.found),
    rows,
    f"Relative squared errors by the two words that are exchanged, the {_MOST} commonest; {name}.",
  )


def _points(layers: Mapping[str, Mapping[str, Interval]]) -> Picture:
  figure = style.canvas(style.WIDTH, 1.3 + 0.45 * len(layers))
  axes = figure.add_subplot()
  shown = [label for label in next(iter(layers.values())) if label != MEAN]
  for number, label in enumerate(shown):
    values = np.array([_bounds(one[label]) for one in layers.values()]).T
    places = np.arange(len(layers)) + 0.14 * (number - (len(shown) - 1) / 2)
    axes.errorbar(
      values[0], places, xerr=np.abs(values[1:] - values[0]), markersize=4, linewidth=1,
      fmt="s" if label.startswith(_SHUFFLED) else "o", label=label,
      color=style.PALETTE[label.endswith(LINEAR)],
    )  # fmt: skip
  axes.axvline(1, color=style.MUTED, linewidth=1, label="no operation")
  axes.set_yticks(np.arange(len(layers)), list(layers))
  axes.set_ylim(len(layers) - 0.5, -0.5)
  axes.set_xlim(left=0)
  axes.legend(fontsize=style.SMALL, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
  style.label(axes, "", "relative squared error", "")
  style.finish(figure, "Homomorphism error of exchanging a word")
  return Picture(
    "homomorphism",
    figure,
    "How far the representation of a sentence is from that of the same sentence with another word,"
    " changed by an operation of the two words; squares: operations of random words.",
  )
