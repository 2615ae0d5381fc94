"""What is wrong with questions before a model is trained on them, each with where it stands."""

import hashlib

from compmod_jax.data.base import DataError
from compmod_jax.data.check import Finding, Notes, SplitReport
from compmod_jax.data.qa.mixed import Mixed, name_of
from compmod_jax.data.qa.question import Question, Questions
from compmod_jax.data.qa.tokenized import QuestionTokenizer

Seen = dict[bytes, str]


def check_questions(
  name: str,
  questions: Questions,
  tokenizer: QuestionTokenizer,
  first: int = 5,
  seen: Seen | None = None,
) -> tuple[SplitReport, Seen]:
  """Looks at every question of a set's split.

  Warns of repeated questions, passages or (without one) questions that are in training too,
  answers of extractive questions that their passage does not have, passages that are cut, and
  questions that do not fit at all.

  Args:
    name: of set and split, for the report.
    questions: of the split.
    tokenizer: from questions to tokens.
    first: places listed for each kind of finding.
    seen: hashes of training passages and where they stand, when this is another split.

  Returns:
    The report, and the passages of these questions.
  """
  notes, own, asked, lengths = Notes(first), Seen(), Seen(), list[int]()
  repeated = notes.kind("duplicate", "warning")
  known = notes.kind("passage in train", "warning") if seen is not None else None
  missing = notes.kind("answer not in passage", "warning")
  cut = notes.kind("passage cut", "warning")
  long = notes.kind("too long", "warning")
  tokenized = tokenizer.many(questions.items)
  for number, (question, tokens) in enumerate(zip(questions.items, tokenized, strict=True)):
    place = questions.where(number)
    whole = _hash(question.passage, question.question, *question.options)
    if asked.setdefault(whole, place) != place:
      repeated(f"{place}: the same question as {asked[whole]}")
    passage = _hash(question.passage or question.question)
    own.setdefault(passage, place)
    if known and seen and passage in seen:
      known(f"{place}: also {seen[passage]}")
    if question.format == "extractive" and not _there(question):
      missing(f"{place}: {question.answer[:40]!r}")
    if tokens is None:
      long(f"{place}: over {tokenizer.length} tokens without its passage; left out of training")
      continue
    lengths.append(len(tokens.ids))
    if tokens.truncated:
      cut(f"{place}: the {tokenizer.truncate} of its passage, to {tokenizer.length} tokens")
  mean = sum(lengths) / max(len(lengths), 1)
  count, most = len(questions.items), max(lengths, default=0)
  report = SplitReport(name, count, "tokens", (mean,), (most,), notes.findings, "questions")
  return report, own


def check_sets(given: Mixed, tokenizer: QuestionTokenizer, first: int = 5) -> list[SplitReport]:
  """Checks every split of every set; files whose content is wrong are an error of their split.

  Passages are looked for in the training questions of all sets.

  Raises:
    UserError: a split cannot be found at all.
  """
  reports, seen = list[SplitReport](), Seen()
  for split in given.splits():
    for data, own_name in given.sets(split):
      name = f"{name_of(data)} {own_name}"
      try:
        training = split == "train"
        report, own = check_questions(
          name, data.load(own_name), tokenizer, first, None if training else seen
        )
        seen |= own if training else {}
      except DataError as error:
        findings = {"unreadable": Finding("unreadable", "error", 1, [str(error)])}
        report = SplitReport(name, 0, "tokens", (0.0,), (0,), findings, "questions")
      reports.append(report)
  return reports


def _there(question: Question) -> bool:
  """Whether the passage has the words of an answer, whatever their case; true without answers.

  An answer of several spans is one text, joined by commas; the passage has to have each of them. Of
  a scattered answer it has to have each of the words.
  """
  passage = " ".join(question.passage.lower().split())
  words = [" ".join(answer.lower().split()) for answer in question.answers]
  if question.info.get("scattered"):
    parts = [word.split() for word in words]
  elif question.info.get("spans", 1) > 1:
    parts = [word.split(", ") for word in words]
  else:
    parts = [[word] for word in words]
  return not words or any(all(part in passage for part in answer) for answer in parts)


def _hash(*texts: str) -> bytes:
  digest = hashlib.blake2b(digest_size=16)
  for text in texts:
    data = " ".join(text.split()).encode(errors="replace")
    digest.update(len(data).to_bytes(8, "big") + data)  # else "ab", "c" would equal "a", "bc"
  return digest.digest()
