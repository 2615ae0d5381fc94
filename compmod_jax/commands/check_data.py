"""Looks through an experiment's data and says what is wrong with it, and where.

    python -m train.check_data --config configs/nmt_cah.py:tatoeba [--export FOLDER]

Exit status: 0 if there are no errors (warnings are fine), 1 if there are, 2 if the data could not
be looked at.
"""

import dataclasses
from pathlib import Path

from compmod_jax.commands.config_option import parse
from compmod_jax.core import errors
from compmod_jax.data import check, check_documents, export
from compmod_jax.data.base import HasPublishedCounts, Pairs
from compmod_jax.data.qa import check as check_questions
from compmod_jax.data.qa.tokenized import QuestionTokenizer
from compmod_jax.data.tokenizers import pair_tokenizers
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.language_model import LanguageModelConfig
from compmod_jax.tasks.masked_lm import MaskedLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, translation_task


@dataclasses.dataclass(frozen=True)
class Args:
  """Arguments of the data check."""

  config: Experiment
  """The experiment whose data are looked at."""
  export: Path | None = None
  """Also write every split to this folder as plain parallel text: SPLIT.LANGUAGE."""
  max_ratio: float = 3.0
  """Warn where a side of a translation has more than this many times the tokens of the other."""
  first: int = 5
  """Places that are listed for each kind of finding."""
  cache: Path | None = None
  """Folder in which trained tokenizers are kept; none: train them for this check."""


def main(argv: list[str]) -> int:
  """Checks, prints a summary and every finding, and exports if asked to."""
  args = parse(Args, argv)
  task = args.config.task
  if isinstance(task, MaskedLMConfig | LanguageModelConfig | CausalLMConfig):
    errors.check(args.export is None, "--export is for parallel text, not for documents.")
    reports = check_documents.check_splits(
      task.data.load, task.data.splits(), lambda: task.make_tokenizer(cache=args.cache), args.first
    )
  elif isinstance(task, AnsweringConfig):
    errors.check(args.export is None, "--export is for parallel text, not for questions.")
    question_tokenizer = QuestionTokenizer(
      task.make_tokenizer(cache=args.cache), task.length, task.truncate
    )
    reports = check_questions.check_sets(task.data, question_tokenizer, args.first)
  elif isinstance(task.data, check.ChecksItself):
    errors.check(args.export is None, "--export is for parallel text, not for numbers.")
    reports = task.data.reports(args.first)
  else:
    reports = _check_pairs(args)
  print("\n".join(check.summary(reports)))
  findings = check.details(reports)
  print("\n".join(["", *findings] if findings else ["", "Nothing remarkable was found."]))
  if args.export is not None:
    _export(translation_task(args.config).data, args.export, reports)
  return int(any(report.failed for report in reports))


def _check_pairs(args: Args) -> list[check.SplitReport]:
  task = translation_task(args.config)

  def tokenizers(train: Pairs) -> check.Tokenizers:
    return pair_tokenizers(
      train.source, train.target, task.tokenizer, task.target_tokenizer, args.cache
    )

  limits = check.Limits(longest=task.batch.longest, max_ratio=args.max_ratio, first=args.first)
  published = task.data.published_counts if isinstance(task.data, HasPublishedCounts) else {}
  return check.check_splits(task.data.load, task.data.splits(), tokenizers, limits, published)


def _export(data: export.Parallel, folder: Path, reports: list[check.SplitReport]) -> None:
  if any("unreadable" in report.findings for report in reports):
    print(f"Nothing was written to {folder}: some splits cannot be read.")
    return
  for split, count in export.export(data, folder).items():
    print(f"{count} pairs of {split} are in {folder}")
