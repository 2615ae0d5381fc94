"""What the report on heads says in words, from its numbers alone."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from compmod_jax.analysis.heads.findings import Agreement, Finding, Information
from compmod_jax.analysis.labels import POSITION, TAG, WORD, Labels
from compmod_jax.analysis.subject import called

_CATEGORIES = {POSITION: "position in the sentence", WORD: "word", TAG: "part of speech"}
_EVEN = 0.02  # mean weights that differ by less than this are called even


def sentences(
  found: Sequence[Finding], labels: dict[str, Sequence[Labels]], streams: dict[str, str]
) -> list[str]:
  """What the numbers show, also where they show nothing.

  Args:
    found: of all modules.
    labels: stream -> its labels.
    streams: name of a module -> its stream.
  """
  routed = [finding for finding in found if finding.module.routed]
  said = [_shares(routed)] if routed else []
  for name in (TAG, WORD, POSITION):
    those = [finding for finding in routed if name in finding.information]
    if those:
      said.append(_specialisation(name, those, labels, streams))
  agreeing = [finding for finding in routed if finding.agreement is not None]
  if agreeing:
    said += [_pairs(agreeing), _between(agreeing)]
  if not routed:
    said.append(
      "No module of this model has a router: nothing competes. Norms and similarities below are the"
      " control for models in which something does."
    )
  return [*said, *_norms(found), *_redundancy(found)]


def _shares(routed: Sequence[Finding]) -> str:
  even, uneven = [], []
  for finding in routed:
    means = finding.totals.mean("weight")
    top, low = int(np.argmax(means)), int(np.argmin(means))
    if means[top] - means[low] < _EVEN:
      even.append(finding.module.title)
    else:
      uneven.append(
        f"{finding.module.title} from {means[low]:.2f} ({finding.module.unit} {low}) to"
        f" {means[top]:.2f} ({finding.module.unit} {top})"
      )
  equal = sorted({f"{1 / finding.module.units:.2f}" for finding in routed}, reverse=True)
  said = f"Mean weights (equal shares: {_listed(equal)}): "
  if even:
    uneven.append(f"nearly even in {_listed(even)}")
  return f"{said}{'; '.join(uneven)}."


def _specialisation(
  name: str,
  found: Sequence[Finding],
  labels: dict[str, Sequence[Labels]],
  streams: dict[str, str],
) -> str:
  what = _CATEGORIES[name]
  beyond = [f for f in found if _beyond_chance(f.information[name])]
  if not beyond:
    return (
      f"{what.capitalize()}: nothing specialises beyond the shuffled control in"
      f" {_listed([f.module.title for f in found])}."
    )
  learned = [f for f in beyond if _beyond_untrained(f.information[name])]
  text = f"{what.capitalize()}: "
  if learned:
    best = max(learned, key=lambda f: f.information[name].bits)
    told = "; ".join(f"{f.module.title} {_bits(f.information[name])}" for f in learned)
    text += f"tells which {_called(found)} gets the weight, beyond shuffled categories, in {told}."
    text += _preference(name, best, labels[streams[best.module.name]])
  rest = [f for f in beyond if f not in learned]
  if rest:
    told = "; ".join(f"{f.module.title} {_bits(f.information[name])}" for f in rest)
    text += " " if learned else ""
    text += f"In {told}, beyond shuffled categories, but no more than before training."
  chance = [f.module.title for f in found if f not in beyond]
  if chance:
    text += f" Within the shuffled control: {_listed(chance)}."
  return text


def _beyond_chance(info: Information) -> bool:
  return math.isfinite(info.most) and info.bits > info.most


def _beyond_untrained(info: Information) -> bool:
  return not math.isfinite(info.untrained) or info.bits > info.untrained


def _bits(info: Information) -> str:
  share = f", {100 * info.bits / info.limit:.0f} % of what is possible" if info.limit > 0 else ""
  before = f", {info.untrained:.3f} untrained" if math.isfinite(info.untrained) else ""
  return f"({info.bits:.3f} bits{share}; {info.shuffled.value:.4f} shuffled{before})"


def _preference(name: str, finding: Finding, labels: Sequence[Labels]) -> str:
  """The frequent category at which a unit's weight is furthest above the unit's mean."""
  categories = next(made.categories for made in labels if made.name == name)
  counts = finding.totals.sums["by"][name]["count"]
  excess = finding.totals.by(name, "weight") - finding.totals.mean("weight")
  often = counts >= max(10, 0.005 * counts.sum())
  if not often.any():
    return ""
  excess = np.where(often[:, None], excess, -np.inf)
  category, unit = np.unravel_index(int(np.argmax(excess)), excess.shape)
  mean = float(finding.totals.mean("weight")[unit])
  called = f"position {categories[category]}" if name == POSITION else f"“{categories[category]}”"
  return (
    f" The strongest preference in {finding.module.title}: {finding.module.unit} {unit} has"
    f" {mean + excess[category, unit]:.2f} of the weight at {called} and {mean:.2f} on average."
  )


def _pairs(found: Sequence[Finding]) -> str:
  """The cancelling of weights by norms, over (token, unit) pairs and within units."""
  groups: dict[str, list[str]] = {"less": [], "more": [], "neither": []}
  within = []
  for finding, a in _agreements(found):
    sure = a.pairs.high < 0 or a.pairs.low > 0
    group = ("less" if a.pairs.value < 0 else "more") if sure else "neither"
    before = f", {_signed(a.untrained_pairs)} untrained" if _known(a.untrained_pairs) else ""
    groups[group].append(f"{finding.module.title} ({_signed(a.pairs.value)}{before})")
    within.append(f"{finding.module.title} {_signed(a.within.value)}")
  unit = _called(found)
  parts = [
    f"what is long gets {group} weight in {_listed(groups[group])}"
    for group in ("less", "more")
    if groups[group]
  ]
  if groups["neither"]:
    parts.append(f"no clear relation in {_listed(groups['neither'])}")
  return (
    f"Do norms cancel weights? Over all (token, {unit}) pairs: {'; '.join(parts)} (Spearman's"
    f" correlation of weight and norm before scaling). Over the tokens of one {unit}:"
    f" {', '.join(within)}."
  )


def _between(found: Sequence[Finding]) -> str:
  """The same over the means of units, with what chance does to so few."""
  told = []
  for finding, a in _agreements(found):
    before = f" ({_signed(a.untrained_between)} untrained)" if _known(a.untrained_between) else ""
    told.append(f"{finding.module.title} {_signed(a.between)}{before}")
  units, unit = min(finding.module.units for finding in found), _called(found)
  text = f"The same {unit} against {unit}, by means of a batch: {', '.join(told)}."
  if 1 < units <= 6:
    orders = math.factorial(units)
    text += (
      f" {units} {unit}s have only {orders} orders: by chance alone one module in"
      f" {max(1, orders // 2)} shows +1 or −1."
    )
  return text


def _agreements(found: Sequence[Finding]) -> list[tuple[Finding, Agreement]]:
  return [(f, f.agreement) for f in found if f.agreement is not None]


def _called(found: Sequence[Finding]) -> str:
  return called(finding.module for finding in found)


def _known(value: float) -> bool:
  return math.isfinite(value)


def _signed(value: float) -> str:
  if not math.isfinite(value):
    return "not known"  # too few tokens, or a weight or norm that never varies
  return f"{value:+.2f}".replace("-", "−")


def _norms(found: Sequence[Finding]) -> Iterator[str]:
  """How much units differ in norm, competing or not."""
  for routed, where in ((True, "where units compete"), (False, "where nothing competes")):
    ratios = {}
    for finding in found:
      if finding.module.dim and finding.module.routed == routed:
        norms = finding.totals.mean("norm")
        ratios[finding.module.title] = float(norms.max() / max(norms.min(), 1e-12))
    if ratios:
      most = max(ratios, key=lambda title: ratios[title])
      yield (
        f"Norms {where}: the longest unit's output is {np.median(list(ratios.values())):.2f} times"
        f" the shortest one's in the median module, at most {ratios[most]:.2f} times ({most})."
      )


def _redundancy(found: Sequence[Finding]) -> Iterator[str]:
  shown = [finding for finding in found if finding.similarity.size]
  best, where, all_pairs = -1.0, "", []
  for finding in shown:
    below = np.tril_indices(finding.module.units, -1)
    values = finding.similarity[below]
    values = np.where(np.isfinite(values), values, -1.0)
    all_pairs += [float(value) for value in values if value >= 0]
    if len(values) and values.max() > best:
      best, place = float(values.max()), int(np.argmax(values))
      one, other = int(below[1][place]), int(below[0][place])
      where = f"{finding.module.unit}s {one} and {other} of {finding.module.title}"
  if all_pairs:
    yield (
      f"Redundancy: two units of a module have a linear CKA of {np.median(all_pairs):.2f} in the"
      f" median; the most alike are {where} ({best:.2f})."
    )


def _listed(names: Sequence[str]) -> str:
  return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
