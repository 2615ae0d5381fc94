"""What a run found: the schema of its results, and the table of them for terminals and files."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, Protocol, Required, TypedDict

from compmod_jax.core.errors import check, check_choice


class Best(TypedDict):
  """The evaluation that chose the parameters that were kept."""

  step: int
  metric: str
  """Name of a quantity of `SplitResult`, such as "bleu" or "loss"."""
  value: float
  evaluations: NotRequired[int]
  """How many there were."""
  sentences: NotRequired[int | None]
  """On how many sentences (or questions) of the validation split it was measured."""
  of: NotRequired[int | None]
  """How many the split has."""
  search: NotRequired[str | None]
  """How outputs were searched for, if it is a score of outputs."""


class Ended(TypedDict):
  """Why training ended."""

  reason: Literal["all_steps", "time_limit", "no_better_score"]
  step: int
  """The last one."""
  total_steps: int
  text: str
  """The same for people."""


class SplitResult(TypedDict, total=False):
  """Scores on one split; what was not measured is absent or `None`."""

  split: Required[str]
  sentences: int | None
  decoded: int | None
  """For how many of them outputs were made: what scores of outputs are over."""
  search: str | None
  """How those were searched for."""
  tokens: int | None
  """What loss, perplexity and accuracy are over: target tokens, or masked ones."""
  loss: float | None
  """Mean negative log likelihood, nats per token, without label smoothing."""
  unigram: float | None
  """What the loss would be if tokens were predicted by their frequency in training alone."""
  perplexity: float | None
  """Per token of the model's own vocabulary."""
  word_perplexity: float | None
  """Per word of the raw reference: comparable between tokenizers."""
  episodes: int | None
  """Small training sets with questions on them, over whose accuracies `accuracy` is the mean."""
  accuracy: float | None
  """Share of tokens, or of an episode's questions, whose most probable prediction is right, 0 to
  1."""
  accuracy_low: float | None
  """Lower end of the 95 % interval of the mean over episodes."""
  accuracy_high: float | None
  r2: float | None
  """Coefficient of determination of numbers that are predicted: 1 at best, 0 for their mean."""
  unknown: float | None
  """0 to 100: per cent of the text's tokens that are unknown words."""
  bleu: float | None
  """0 to 100."""
  bleu_low: float | None
  """Lower end of BLEU's 95 % interval."""
  bleu_high: float | None
  chrf: float | None
  """0 to 100."""
  exact_match: float | None
  """0 to 100: per cent of sentences."""
  score: float | None
  """0 to 100: the mean over sets of questions of the mean main score of each question."""
  multiple_choice_accuracy: float | None
  """0 to 100, as are the following, each over the questions of one format."""
  yes_no_accuracy: float | None
  extractive_f1: float | None
  abstractive_rouge_l: float | None
  malformed: float | None
  """0 to 100: per cent of labels and yes/no answers that are none."""
  entropy_before: float | None
  """Mean entropy of a step of the search in nats, before the state was recoded."""
  entropy: float | None
  """The same afterwards."""
  sentences_per_second: float | None
  """Of the whole evaluation: loss, search and compilation."""
  parts: Mapping[str, float] | None
  """Scores of parts of the split by name, such as "exact_match/yes_no/2" or "SET/score"."""
  signature: str | None
  """sacreBLEU's signature of `bleu`."""
  chrf_signature: str | None


class Sample(TypedDict, total=False):
  """One translated sentence."""

  split: Required[str]
  source: Required[str]
  reference: Required[str]
  output: Required[str]
  score: float | None
  """The decoder's score: log probability over length ** length penalty."""


class HeadWeights(TypedDict, total=False):
  """Mean weights of the heads of one routed attention."""

  mean: Required[list[float]]
  """[heads]"""
  by_position: list[list[float | None]] | None
  """[positions, heads]; `None` where no sentence is so long."""


class Results(TypedDict, total=False):
  """All that a report tells; plain values only, so that it is also `results.json`."""

  name: Required[str]
  splits: Required[Sequence[SplitResult]]
  command: str
  description: str
  """A sentence or two: which model, on which data."""
  units: str
  """A sentence or two: what loss and perplexity are per."""
  parameters: int | None
  plain_parameters: int | None
  """Of the same model without the mechanism."""
  train_seconds: float | None
  evaluate_seconds: Mapping[str, float]
  """Split -> wall time of its evaluation at the end."""
  ended: Ended
  best: Best | None
  samples: Sequence[Sample]
  head_weights: Mapping[str, HeadWeights]
  """Site, such as "encoder/layer_0/self" -> weights."""
  configuration: Mapping[str, Any]
  """Nested as the configuration is."""
  provenance: Mapping[str, Any]
  """Git revision, versions, device, date; nested as it likes. "device" is also in the headline."""


METRICS = {
  "loss": "loss", "unigram": "unigram loss", "perplexity": "perplexity per token",
  "word_perplexity": "perplexity per word", "accuracy": "accuracy", "r2": "R2",
  "unknown": "unknown words",
  "bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match", "score": "score",
  "multiple_choice_accuracy": "multiple-choice accuracy", "yes_no_accuracy": "yes/no accuracy",
  "extractive_f1": "extractive F1", "abstractive_rouge_l": "abstractive ROUGE-L",
  "malformed": "malformed answers", "entropy_before": "entropy before recoding",
  "entropy": "entropy", "sentences_per_second": "sentences per second",
}  # fmt: skip
_UNITS = {
  "loss": "nats per token", "unigram": "nats per token", "perplexity": "per token",
  "word_perplexity": "per word", "accuracy": "share of tokens", "r2": "share of variance",
  "unknown": "% of tokens",
  "entropy_before": "nats", "entropy": "nats", "sentences_per_second": "sentences per second",
  "tokens_per_second": "tokens per second",
}  # fmt: skip
HEADINGS = {
  "split": "split", "sentences": "sentences", "tokens": "tokens", "episodes": "episodes",
  "loss": "loss",
  "unigram": "unigram",
  "perplexity": "ppl/token", "word_perplexity": "ppl/word", "accuracy": "accuracy",
  "r2": "R2", "unknown": "unknown", "bleu": "BLEU",
  "interval": "95 % interval", "chrf": "chrF", "exact_match": "exact match", "score": "score",
  "multiple_choice_accuracy": "choice", "yes_no_accuracy": "yes/no", "extractive_f1": "extr. F1",
  "abstractive_rouge_l": "ROUGE-L", "malformed": "malformed", "entropy_before": "entropy before",
  "entropy": "entropy", "sentences_per_second": "sentences/s",
}  # fmt: skip


def columns(results: Results) -> list[str]:
  """The columns of a table, keys of `HEADINGS`: what at least one split has."""
  measured = {name for row in results["splits"] for name, value in row.items() if value is not None}
  # Where outputs are scored, how many tokens are predicted from the right ones before says less.
  needed = {"interval": {"bleu"}, "accuracy": {"accuracy", "unigram"}}
  if "episodes" in measured:
    needed = {"interval": {"accuracy_low"}}
  return [name for name in HEADINGS if needed.get(name, {name}) <= measured]


def table(results: Results) -> str:
  """The results as aligned plain text, one line a split; below, signatures and `notes`.

  A value that was not measured is a hyphen; what no split has is no column. ASCII wherever the
  names are.
  """
  shown = columns(results)
  rows = [[HEADINGS[column] for column in shown]]
  rows += [[cells(row, "-", "-")[column] for column in shown] for row in results["splits"]]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    first, *rest = (
      cell.rjust(width) if column else cell.ljust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    lines.append("  ".join([first, *rest]).rstrip())
  lines.insert(1, "-" * sum(widths, 2 * len(widths) - 2))
  lines += [f"{name}: {text} ({where})" for name, text, where in signatures(results)]
  lines += notes(results)
  return "\n".join(lines)


def notes(results: Results) -> list[str]:
  """Why training ended, and what scores were measured on, a sentence or two each."""
  found = []
  ended, best = results.get("ended"), results.get("best")
  if ended:
    found.append(f"Training ended: {ended['text']}.")
  if best and best.get("evaluations"):
    metric = METRICS.get(best["metric"], best["metric"])
    count = best.get("evaluations", 0)
    value = f"{metric} {number(best['metric'], best['value'])} at step {best['step']:,}"
    chosen = f"the best of {count} evaluations" if count > 1 else "the only evaluation"
    if selection(results) == "last":
      found.append(
        f"Last validation {value}, on {measured_on(best)}. No score chose the parameters: they are"
        " the last ones (model_selection = last)."
      )
    else:
      found.append(
        f"Best validation {value}: {chosen}, on {measured_on(best)}. It chose the parameters, and"
        " it is of other sentences than a score on test: do not compare the two."
      )
  rows: dict[str, list[str]] = {}
  for row in results["splits"]:
    if row.get("search"):
      rows.setdefault(measured_on(row), []).append(row["split"])
  found += [f"Scores of outputs on {', '.join(names)}: {on}." for on, names in rows.items()]
  return found


def selection(results: Results) -> str:
  """Which evaluated parameters were kept: the best, or the last."""
  return str(results.get("configuration", {}).get("model_selection", "best"))


def measured_on(row: Mapping[str, Any]) -> str:
  """Of which part of its split a row of the table or the best evaluation is, and how it searched.

  For example "200 of 1,000 sentences, greedy search" and "the whole split, greedy search".
  """
  if "of" in row:
    count, whole = row.get("sentences"), row.get("of")
  else:
    count, whole = row.get("decoded"), row.get("sentences")
  part = "the whole split"
  if count is not None and whole is not None and count < whole:
    part = f"{count:,} of {whole:,} sentences"
  return f"{part}, {row['search']}" if row.get("search") else part


def csv_table(results: Results) -> str:
  """The splits as CSV, a row each, in full precision; a missing value is an empty cell."""
  columns = [name for name in SplitResult.__annotations__ if name != "parts"]
  flat = [flattened(row) for row in results["splits"]]
  parts = sorted({name for row in flat for name in row} - set(columns))
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, ["name", *columns, *parts], lineterminator="\n")
  writer.writeheader()
  for row in flat:
    writer.writerow({"name": results["name"], **row})
  return buffer.getvalue()


def flattened(row: SplitResult) -> dict[str, Any]:
  """The scores of a split with those of its parts among them."""
  scores: dict[str, Any] = dict(row)
  return scores | (scores.pop("parts", None) or {})


def plain(value: object) -> Any:
  """The same value as strict JSON has it: numbers that are not finite become `None`."""
  if isinstance(value, Mapping):
    return {str(key): plain(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [plain(inner) for inner in value]
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return value if isinstance(value, str | int | None) else str(value)


def check_schema(results: Mapping[str, Any]) -> None:
  """Raises a `UserError` for a missing or an unknown field, which would be lost in silence."""
  _check_fields("results", results, Results)
  for number, row in enumerate(results["splits"]):
    _check_fields(f"results.splits[{number}]", row, SplitResult)
  for number, sample in enumerate(results.get("samples") or ()):
    _check_fields(f"results.samples[{number}]", sample, Sample)
  for site, weights in (results.get("head_weights") or {}).items():
    _check_fields(f"results.head_weights[{site!r}]", weights, HeadWeights)
  if results.get("best"):
    _check_fields("results.best", results["best"], Best)
  if results.get("ended"):
    _check_fields("results.ended", results["ended"], Ended)


class _Schema(Protocol):
  """A class of dictionaries (TypedDict)."""

  __required_keys__: ClassVar[frozenset[str]]


def _check_fields(where: str, value: Mapping[str, Any], schema: type[_Schema]) -> None:
  missing = sorted(schema.__required_keys__ - set(value))
  check(not missing, f"{where} lacks {', '.join(missing)}; add what the schema requires.")
  for key in value:
    check_choice(f"a field of {where}", key, schema.__annotations__)


def signatures(results: Results) -> list[tuple[str, str, str]]:
  """Metric, sacreBLEU signature and the splits that it holds for, each signature once."""
  found: dict[tuple[str, str], list[str]] = {}
  for row in results["splits"]:
    for metric, key in (("BLEU", "signature"), ("chrF", "chrf_signature")):
      if row.get(key):
        found.setdefault((metric, str(row[key])), []).append(row["split"])
  return [(metric, text, ", ".join(splits)) for (metric, text), splits in found.items()]


def cells(row: SplitResult, dash: str, between: str) -> dict[str, str]:
  """The cells of a table's row, by column."""
  scored = "bleu" if row.get("accuracy_low") is None else "accuracy"
  low, high = row.get(f"{scored}_low"), row.get(f"{scored}_high")
  interval = dash
  if low is not None and high is not None:
    interval = f"{number(scored, low)} {between} {number(scored, high)}"
  texts = {"split": row["split"]}
  for name in ("sentences", "tokens", "episodes"):
    count = row.get(name)
    texts[name] = dash if count is None else f"{count:,}"
  for metric in METRICS:
    value = row.get(metric)
    texts[metric] = dash if value is None else number(metric, value)
    if metric == "bleu":
      texts["interval"] = interval
  return texts


def number(metric: str, value: float) -> str:
  """A score as text, with the digits and the unit that its metric is read with."""
  if not math.isfinite(value):
    return "inf" if value > 0 else "-inf" if value < 0 else "nan"
  if metric in ("exact_match", "unknown"):
    return f"{value:.2f} %"
  fractions = ("unigram", "accuracy", "r2", "entropy_before", "entropy")
  if metric.endswith("loss") or metric in fractions:
    return f"{value:.4f}"
  if "perplexity" in metric:
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.3e}"
  return f"{value:.2f}"


def unit(metric: str) -> str:
  """The unit of a score, as the axis of a picture names it; scores of 0 to 100 have points.

  Args:
    metric: a field of `SplitResult`, or a score of a part, such as "exact_match/yes_no/2".
  """
  return _UNITS.get(metric, _UNITS["loss"] if metric.endswith("loss") else "points")


def duration(seconds: float) -> str:
  """For example "4 min 05 s" or "1 h 03 min"."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
