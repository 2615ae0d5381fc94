"""Questions as they are typed on a line: without their answers."""

import re

from compmod_jax.core.errors import UserError, check, short
from compmod_jax.core.untrusted import parse_json
from compmod_jax.data.qa.question import FORMATS, Format, Question

_LABEL = re.compile(r"\((\d+)\)")


def typed_question(line: str) -> Question:
  """The question on a line, with a placeholder where the gold answer would be.

      Anna took the ball. Anna went to the hall. | Where is the ball?
      Which of them barks? (1) a cat (2) a dog
      {"format": "yes_no", "passage": "The dog barked.", "question": "Did a cat bark?"}

  In text, what stands before the last `|` is the passage, and what follows `(1)`, `(2)` and so on
  are options; without options, the format is abstractive, which for a model is any text. In JSON,
  fields are those of the project's own format (`jsonl`), but answers and label are not needed.

  Raises:
    UserError: there is no question, options are not counted from 1, or JSON is damaged, nested too
      deep or of other types.
  """
  if line.lstrip().startswith("{"):
    return _from_json(line)
  passage, _, rest = line.rpartition("|")
  question, *parts = _LABEL.split(rest)
  numbers, options = parts[::2], [part.strip() for part in parts[1::2]]
  check(
    numbers == [str(n) for n in range(1, len(numbers) + 1)],
    f"options are numbered {short(', '.join(numbers))}; count them (1), (2) and so on.",
  )
  return _question(passage.strip(), question.strip(), tuple(options), "abstractive")


def _from_json(line: str) -> Question:
  try:
    fields = parse_json(line)
  except ValueError as error:
    raise UserError(f"the line is no JSON object ({error}); mend it.") from error
  texts = {name: fields.get(name) or "" for name in ("passage", "question", "format")}
  options = fields.get("options") or []
  check(
    isinstance(options, list) and all(isinstance(t, str) for t in (*texts.values(), *options)),
    "passage, question, format and options must be text, options a list of it; mend the line.",
  )
  format: Format = fields.get("format") or "abstractive"
  check(format in FORMATS, f"format is {short(format)}; give one of {', '.join(FORMATS)}.")
  return _question(texts["passage"], texts["question"], tuple(options), format)


def _question(passage: str, question: str, options: tuple[str, ...], format: Format) -> Question:
  if options:
    return Question("multiple_choice", question, passage, options, label=1)
  return Question(format, question, passage, answers=("yes",))
