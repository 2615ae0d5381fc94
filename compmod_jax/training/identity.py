"""What makes a run that of its workdir, configuration and training data, and what may change.

A workdir belongs to the first configuration of which a step was saved there. The same configuration
continues it, and so does one that differs in what is listed here; what differed is kept in
`config.json` (`history`), with the step from which on it did. Of the training data `config.json`
keeps fingerprints.
"""

import base64
import dataclasses
import datetime
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compmod_jax.checkpoints.model_folder import load_model_folder, save_model_folder
from compmod_jax.core import errors
from compmod_jax.core.config import from_json, to_json
from compmod_jax.data.fingerprint import Fingerprint, Fingerprints, combined
from compmod_jax.training import checkpoint_files
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.history import History
from compmod_jax.training.optimizer import learning_rate
from compmod_jax.training.provenance import provenance
from compmod_jax.training.workdir import CONFIG, changes, read_config, write_config

MAY_CHANGE = (
  "mesh",
  "shard_optimizer",
  "log_every",
  "watch_sentences",
  "checkpoint_every",
  "keep_last",
  "keep_models",
  "time_limit_minutes",
  "accept_data",
)
"""Fields that may change between the runs of a workdir: where and how often, but not what is
computed."""

_LATER = (
  "optimizer.learning_rate",
  "optimizer.schedule",
  "optimizer.plateau_divisor",
  "optimizer.plateau_improvement",
  "optimizer.warmup_steps",
  "optimizer.final_fraction",
  "optimizer.falling_share",
  "optimizer.weight_decay",
  "optimizer.clip",
  "model.remat",
  "micro_batches",
  "products",
  "evaluate_every",
  "evaluate_sentences",
  "task.eval_rows",
  "score_train",
  "model_selection",
  "patience",
  "max_nonfinite",
)
"""Fields that may change for the steps to come; what is to come of the phases may, too."""

_OF_GROUP = re.compile(r"groups\.\d+\.(?=optimizer\.)")


def later(path: str) -> bool:
  """Whether a field may change for the steps to come; that of a group as that of the experiment."""
  return _OF_GROUP.sub("", path) in _LATER


_MEANING = {
  "micro_batches": "gradients are the same, dropout masks are not",
  "evaluate_sentences": "scores before and after are of different sentences",
  "task.eval_rows": "scores differ by what streams do not see before them",
  "optimizer.schedule": "the new schedule counts its steps from the beginning of the run",
}

_PLACES = ("folder", "data_dir", "download")
"""Fields of `task.data` that say where data are: may change where the fingerprints do not."""

_RATE = ("optimizer.", "phases")
_MODELS, _CHECKPOINTS, _TOKENIZERS = "models", "checkpoints", "tokenizers"


@dataclasses.dataclass
class Held:
  """What a workdir holds of a run.

  Attributes:
    workdir: the folder.
    config: of `config.json`; empty where no step of any run was saved.
    step: steps done, by the newest checkpoint.
    meta: of the newest checkpoint; empty without one.
    notes: what was found and mended, a sentence each.
  """

  workdir: Path
  config: dict[str, Any]
  step: int
  meta: dict[str, Any]
  notes: list[str]

  @property
  def experiment(self) -> Experiment:
    """The experiment that the workdir belongs to; only where `config` is not empty."""
    return from_json(Experiment, self.config["experiment"])

  def tokenizers(self) -> dict[str, bytes]:
    """The run's tokenizers, from the newest checkpoint where their folder is missing or damaged.

    Raises:
      UserError: no checkpoint holds them either, or it holds others.
    """
    folder, texts = self.workdir / _TOKENIZERS, self.meta.get("tokenizers") or {}
    saved = {name: base64.b64decode(text) for name, text in texts.items()}
    try:
      files = load_model_folder(folder)[1]
    except errors.UserError as error:
      if not saved:
        raise
      self.notes.append(
        f"the tokenizers are taken from the checkpoint of step {self.step}: {error}"
      )
      return saved
    errors.check(
      files == saved or not saved,
      f"The checkpoint of step {self.step} was made with another tokenizer than that in {folder};"
      " its token numbers would mean other words. Remove that folder to take the checkpoint's own,"
      " or choose another --workdir.",
    )
    return files


def open_workdir(workdir: Path) -> Held:
  """What a workdir holds; a `config.json` that is damaged or missing is restored first.

  Raises:
    UserError: it cannot be restored, or a newer version wrote the checkpoints.
  """
  saved = checkpoint_files.newest_first(workdir / _CHECKPOINTS)
  record = checkpoint_files.newest_record(workdir / _CHECKPOINTS)
  step = record["step"] if record else max((checkpoint_files.order(p)[0] for p in saved), default=0)
  meta = record["meta"] if record else {}
  held = Held(workdir, {}, step, meta, [])
  models = workdir / _MODELS
  if not saved and not (models.is_dir() and any(models.iterdir())):
    return held
  try:
    held.config = read_config(workdir)
  except errors.UserError as error:
    if "experiment" not in meta:
      if (workdir / CONFIG).exists() or saved:
        raise
      return held
    held.config = _restore(held, error)
  return held


def _restore(held: Held, error: errors.UserError) -> dict[str, Any]:
  """Writes `config.json` as the newest checkpoint has it."""
  meta, path = held.meta, held.workdir / CONFIG
  config = meta.get("config") or {"experiment": meta["experiment"], "provenance": provenance()}
  aside = ""
  if path.exists():
    path.replace(path.with_name(f"{CONFIG}.damaged"))
    aside = f"; the damaged file is {CONFIG}.damaged now"
  write_config(held.workdir, config)
  first = str(error).removesuffix(".").split(". ")[0]
  held.notes.append(f"{first}: restored from the checkpoint of step {held.step}{aside}")
  return config


def compare(held: Held, experiment: Experiment) -> list[str]:
  """What differs from the workdir's configuration and may, but for the phases: a line each.

  Raises:
    UserError: the workdir belongs to another configuration; the message lists what differs.
  """
  if not held.config:
    return []
  wrong, found = [], []
  # Through the class, so that fields that were added since then have their defaults.
  for path, old, new in changes(to_json(held.experiment), to_json(experiment)):
    name = path.split(".")[0]
    if name == "phases":
      continue
    moved = path.startswith("task.data.") and path.split(".")[-1] in _PLACES
    fine = name in MAY_CHANGE or later(path) or (moved and "data" in held.config)
    meaning = f" ({_MEANING[path]})" if path in _MEANING else ""
    (found if fine else wrong).append(
      f"{path}: {old!r} there, {new!r} here{meaning if fine else ''}"
    )
  _refuse(held.workdir, wrong)
  return found


def _refuse(workdir: Path, wrong: Sequence[str]) -> None:
  errors.check(
    not wrong,
    f"{workdir} belongs to another configuration: {'; '.join(wrong[:12])}. Continue it with its"
    " own configuration, or choose another --workdir. What may change in a workdir: lengths of"
    " phases to come, learning rate and schedule, clipping, micro_batches, products, model.remat,"
    " evaluation, logging, checkpoints, limits and devices.",
  )


def ends_of(phases: Sequence[Phase], batches: Sequence[int], past: Sequence[int] = ()) -> list[int]:
  """Step at which each phase ends.

  Args:
    phases: the phases.
    batches: in an epoch of each.
    past: ends of the first phases, which are over.
  """
  ends = list(past)
  for phase, each in list(zip(phases, batches, strict=True))[len(past) :]:
    ends.append((ends[-1] if ends else 0) + (phase.steps or max(1, round(phase.epochs * each))))
  return ends


def compare_phases(
  held: Held, phases: tuple[Phase, ...], batches: Sequence[int]
) -> tuple[list[str], list[int]]:
  """What differs in the phases and may, a line each, and the ends of those that are over.

  What was trained stays: phases that began keep their name, part and parameters, and those that are
  over their length.

  Args:
    held: what the workdir holds.
    phases: of the new configuration.
    batches: in an epoch of each, with the data as they are.

  Raises:
    UserError: another difference.
  """
  if not held.config:
    return [], []
  old, step = held.experiment.phases, held.step
  each = [batches[min(number, len(batches) - 1)] for number in range(len(old))]
  ends = held.config.get("phase_ends") or ends_of(old, each)
  begun = [number for number, start in enumerate([0, *ends[:-1]]) if start < step]
  wrong, found = [], []
  names = [f"phases.{number}" for number in range(max(len(old), len(phases)))]
  theirs, mine = ([to_json(phase) for phase in some] for some in (old, phases))
  for number, name in enumerate(names):
    if number >= min(len(old), len(phases)):
      there, here = (some[number].name if number < len(some) else "none" for some in (old, phases))
      (wrong if number in begun else found).append(f"{name}: {there} there, {here} here")
      continue
    for path, before, after in changes(theirs[number], mine[number], name):
      length = path.split(".")[-1] in ("steps", "epochs")
      fixed = number in begun and (not length or number != begun[-1])
      (wrong if fixed else found).append(f"{path}: {before!r} there, {after!r} here")
  grouped = [any(phase.trainable != "all" for phase in some) for some in (old, phases)]
  if step and grouped[0] != grouped[1] and not held.experiment.groups:
    wrong.append(
      "phases.trainable: routers and the rest count their updates together there and apart here"
    )
  past = list(ends[: len(begun) - 1]) if begun else []
  if not wrong and begun:
    number = begun[-1]
    end = ends_of(phases, batches, past)[number]
    errors.check(
      end >= step,
      f"phases.{number} would end at step {end}, but {step} steps are done in {held.workdir}. Give"
      " it more steps or epochs, or choose another --workdir.",
    )
  _refuse(held.workdir, wrong)
  return found, past


def compare_data(held: Held, data: Fingerprints, accepted: str) -> list[str]:
  """What differs from the data that the workdir was trained on, a line each.

  Args:
    held: what the workdir holds.
    data: fingerprints of the training data as they are.
    accepted: `Experiment.accept_data`.

  Raises:
    UserError: they are others, and not accepted; the message says what differs.
  """
  if not held.config:
    return []
  if "data" not in held.config:
    held.notes.append(
      f"{held.workdir / CONFIG} has no fingerprint of its training data, as earlier versions wrote"
      " none: it gets that of the data here"
    )
    return []
  before = {name: Fingerprint(*values) for name, values in held.config["data"].items()}
  found = [
    f"task.data, {name}: {before.get(name, 'none')} there, {data.get(name, 'none')} here"
    for name in dict.fromkeys([*before, *data])
    if before.get(name) != data.get(name)
  ]
  name = combined(data)
  errors.check(
    not found or accepted == name,
    f"{held.workdir} was trained on other data: {'; '.join(found)}. (The same number with another"
    " hash: other content, or another order.) Restore the data or choose another --workdir; to go"
    f" on with the data here all the same, add --config.accept_data={name}.",
  )
  return found


def check_selection(held: Held, experiment: Experiment, end: int) -> None:
  """Raises a `UserError` where another `model_selection` would choose from no further evaluation.

  Args:
    held: what the workdir holds.
    experiment: the configuration.
    end: step at which its last phase ends.
  """
  if not held.config or not held.meta:
    return
  # The checkpoint's own: that of `config.json` may have changed since without an evaluation.
  kept = from_json(Experiment, held.meta["experiment"]).model_selection
  history = History(**held.meta["history"])
  history.go_on(patience=experiment.patience, limit_minutes=experiment.time_limit_minutes)
  over = history.evaluated == history.step and (history.step >= end or history.stopped)
  errors.check(
    kept == experiment.model_selection or not over,
    f"model_selection: {kept!r} there, {experiment.model_selection!r} here, but training has ended"
    f" in {held.workdir}, and the {kept} parameters were kept. Set model_selection = {kept}, give"
    " phases more steps or epochs, or choose another --workdir.",
  )


def settle(
  held: Held,
  experiment: Experiment,
  changed: Sequence[str],
  *,
  data: Fingerprints,
  ends: Sequence[int],
  multiple: int,
  command: str,
) -> dict[str, Any]:
  """Writes what a workdir belongs to from now on, if it is new; returns what `config.json` holds.

  Args:
    held: what the workdir holds.
    experiment: the configuration.
    changed: what differs from the one before, a line each.
    data: fingerprints of the training data.
    ends: step at which each phase ends.
    multiple: of which the rows of training batches are multiples.
    command: how the program was started.

  Raises:
    UserError: it cannot be written.
  """
  config, history = held.config, _history(held, changed)
  new = {
    "experiment": to_json(experiment),
    "data": {name: list(part) for name, part in data.items()},
    "batch_multiple": multiple,
    "phase_ends": list(ends),
    "history": history,
  }
  try:
    written = read_config(held.workdir)
  except errors.UserError:
    written = {}
  if changed:
    config = {**config, "command": command}
  elif not config and written.get("experiment") == new["experiment"]:
    config = written  # another process of this run wrote it, or one that ended before it saved
  elif not config:
    config = {"command": command, "provenance": provenance()}
    if written:
      held.notes.append(
        f"{held.workdir} belonged to another configuration, of which no step was saved: it belongs"
        " to this one now"
      )
  config = json.loads(json.dumps({**config, **new}))
  if config != written:
    write_config(held.workdir, config)
  return config


def _history(held: Held, changed: Sequence[str]) -> list[dict[str, Any]]:
  """Configurations that the workdir had before, with the step after which each ended."""
  # A change takes effect earlier where checkpoints were removed since.
  history = [
    {**entry, "step": min(entry["step"], held.step)} for entry in held.config.get("history", ())
  ]
  if not changed:
    return history
  entry = {
    "step": held.step,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "changed": list(changed),
    "command": held.config.get("command", ""),
    "experiment": held.config["experiment"],
  }
  return [*history, entry]


def notes_on(
  held: Held, experiment: Experiment, changed: Sequence[str], ends: Sequence[int]
) -> list[str]:
  """What the user is to know of a workdir's changes: a sentence each."""
  notes = list(held.notes)
  for line in changed:
    free = not _computes(line)
    notes.append(
      f"the workdir was made with another setting: {line}"
      if free
      else f"after step {held.step} with another configuration: {line}"
    )
  if any(line.startswith(_RATE) for line in changed):
    totals = (held.config.get("phase_ends") or list(ends))[-1], ends[-1]
    configs = held.experiment.optimizer, experiment.optimizer
    rates = [float(learning_rate(c, n)(held.step)) for c, n in zip(configs, totals, strict=True)]
    note = (
      f"the learning rate of the next step is {rates[1]:.3g} ({rates[0]:.3g} before the change)"
    )
    if experiment.optimizer.schedule == "plateau":
      note += ", before what the schedule plateau has divided it by"
    if totals[0] != totals[1]:
      note += (
        f"; the schedule ({experiment.optimizer.schedule}) and what is annealed over the run span"
        f" {totals[1]:,} steps now ({totals[0]:,} before)"
      )
    notes.append(note)
  return notes


def _computes(line: str) -> bool:
  """Whether a change decides what is computed."""
  return line.split(":")[0].split(".")[0] not in MAY_CHANGE


def keep_tokenizers(workdir: Path, files: Mapping[str, bytes]) -> None:
  """Writes a run's tokenizers where they are not written yet."""
  try:
    if load_model_folder(workdir / _TOKENIZERS)[1] == files:
      return
  except errors.UserError:
    pass
  save_model_folder(workdir / _TOKENIZERS, params={}, files=files, meta={"holds": "tokenizers"})


def leave_branch(
  workdir: Path, config: Mapping[str, Any], history: History, say: Callable[[str], None]
) -> bool:
  """Removes the models of later steps where a run goes on in another way than the one they are of.

  Where the configuration changed at the step that a run resumes from, steps beyond it, whose
  checkpoints were removed or damaged, are not made again. The best model is then that of the best
  evaluation up to here, if it is still there. A change that is entered at a step whose checkpoint
  turned out to be damaged is from here on, and entered so.

  Args:
    workdir: the folder.
    config: what its `config.json` holds; steps of its `history` are corrected in place.
    history: where the run resumes.
    say: is called with what the user is to know.

  Returns:
    Whether no such model is there, so that the next evaluation is the best.
  """
  entries = [entry for entry in config.get("history", ()) if entry["step"] >= history.step]
  late = [entry for entry in entries if entry["step"] > history.step]
  if late:
    say(
      f"note: the checkpoint of step {late[-1]['step']} cannot be used: the configuration changes"
      f" after step {history.step}"
    )
    for entry in late:
      entry["step"] = history.step
    write_config(workdir, config)
  if not any(_computes(line) for entry in entries for line in entry["changed"]):
    return False
  models = workdir / _MODELS
  for folder in models.glob("step-*"):
    if int(folder.name[5:]) > history.step:
      shutil.rmtree(folder)
  try:
    if history.best is None or load_model_folder(models / "best")[2]["step"] <= history.step:
      return False
    params, files, meta = load_model_folder(models / f"step-{history.best_step:08d}")
    save_model_folder(models / "best", params=params, files=files, meta=meta)
    return False
  except errors.UserError:
    say(
      f"note: the best model so far, of step {history.best_step}, is not there any more; the next"
      " evaluation counts as the best"
    )
    return True
