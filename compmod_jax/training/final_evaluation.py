"""The end of a run: scores of the best model on every split, samples, pictures, a report."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
from jax.sharding import Mesh

from compmod_jax.analysis.report.results import Best, Ended, Results, Sample, SplitResult, table
from compmod_jax.analysis.report.training import read_records, write_report
from compmod_jax.analysis.routing import mean_weights
from compmod_jax.checkpoints.model_folder import load_model_folder
from compmod_jax.core.config import to_json
from compmod_jax.core.types import Params
from compmod_jax.tasks.base import Evaluation, Sharing, Status, Task, lower_is_better
from compmod_jax.tools import describe
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.history import TIME_UP, History
from compmod_jax.training.run import Run, parameter_shardings
from compmod_jax.training.writer import Writer

SAMPLES = 5


def load_parameters(folder: Path, task: Task, mesh: Mesh) -> Params:
  """Parameters of a model folder, placed on the devices."""
  params, _, _ = load_model_folder(folder)
  return jax.device_put(params, parameter_shardings(task, mesh))


def evaluate_splits(
  task: Task,
  params: Params,
  splits: tuple[str, ...],
  *,
  sharing: Sharing,
  status: Status,
) -> dict[str, Evaluation]:
  """Every split's scores and outputs."""
  return {
    split: task.evaluate(params, split, sharing=sharing, decode=True, status=status)
    for split in splits
  }


def report_run(
  run: Run, history: History, writer: Writer, *, command: str, group: Group = Group()
) -> None:
  """Evaluates the best model, prints table and samples, writes `results.json` and the report."""
  group.meet("best model")  # process 0 has written it
  params = load_parameters(run.workdir / "models" / "best", run.task, run.mesh)
  found, seconds = dict[str, Evaluation](), dict[str, float]()
  for split in run.task.dataset.final_splits():
    began = time.monotonic()
    found |= evaluate_splits(run.task, params, (split,), sharing=run.sharing, status=writer.status)
    seconds[split] = time.monotonic() - began
  if run.experiment.score_train:
    found["train"] = run.task.evaluate(
      params, "train", sharing=run.sharing, decode=False, status=writer.status
    )
  for split, evaluation in found.items():
    writer.write("final", history.best_step, {"split": split, **evaluation.values})
  weights = mean_weights(run.task, params, "valid", sharing=run.sharing)
  if not group.primary:
    return
  results = collect(run, history, found, weights, command)
  results["evaluate_seconds"] = seconds
  writer.status("")
  writer.say(table(results))
  for sample in results.get("samples", ()):
    writer.say(
      f"\nsource     {sample['source']}\nreference  {sample['reference']}\n"
      f"output     {sample['output']}"
    )
  report = write_report(run.workdir, results, title=run.experiment.name)
  writer.say(f"\nreport: {report.html}")


def collect(
  run: Run,
  history: History,
  found: dict[str, Evaluation],
  weights: dict[str, Any],
  command: str,
) -> Results:
  """What the report tells."""
  experiment = run.experiment
  shown = "test" if "test" in found else next(iter(found))
  test = found[shown]
  samples: list[Sample] = [
    {"split": shown, "source": s, "reference": r, "output": o}
    for s, r, o in zip(test.sources, test.references, test.outputs, strict=True)
  ]
  plain = dataclasses.replace(experiment, model=experiment.model.plain())
  plain_task = plain.task.build(plain.model, files=run.task.dataset.files())
  return {
    "name": experiment.name,
    "command": command,
    "description": run.task.describe(),
    "units": run.task.describe_scores(),
    "parameters": describe.count_parameters(run.task),
    "plain_parameters": describe.count_parameters(plain_task),
    "train_seconds": history.seconds,
    "ended": ending(history, run.total_steps, experiment.time_limit_minutes),
    "best": best_evaluation(run, history, found),
    "splits": [split_result(split, result) for split, result in found.items()],
    "samples": samples[:SAMPLES],
    "head_weights": {
      site.removesuffix("/router/weights"): means for site, means in weights.items()
    },
    "configuration": to_json(experiment),
    "provenance": run.config["provenance"],
  }


def ending(history: History, total_steps: int, limit: float) -> Ended:
  """Why training ended.

  Args:
    history: where the run stands.
    total_steps: of all phases.
    limit: on wall time, minutes; 0 for none.
  """
  step = history.step
  at = f"at step {step:,} of {total_steps:,}"
  if step >= total_steps:
    reason, text = "all_steps", f"all {total_steps:,} steps were done"
  elif history.stopped == TIME_UP:
    reason, text = "time_limit", f"time limit ({limit:g} minute{'' if limit == 1 else 's'}) {at}"
  else:
    reason, text = "no_better_score", f"early stopping {at}: {history.stopped}"
  return {"reason": reason, "step": step, "total_steps": total_steps, "text": text}


def best_evaluation(run: Run, history: History, found: Mapping[str, Evaluation]) -> Best:
  """The evaluation that chose the parameters, and what its score was measured on.

  Args:
    run: the run, whose log has the evaluations.
    history: knows which was best.
    found: the splits' scores at the end; those of the validation split have its size.
  """
  records = read_records(run.workdir / "metrics.jsonl")
  evaluations = {r["step"]: r for r in records if r.get("kind") == "eval" and "step" in r}
  record = evaluations.get(history.best_step, {})
  best: Best = {
    "step": history.best_step,
    "metric": run.task.metric,
    "value": history.best or 0.0,
    "evaluations": len(evaluations),
  }
  whole = found["valid"].values if "valid" in found else record
  if lower_is_better(run.task.metric):  # a loss is always that of the whole split
    return {**best, "sentences": whole.get("sentences"), "of": whole.get("sentences")}
  decoded, size = record.get("decoded"), whole.get("sentences")
  return {**best, "sentences": decoded, "of": size, "search": record.get("search")}


def split_result(split: str, result: Evaluation) -> SplitResult:
  """The scores of a split that the table shows, and those of its parts."""
  shown = {k: v for k, v in result.values.items() if k in SplitResult.__annotations__}
  parts = {k: v for k, v in result.values.items() if "/" in k}
  return cast(SplitResult, {"split": split, **shown, **({"parts": parts} if parts else {})})
