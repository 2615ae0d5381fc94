"""What is wrong with running text before it is trained on, each with where it stands."""

import hashlib
import itertools
from collections.abc import Callable, Sequence

from compmod_jax.data.base import DataError
from compmod_jax.data.check import Finding, Notes, SplitReport, listing
from compmod_jax.data.sources.documents import Documents
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

_CHUNK = 1024


def check_documents(
  split: str,
  documents: Documents,
  tokenizer: Tokenizer,
  first: int = 5,
  seen: dict[bytes, str] | None = None,
) -> tuple[SplitReport, dict[bytes, str]]:
  """Looks at every document of a split.

  Finds a split without text (an error); and as warnings repeated documents, text that is unknown to
  the tokenizer, and documents that are in training too.

  Args:
    split: name, for the report.
    documents: of the split.
    tokenizer: from text to ids.
    first: places listed for each kind of finding.
    seen: hashes of the training documents and where they stand, when this is another split.

  Returns:
    The report, and the same of these documents.
  """
  notes, own = Notes(first), dict[bytes, str]()
  empty = notes.kind("no text", "error")
  duplicate = notes.kind("duplicate", "warning")
  known = notes.kind("document in train", "warning") if seen is not None else None
  unknown = notes.kind("unknown", "warning")
  lengths: list[int] = []
  placed = documents.placed()
  while chunk := list(itertools.islice(placed, _CHUNK)):
    encoded = tokenizer.encode_batch([text for _, text in chunk])
    for (place, text), ids in zip(chunk, encoded, strict=True):
      lengths.append(len(ids) + 1)
      digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
      if own.setdefault(digest, place) != place:
        duplicate(f"{place}: the same document as {own[digest]}")
      if seen is not None and known and digest in seen:
        known(f"{place}: also {seen[digest]}")
      if tokenizer.unk in ids and (lacking := tokenizer.unknown(text)):
        unknown(f"{place}: has {listing(lacking)}")
  if not lengths:
    empty(f"{split} has no document with text")
  mean = sum(lengths) / max(len(lengths), 1)
  return SplitReport(
    split, len(lengths), "tokens", (mean,), (max(lengths, default=0),), notes.findings, "documents"
  ), own


def check_splits(
  load: Callable[[str], Documents],
  splits: Sequence[str],
  make_tokenizer: Callable[[], Tokenizer],
  first: int = 5,
) -> list[SplitReport]:
  """Checks every split; files whose content is wrong are an error of their split.

  Args:
    load: name of a split -> its documents.
    splits: their names, "train" first.
    make_tokenizer: trains or reads the tokenizer.
    first: places listed for each kind of finding.

  Raises:
    UserError: a split cannot be found at all, or no tokenizer can be trained.
  """
  reports: list[SplitReport] = []
  seen: dict[bytes, str] | None = None
  tokenizer: Tokenizer | None = None
  for split in splits:
    try:
      documents = load(split)
      tokenizer = tokenizer or make_tokenizer()
      report, own = check_documents(split, documents, tokenizer, first, seen)
    except DataError as error:
      findings = {"unreadable": Finding("unreadable", "error", 1, [str(error)])}
      empty = (0.0,), (0,)
      reports.append(SplitReport(split, 0, "tokens", *empty, findings, "documents"))
      continue
    reports.append(report)
    seen = own if split == "train" else seen
  return reports
