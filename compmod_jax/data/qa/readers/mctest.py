"""MCTest (Richardson et al. 2013): stories for children, four questions each."""

import re
from collections.abc import Iterator
from pathlib import Path

from compmod_jax.data.base import DataError
from compmod_jax.data.qa.files import beside, read_text
from compmod_jax.data.qa.question import Question
from compmod_jax.data.qa.reading import Reading, letter_number
from compmod_jax.data.qa.records import Row

_BEFORE, _EACH = 3, 5  # columns: id, properties, story; then question and four options


def mctest(path: Path, reading: Reading) -> Iterator[tuple[str, Question]]:
  r"""Questions of a `.tsv` file, with the letters of the right options in the `.ans` file beside.

  `\newline` and `\tab` in stories are white space. Info has `id` of the story and `sentences`:
  `one` if a sentence of the story answers the question, `multiple` if it takes several. Checked on
  real files.

  Raises:
    UserError: there is no file of answers.
    DataError: a line of either file lacks columns, or the files differ in length.
  """
  lines = read_text(path)
  name = path.name.removesuffix(".gz").removesuffix(".tsv")
  answers = beside(path, f"{name}.ans")
  letters = [line.split() for line in read_text(answers)]
  if len(letters) != len(lines):
    raise DataError(
      f"{answers} has {len(letters)} lines for the {len(lines)} stories of {path.name}; line n of"
      " one must belong to line n of the other: fetch both again."
    )
  for number, (line, right) in enumerate(zip(lines, letters, strict=True), start=1):
    columns = line.rstrip("\r").split("\t")
    count, rest = divmod(len(columns) - _BEFORE, _EACH)
    if rest or count < 1:
      raise DataError(
        f"{path}:{number} has {len(columns)} tab-separated columns; it needs {_BEFORE}, and {_EACH}"
        " for each question: mend the line."
      )
    if len(right) != count:
      raise DataError(
        f"{answers}:{number} has {len(right)} letters for {count} questions; mend the line."
      )
    yield from _story(Row(path, str(number), {}), columns, right, reading)


def _story(
  row: Row, columns: list[str], letters: list[str], reading: Reading
) -> Iterator[tuple[str, Question]]:
  story = re.sub(r"\\(newline|tab)", " ", columns[2])
  for number, letter in enumerate(letters):
    start = _BEFORE + number * _EACH
    text, options = columns[start], columns[start + 1 : start + _EACH]
    match = re.match(r"\s*(one|multiple)\s*:", text)
    info = {"id": columns[0]}
    if match:
      info["sentences"], text = match[1], text[match.end() :]
    label = letter_number(letter)
    yield from reading.choice(row, text, options, label, story, info, f"[{number}]")
