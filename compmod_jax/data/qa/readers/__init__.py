"""Readers of the file formats in which sets of questions were published.

A reader takes the path of a file, which may lie inside an archive, and a `Reading`; it gives (where
it stands, question) of every question that can be used, and tells the `Reading` of the others.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from compmod_jax.data.qa.jsonl import jsonl
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.readers.boolq import boolq, boolq_contrast
from compmod_jax.data.qa.readers.commonsense import piqa, siqa, winogrande
from compmod_jax.data.qa.readers.drop import drop
from compmod_jax.data.qa.readers.mctest import mctest
from compmod_jax.data.qa.readers.race import race
from compmod_jax.data.qa.readers.science import arc, options
from compmod_jax.data.qa.readers.squad import quoref, ropes, squad
from compmod_jax.data.qa.readers.stories import fairytaleqa, narrativeqa
from compmod_jax.data.qa.readers.subjqa import subjqa
from compmod_jax.data.qa.reading import Reading

Reader = Callable[[Path, Reading], Iterator[tuple[str, Question]]]
ReaderName = Literal[
  "jsonl",
  "race",
  "mctest",
  "squad",
  "quoref",
  "ropes",
  "boolq",
  "boolq_contrast",
  "arc",
  "options",
  "piqa",
  "siqa",
  "winogrande",
  "narrativeqa",
  "fairytaleqa",
  "subjqa",
  "drop",
]

READERS: dict[ReaderName, Reader] = {
  "jsonl": jsonl,
  "race": race,
  "mctest": mctest,
  "squad": squad,
  "quoref": quoref,
  "ropes": ropes,
  "boolq": boolq,
  "boolq_contrast": boolq_contrast,
  "arc": arc,
  "options": options,
  "piqa": piqa,
  "siqa": siqa,
  "winogrande": winogrande,
  "narrativeqa": narrativeqa,
  "fairytaleqa": fairytaleqa,
  "subjqa": subjqa,
  "drop": drop,
}
