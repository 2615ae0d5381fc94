"""What heads and experts do: the analyses of Kolios 2023, section 5.4, on a split of a data set."""

import dataclasses
from collections.abc import Iterator

from compmod_jax.analysis.heads import summary as heads_summary
from compmod_jax.analysis.heads import tables
from compmod_jax.analysis.heads.findings import Finding, findings, record
from compmod_jax.analysis.heads.sums import Sampling, collect, untrained
from compmod_jax.analysis.labels import TAG, WORD, Labels, labels_of
from compmod_jax.analysis.reading import Reader, reader, word_key
from compmod_jax.analysis.report.page import Page, Picture, Section
from compmod_jax.analysis.subject import Subject
from compmod_jax.core import errors


@dataclasses.dataclass(frozen=True)
class Heads:
  """What heads and experts do: weights and norms by position, word and part of speech; how far they
  specialise, beside shuffled categories; whether norms cancel weights; which ones are redundant."""

  words: tuple[str, ...] = ()
  """Words to look at by themselves, whatever their case."""
  frequent: int = 12
  """So many of the most frequent words besides."""
  positions: int = 12
  """So many first positions."""
  shuffles: int = 20
  """Shuffles of the categories, as a control."""
  untrained: bool = True
  """Also measure the same model with fresh parameters, as another control."""

  def __post_init__(self):
    for field, least in (("frequent", 0), ("positions", 1), ("shuffles", 1)):
      value = getattr(self, field)
      errors.check(value >= least, f"--{field} is {value}; it must be at least {least}.")

  def run(self, subject: Subject) -> Page:
    """Measures the model and tells what it found.

    Raises:
      UserError: the split has nothing to read, or gold tags do not fit its words.
    """
    read = reader(subject.task)
    errors.check(
      bool(subject.modules),
      "The model has neither heads nor experts: none of its sites ends in heads or experts.",
    )
    labels = {
      stream: labels_of(
        subject,
        read,
        stream,
        words=self.words,
        frequent=self.frequent,
        positions=self.positions,
      )
      for stream in read.streams
    }
    sampling = Sampling(shuffles=self.shuffles, seed=subject.seed)
    totals = collect(subject, read, labels, sampling)
    routed = [module for module in subject.modules if module.routed]
    before = []
    if self.untrained and routed:
      fresh = dataclasses.replace(sampling, shuffles=0)
      before = collect(subject, read, labels, fresh, params=untrained(subject), modules=routed)
    return self._page(subject, read, labels, findings(totals, before))

  def _page(
    self, subject: Subject, read: Reader, labels: dict[str, list[Labels]], found: list[Finding]
  ) -> Page:
    streams = {finding.module.name: read.stream(finding.module.outputs) for finding in found}
    summary = heads_summary.sentences(found, dict(labels), streams)
    summary += self._not_found(labels)
    routed = sum(finding.module.routed for finding in found)
    count = len(subject.numbers)
    return Page(
      title=f"Heads and experts on {subject.split}",
      description=f"{subject.task.describe()} Read: {count:,} examples of the split"
      f" {subject.split!r}; a decoder reads its references, and its position's word is the one read"
      " there, before the one that it predicts. Start tokens and padding are left out.",
      summary=summary,
      sections=list(_sections(subject, read, labels, found)),
      tiles=[
        ("examples", f"{count:,}", f"of the split {subject.split}"),
        ("modules", f"{len(found)}", f"{routed} of them routed"),
      ],
      data={
        "split": subject.split,
        "examples": count,
        "settings": dataclasses.asdict(self),
        "labels": {
          stream: {one.name: list(one.categories) for one in made}
          for stream, made in labels.items()
        },
        "streams": streams,
        "modules": {finding.module.name: record(finding) for finding in found},
      },
    )

  def _not_found(self, labels: dict[str, list[Labels]]) -> list[str]:
    seen = {
      c for made in labels.values() for one in made if one.name == WORD for c in one.categories
    }
    missing = [word for word in self.words if word_key(word) not in seen]
    return [f"Not among the words read: {', '.join(missing)}."] if missing else []


def _sections(
  subject: Subject, read: Reader, labels: dict[str, list[Labels]], found: list[Finding]
) -> Iterator[Section]:
  from compmod_jax.analysis.heads import figures as pictures

  routed = any(finding.module.routed for finding in found)
  everything = tables.categories(found, labels, read.stream)
  yield Section("By position", [*pictures.positions(found)])
  worded = [*pictures.categories(found, labels, read.stream, WORD)]
  yield Section("By word", worded, () if worded else ("No words were asked for.",))
  tagged = [*pictures.categories(found, labels, read.stream, TAG)]
  no_gold = () if tagged else ("The data have no gold parts of speech.",)
  yield Section("By part of speech", [*tagged, everything], no_gold)
  if routed:
    table = tables.information(found)
    yield Section("Specialisation", [*pictures.information(found), table])
    table = tables.agreement(found)
    yield Section("Weights against norms", [*pictures.agreement(found), table])
  redundancy = [*pictures.redundancy(found), tables.redundancy(found)]
  yield Section("Redundancy", redundancy)
  yield Section("Units", [*pictures.signatures(found), tables.units(found)])
  yield _over_training(subject)


def _over_training(subject: Subject) -> Section:
  from compmod_jax.analysis.heads import over_training

  drawn = [
    Picture(f"training_{name}", figure, caption)
    for name, caption, figure in over_training.pictures(subject.records)
  ]
  text = (
    "There is no log beside the model."
    if not subject.records
    else ("The log has no norms of signatures and no weights by position.")
  )
  return Section("Over training", drawn, () if drawn else (text,))
