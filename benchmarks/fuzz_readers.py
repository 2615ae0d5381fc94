"""Every reader of files of others, with a file of its format that is right."""

import csv
import dataclasses
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from compmod_jax.data.check import Limits, check_pairs
from compmod_jax.data.check_documents import check_documents
from compmod_jax.data.minimal_pairs import read_minimal_pairs, treebank_style
from compmod_jax.data.qa.check import check_questions
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.readers import ReaderName
from compmod_jax.data.qa.tokenized import TRAINED_TOKENS, QuestionTokenizer
from compmod_jax.data.sources.documents import TextDocuments
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig, train_tokenizer
from compmod_jax.data.tokenizers.vocabulary import Tokenizer

Damage = Literal["lines", "json", "bytes"]
LINES = 10  # of a file


@dataclasses.dataclass(frozen=True)
class Reader:
  """A reader and what it reads.

  Attributes:
    files: name -> content that is right; every one of them is damaged by turns.
    read: reads the files of a folder, and does with what it finds what a training would do first;
      returns how many lines were lost without a word.
    damage: how files are damaged: line by line, as one JSON text, or byte by byte.
  """

  files: Mapping[str, bytes]
  read: Callable[[Path], int]
  damage: Damage = "lines"


def readers() -> dict[str, Reader]:
  """All readers by name."""
  tokenizer = train_tokenizer(_SENTENCES, TokenizerConfig("bpe", 80, special_tokens=TRAINED_TOKENS))
  return {
    **{name: _minimal_pairs(name, tokenizer) for name in _MINIMAL_PAIRS},
    **_documents(tokenizer),
    **_pairs(tokenizer),
    **_questions(tokenizer),
  }


_SENTENCES = [
  "the dog sleeps in the garden .",
  "a cat that the dogs see runs away .",
  "where is the bird ?",
  "two fish swim , and one bird sings .",
  "we know that it rains .",
]


def _text(lines: Iterable[str]) -> bytes:
  return "".join(f"{line}\n" for line in lines).encode()


def _table(rows: Sequence[Mapping[str, Any]], delimiter: str) -> bytes:
  buffer = io.StringIO(newline="")
  writer = csv.DictWriter(buffer, list(rows[0]), delimiter=delimiter, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return buffer.getvalue().encode()


def _json_lines(rows: Iterable[Any]) -> bytes:
  return _text(json.dumps(row) for row in rows)


def _filled(content: bytes) -> int:
  """Lines that are not blank, as a reader counts them."""
  return sum(bool(line.strip()) for line in content.decode("utf-8-sig").split("\n"))


# Minimal pairs.

_GULORDAVA = _table(
  [
    {
      "pattern": "N_V",
      "constr_id": str(number),
      "sent_id": "1",
      "form": form,
      "class": kind,
      "type": "original",
      "prefix": "the dog that the cats see",
      "n_attr": "1",
    }
    for number in range(LINES // 2)
    for form, kind in (("sleeps", "correct"), ("sleep", "wrong"))
  ],
  "\t",
)
_LINZEN = _table(
  [
    {
      "orig_sentence": "the dog near the cats sleeps .",
      "verb_index": "6",
      "verb_pos": "VBZ",
      "n_diff_intervening": "1",
    }
  ]
  * LINES,
  "\t",
)
_BLIMP = _json_lines(
  {"sentence_good": "the dog sleeps .", "sentence_bad": "the dog sleep .", "UID": "agreement"}
  for _ in range(LINES)
)
_MINIMAL_PAIRS = {"gulordava": _GULORDAVA, "linzen": _LINZEN, "blimp": _BLIMP}


def _minimal_pairs(kind: str, tokenizer: Tokenizer) -> Reader:
  def read(folder: Path) -> int:
    pairs = read_minimal_pairs(kind, str(folder / "pairs.txt"))
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    styled = treebank_style(texts, tokenizer)
    tokenizer.encode_batch([*texts, *styled])
    expected = _filled((folder / "pairs.txt").read_bytes())
    found = {"gulordava": 2 * len(pairs) + 1, "linzen": len(pairs) + 1, "blimp": len(pairs)}[kind]
    return expected - found + len(texts) - len(styled)

  return Reader({"pairs.txt": _MINIMAL_PAIRS[kind]}, read)


# Running text.


def _documents(tokenizer: Tokenizer) -> dict[str, Reader]:
  text = _text(_SENTENCES * 2)
  rows = _json_lines({"text": sentence} for sentence in _SENTENCES * 2)

  def reading(unit: Any, name: str) -> Callable[[Path], int]:
    def read(folder: Path) -> int:
      data = TextDocuments(str(folder), unit=unit)
      found = 0
      for split in data.splits():
        check_documents(split, data.load(split), tokenizer)
        found += sum(1 for _ in data.load(split))
      if unit != "line":
        return 0
      content = (folder / name).read_bytes()
      lines = (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf-8-sig")
      if name.endswith(".jsonl"):
        texts = [json.loads(line)["text"] for line in lines.split("\n") if line.strip()]
      else:
        texts = lines.split("\n")
      return sum(bool(one.strip()) for one in texts) - found

    return read

  return {
    "documents: paragraphs": Reader(
      {"a.txt": text.replace(b"?\n", b"?\n\n")}, reading("paragraph", "a.txt")
    ),
    "documents: files": Reader({"a.txt": text, "b.txt": text}, reading("file", "a.txt")),
    "documents: lines": Reader({"a.txt": text}, reading("line", "a.txt")),
    "documents: JSON lines": Reader({"a.jsonl": rows}, reading("line", "a.jsonl")),
    "documents: gzip": Reader(
      {"a.txt.gz": gzip.compress(text, mtime=0)}, reading("line", "a.txt.gz"), "bytes"
    ),
  }


# Sentence pairs.


def _pairs(tokenizer: Tokenizer) -> dict[str, Reader]:
  source, target = _text(_SENTENCES * 2), _text(one.upper() for one in _SENTENCES * 2)
  columns = _text(f"{one}\t{one.upper()}\t{n}" for n, one in enumerate(_SENTENCES * 2))
  limits = Limits(longest=64)

  def reading(name: str, **fields: Any) -> Callable[[Path], int]:
    def read(folder: Path) -> int:
      pairs = TextData(str(folder), **fields).load("train")
      check_pairs("train", pairs, (tokenizer, tokenizer), limits)
      lines = (folder / name).read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
      return len(lines) - len(pairs)

    return read

  return {
    "pairs: two files": Reader({"train.de": source, "train.en": target}, reading("train.de")),
    "pairs: columns": Reader(
      {"train.tsv": columns}, reading("train.tsv", pattern="{split}.tsv", lowercase=True)
    ),
  }


# Questions.

_STORY = "The dog barked. Anna went home."
_CHOICES = ["a cat", "a dog", "Anna"]


def _squad(**more: Any) -> bytes:
  asked = [
    {"id": str(n), "question": "Who barked?", "answers": [{"text": "The dog", "answer_start": 0}]}
    for n in range(3)
  ]
  passage = {"context": _STORY, "background": "Dogs bark.", "situation": "One did.", "qas": asked}
  return json.dumps({"data": [{"title": "A", "paragraphs": [passage, passage]}]} | more).encode()


_DROP = {
  "answer": {"number": "", "spans": ["two"], "date": {}},
  "validated_answers": [{"number": "2"}, {"date": {"day": "1", "month": "May", "year": "1900"}}],
}
_FILES: dict[ReaderName, dict[str, bytes]] = {
  "jsonl": {
    "q.jsonl": _json_lines(
      [
        {"format": "extractive", "question": "Who?", "passage": _STORY, "answers": ["Anna"]},
        {"format": "yes_no", "question": "Is it?", "answers": ["no"], "info": {"a": 1}},
        {"format": "multiple_choice", "question": "?", "options": _CHOICES, "label": 2},
        {"format": "abstractive", "question": "Why?", "answers": ["so"]},
      ]
      * 3
    )
  },
  "race": {
    "q.jsonl": _json_lines(
      [
        {"article": _STORY, "question": "Who?", "options": _CHOICES, "answer": "B", "id": "high1"},
        {
          "article": _STORY,
          "questions": ["Who?", "What?"],
          "options": [_CHOICES, _CHOICES],
          "answers": ["A", "B"],
        },
      ]
      * (LINES // 2)
    )
  },
  "mctest": {
    "q.tsv": _text(
      ["\t".join([f"id{n}", "", _STORY, *["one: Who?", *_CHOICES, "?"] * 2]) for n in range(LINES)]
    ),
    "q.ans": _text(["A\tB"] * LINES),
  },
  "squad": {"q.json": _squad(version="2.0")},
  "quoref": {"q.json": _squad()},
  "ropes": {"q.json": _squad()},
  "boolq": {
    "q.jsonl": _json_lines(
      [{"question": "is it", "passage": _STORY, "answer": True, "title": "A"}] * LINES
    )
  },
  "boolq_contrast": {
    "q.json": json.dumps(
      {
        "data": [
          {
            "title": "A",
            "paragraph": _STORY,
            "question": "is it",
            "perturbed_questions": [{"perturbed_q": "is it not", "answer": "TRUE"}] * 2,
          }
        ]
        * 3
      }
    ).encode()
  },
  "arc": {
    "q.jsonl": _json_lines(
      [
        {
          "id": "1",
          "question": {
            "stem": "Who?",
            "choices": [{"label": label, "text": label} for label in "ABCD"],
          },
          "answerKey": "B",
        }
      ]
      * LINES
    )
  },
  "options": {
    "q.jsonl": _json_lines(
      [{"question": "Who?", "options": _CHOICES, "answer": 1, "passage": _STORY}] * LINES
    )
  },
  "piqa": {
    "q.jsonl": _json_lines([{"goal": "Eat", "sol1": "fork", "sol2": "hand"}] * LINES),
    "q-labels.lst": _text(["0", "1"] * (LINES // 2)),
  },
  "siqa": {
    "q.jsonl": _json_lines(
      [{"context": _STORY, "question": "Who?", "answerA": "a", "answerB": "b", "answerC": "c"}]
      * LINES
    ),
    "q-labels.lst": _text(["1", "3"] * (LINES // 2)),
  },
  "winogrande": {
    "q.jsonl": _json_lines(
      [{"qID": "x-1", "sentence": "_ ran", "option1": "A", "option2": "B", "answer": "2"}] * LINES
    )
  },
  "narrativeqa": {
    "q.csv": _table(
      [{"document_id": "d", "set": "valid", "question": "Who?", "answer1": "A", "answer2": "B"}]
      * LINES,
      ",",
    ),
    "summaries.csv": _table([{"document_id": "d", "set": "valid", "summary": _STORY}] * 3, ","),
    "documents.csv": _table([{"document_id": "d", "kind": "movie"}] * 3, ","),
  },
  "fairytaleqa": {
    "q-questions.csv": _table(
      [
        {
          "question": "Who?",
          "cor_section": "1,2",
          "ex-or-im1": "explicit",
          "attribute1": "character",
          "answer1": "Anna",
        }
      ]
      * LINES,
      ",",
    ),
    "q-story.csv": _table([{"section": n, "text": _STORY} for n in (1, 2, "9" * 20)], ","),
  },
  "subjqa": {
    "q.csv": _table(
      [
        {
          "domain": "books",
          "q_review_id": str(n // 2),
          "question": "Who?",
          "review": f"{_STORY} ANSWERNOTFOUND",
          "human_ans_spans": "The dog",
          "human_ans_indices": "(0, 7)",
          "is_ques_subjective": "True",
        }
        for n in range(LINES)
      ],
      ",",
    )
  },
  "drop": {
    "q.json": json.dumps(
      {"a": {"passage": _STORY, "qa_pairs": [{"question": "How many?", "query_id": "1"} | _DROP]}}
    ).encode()
  },
}
# Readers that give a question, or a note on one left out, for every line that is not blank.
_LINE_BY_LINE = ("jsonl", "boolq", "arc", "options", "piqa", "siqa", "winogrande")


def _questions(tokenizer: Tokenizer) -> dict[str, Reader]:
  question_tokenizer = QuestionTokenizer(tokenizer, 96, "start", tagged=True)

  def reading(reader: ReaderName, main: str, pattern: str) -> Callable[[Path], int]:
    def read(folder: Path) -> int:
      found = QASet("fuzzed", reader, str(folder), valid=(pattern,)).load("valid")
      check_questions("fuzzed", found, question_tokenizer)
      if reader not in _LINE_BY_LINE or main != pattern:
        return 0
      left_out = sum(int(note.split()[0]) for note in found.notes)
      return _filled((folder / main).read_bytes()) - len(found) - left_out

    return read

  found = {
    f"questions: {name}": Reader(
      files,
      reading(name, next(iter(files)), next(iter(files))),
      "json" if next(iter(files)).endswith(".json") else "lines",
    )
    for name, files in _FILES.items()
  }
  ((name, content),) = _FILES["jsonl"].items()
  for archive, packed in (("a.zip", _zip(name, content)), ("a.tgz", _tar(name, content))):
    found[f"questions: {archive[2:]}"] = Reader(
      {archive: packed}, reading("jsonl", archive, f"{archive}/*"), "bytes"
    )
  return found


def _zip(name: str, content: bytes) -> bytes:
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr(name, content)
  return buffer.getvalue()


def _tar(name: str, content: bytes) -> bytes:
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as file:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    file.addfile(info, io.BytesIO(content))
  return buffer.getvalue()
