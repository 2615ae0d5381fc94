"""The pictures of the report on heads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from compmod_jax.analysis.heads.findings import Estimate, Finding
from compmod_jax.analysis.labels import POSITION, TAG, WORD, Labels
from compmod_jax.analysis.report import panels
from compmod_jax.analysis.report.page import Picture
from compmod_jax.analysis.subject import called

Streams = Mapping[str, Sequence[Labels]]
_PAGE = 12  # modules in one heat map: more would be too small to read


def _called(found: Sequence[Finding]) -> str:
  return called(finding.module for finding in found)


def positions(found: Sequence[Finding]) -> Iterator[Picture]:
  """Mean weights, and norms before and after scaling, by position."""
  routed = [finding for finding in found if finding.module.routed]
  if routed:
    unit = _called(routed)
    maps = {}
    for finding in routed:
      weights = finding.totals.by(POSITION, "weight")
      places = [str(place) for place in range(len(weights))]
      units = [str(number) for number in range(weights.shape[1])]
      maps[finding.module.name] = panels.Heat(weights.T - 1 / weights.shape[1], units, places)
    yield Picture(
      "weight_by_position",
      panels.heat_maps(
        f"Weight of each {unit} by position, against an equal share",
        maps,
        across="position (0 = first)",
        down=unit,
        unit=f"mean weight − 1/{unit}s",
        centre=0.0,
      ),
      "Orange: more than an equal share of the weight; purple: less. Position 0 is the first token"
      " of the text.",
    )
  for name, when, those in (("norm", "before", found), ("norm_scaled", "after", routed)):
    curves = {
      f.module.name: _by_position(f, name) for f in those if name in f.totals.sums["by"][POSITION]
    }
    if curves:
      unit = _called(those)
      yield Picture(
        f"{name}_by_position",
        panels.lines(
          f"Norm of each {unit}'s output {when} the competition, by position",
          curves,
          across="position (0 = first)",
          up="mean norm",
        ),
        f"Means over tokens. Numbers at the right name the {unit}s."
        + (" Where nothing competes, before is all there is." if name == "norm" else ""),
      )


def _by_position(finding: Finding, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  means = finding.totals.by(POSITION, name)
  seen = finding.totals.sums["by"][POSITION]["count"] > 0
  places = np.arange(len(means))[seen]
  return {str(unit): (places, means[seen, unit]) for unit in range(means.shape[1])}


def categories(
  found: Sequence[Finding],
  labels: Streams,
  stream: Callable[[str], str],
  kind: Literal["word", "part of speech"],
) -> Iterator[Picture]:
  """Heat maps of weights and norms by word or by part of speech, against each unit's own mean."""
  short = {WORD: "word", TAG: "part_of_speech"}[kind]
  names = {
    site: made.categories
    for site in (finding.module.name for finding in found)
    for made in labels[stream(site)]
    if made.name == kind
  }
  shown = [finding for finding in found if finding.module.name in names]
  routed = [finding for finding in shown if finding.module.routed]
  for part, those in _parts(routed):
    maps = {f.module.name: _heat(f, kind, "weight", names[f.module.name]) for f in those}
    yield Picture(
      f"weight_by_{short}{part}",
      panels.heat_maps(
        f"Weight of each {_called(those)} by {kind}, against its mean over all tokens",
        maps,
        across=_called(those),
        down="",
        unit="mean weight − mean over all",
        centre=0.0,
      ),
      f"Orange: more weight at tokens of this {kind} than on average.",
    )
  for name, when, those in (("norm", "before", shown), ("norm_scaled", "after", routed)):
    those = [finding for finding in those if finding.module.dim]
    for part, some in _parts(those):
      maps = {f.module.name: _heat(f, kind, name, names[f.module.name]) for f in some}
      yield Picture(
        f"{name}_by_{short}{part}",
        panels.heat_maps(
          f"Norm of each {_called(some)}'s output {when} the competition, by {kind}",
          maps,
          across=_called(some),
          down="",
          unit="log₂ (mean norm / mean over all)",
          centre=0.0,
        ),
        f"Orange: the output is longer at tokens of this {kind} than on average; 1 is twice as"
        " long.",
      )


def _parts(found: Sequence[Finding]) -> Iterator[tuple[str, Sequence[Finding]]]:
  for number, start in enumerate(range(0, len(found), _PAGE)):
    yield ("" if len(found) <= _PAGE else f"_{number + 1}", found[start : start + _PAGE])


def _heat(finding: Finding, kind: str, name: str, names: Sequence[str]) -> panels.Heat:
  values, mean = finding.totals.by(kind, name), finding.totals.mean(name)
  relative = values - mean
  if name != "weight":
    relative = np.log2(np.where(values > 0, values, np.nan) / np.where(mean > 0, mean, np.nan))
  return panels.Heat(relative, names, [str(unit) for unit in range(values.shape[1])])


def information(found: Sequence[Finding]) -> Iterator[Picture]:
  """Mutual information beside shuffled categories and the untrained model."""
  routed = [finding for finding in found if finding.information]
  charts = {}
  for name in (POSITION, WORD, TAG):
    those = [finding for finding in routed if name in finding.information]
    if those:
      infos = [finding.information[name] for finding in those]
      series = [
        panels.Series("trained", [info.bits for info in infos]),
        panels.Series("untrained", [info.untrained for info in infos]),
        panels.Series(
          "shuffled",
          [info.shuffled.value for info in infos],
          [info.shuffled.low for info in infos],
          [info.shuffled.high for info in infos],
        ),
      ]
      charts[name] = ([finding.module.title for finding in those], series)
  if charts:
    yield Picture(
      "information",
      panels.forest(
        f"What the category of a token tells of the {_called(routed)}",
        charts,
        across="mutual information, bits",
        reference=None,
      ),
      "Shuffled: the same categories dealt out at random, with the central 95 % of the shuffles."
      " Untrained: fresh parameters.",
    )


def agreement(found: Sequence[Finding]) -> Iterator[Picture]:
  """Rank correlations of weight and norm, and mean weight by tenth of the norm."""
  routed = [(f, f.agreement) for f in found if f.agreement is not None]
  if not routed:
    return
  unit = _called([finding for finding, _ in routed])
  titles = [finding.module.title for finding, _ in routed]
  everything = [a for _, a in routed]
  charts = {
    f"over {unit}s (means of a batch)": (
      titles,
      [
        panels.Series("trained", [a.between for a in everything]),
        panels.Series("untrained", [a.untrained_between for a in everything]),
      ],
    ),
    f"over (token, {unit}) pairs": (
      titles,
      [
        _estimates("trained", [a.pairs for a in everything]),
        panels.Series("untrained", [a.untrained_pairs for a in everything]),
      ],
    ),
    f"over tokens, within a {unit}": (
      titles,
      [_estimates("trained", [a.within for a in everything])],
    ),
  }
  yield Picture(
    "weight_and_norm",
    panels.forest(
      "Rank correlation of log weight and log norm before scaling",
      charts,
      across="Spearman's correlation",
    ),
    "Left of 0: what is long gets little weight, as if to cancel it. Lines: 95 % intervals from"
    " blocks of sentences.",
  )
  yield Picture(
    "weight_by_norm",
    panels.lines(
      f"Mean weight of each {unit} by tenth of the norm of its output",
      {f.module.name: f.deciles for f, _ in routed},
      across="mean norm before scaling",
      up="mean weight",
      logarithmic=True,
    ),
    f"Each line is one {unit}, named at its right end; its ten points hold equal numbers of"
    " tokens.",
  )


def _estimates(name: str, values: Sequence[Estimate]) -> panels.Series:
  return panels.Series(
    name, [v.value for v in values], [v.low for v in values], [v.high for v in values]
  )


def redundancy(found: Sequence[Finding]) -> Iterator[Picture]:
  """How alike units are: their outputs, and when they get their weight."""
  kinds = (
    ("similarity", "Similarity of the {}s' outputs (linear CKA)", "CKA", None),
    ("weight_correlation", "Correlation of the {}s' weights over tokens", "correlation", 0.0),
  )
  captions = {
    "similarity": "0: no linear relation of one output to the other; 1: the same up to"
    " a rotation. Before scaling.",
    "weight_correlation": "Weights of a token sum to 1, so that units that share it evenly have"
    " −1/(units − 1) with each other.",
  }
  for name, title, unit, centre in kinds:
    for part, those in _parts([f for f in found if getattr(f, name).size]):
      maps = {}
      for finding in those:
        values = np.array(getattr(finding, name))
        np.fill_diagonal(values, np.nan)
        units = [str(u) for u in range(len(values))]
        maps[finding.module.name] = panels.Heat(values, units, units)
      yield Picture(
        f"{name}{part}",
        panels.heat_maps(
          title.format(_called(those)),
          maps,
          across=_called(those),
          down=_called(those),
          unit=unit,
          centre=centre,
          numbers=all(len(heat.rows) <= 8 for heat in maps.values()),
        ),
        captions[name],
      )


def signatures(found: Sequence[Finding]) -> Iterator[Picture]:
  """Norms of the signatures."""
  norms = {f.module.name: f.totals.signatures for f in found if len(f.totals.signatures)}
  if norms:
    unit = _called([finding for finding in found if finding.module.routed])
    yield Picture(
      "signatures",
      panels.bars(f"Norm of each {unit}'s signature", norms, across=unit, up="norm"),
      "Euclidean norms of the learned vectors that say which tokens suit it.",
    )
