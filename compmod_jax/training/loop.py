"""The training loop: phases of steps, with evaluation, checkpoints and a log."""

import dataclasses
import hashlib
import json
import shutil
import time
from typing import Any

import jax
import numpy as np

from compmod_jax.checkpoints.model_folder import save_model_folder
from compmod_jax.core import errors, sharding
from compmod_jax.core.config import from_json, to_json
from compmod_jax.tasks.base import lower_is_better
from compmod_jax.tasks.configs import ModelConfig, TaskConfig
from compmod_jax.tools import describe
from compmod_jax.training import identity, nonfinite
from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.experiment import Experiment
from compmod_jax.training.history import History
from compmod_jax.training.log import Log, Step
from compmod_jax.training.optimizer import lower_rate, stands_still
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.profiling import Profiler
from compmod_jax.training.run import Run, encode_files
from compmod_jax.training.step import TrainState
from compmod_jax.training.writer import Writer

TIME_UP, NO_BETTER = "the time limit was reached", "no better"


class Loop:
  """Trains a run from where its workdir stands to its end; see `train`."""

  def __init__(
    self,
    run: Run,
    writer: Writer,
    preemption: Preemption,
    group: Group = Group(),
    profiler: Profiler | None = None,
  ):
    self.profiler = profiler or Profiler()
    self.run, self.writer, self.preemption, self.group = run, writer, preemption, group
    self.experiment = run.experiment
    self.history = History()
    self.checkpoints = Checkpointer(
      run.workdir / "checkpoints",
      keep_last=run.experiment.keep_last,
      asynchronous=True,
      report=writer.say,
      group=group,
    )
    self.files = run.task.dataset.files()
    hashes = json.dumps({k: hashlib.sha256(v).hexdigest() for k, v in self.files.items()})
    self.tokenizer_hash = hashlib.sha256(hashes.encode()).hexdigest()
    self.compiled: dict[Any, Any] = {}
    self.log = Log(run, writer)
    self.state: TrainState = self._restore()
    phases = zip(self.experiment.phases, run.iterators, strict=True)
    self.positions = {phase.part: iterator.get_state() for phase, iterator in phases}
    self.started = time.monotonic() - self.history.seconds
    self._publish()
    preemption.save = self.save_held

  # Checkpoints.

  def _restore(self) -> TrainState:
    found = self.checkpoints.read_meta()
    if found is None:
      self.writer.rewind(0, {"final": -1})
      return self.run.fresh_state(self.writer.say)
    step, meta = found
    errors.check(
      meta["tokenizer_hash"] == self.tokenizer_hash,
      f"The checkpoint of step {step} was made with another tokenizer"
      f" (hash {meta['tokenizer_hash'][:12]}, here {self.tokenizer_hash[:12]}); its token numbers"
      " would mean other words. Restore the tokenizers of this workdir or start in a new one.",
    )
    before = from_json(Experiment, meta["experiment"])
    state = self.run.restored(self.checkpoints, before.optimizer)
    self.history = history = History(**meta["history"])
    # Phases on one part share an iterator; old checkpoints hold a position of each of them.
    current = min(self.run.phase_at(step + 1)[0], len(before.phases) - 1)
    places = {
      phase.part: place for phase, place in zip(before.phases, meta["iterators"], strict=True)
    }
    places[before.phases[current].part] = meta["iterators"][current]
    for phase, iterator in zip(self.experiment.phases, self.run.iterators, strict=True):
      if phase.part in places:
        iterator.set_state(places[phase.part])
    self._rewind(step)
    if self.group.decide("best", lambda: self._leave_branch(history)):
      history.best, history.stale = None, 0
    limit, patience = self.experiment.time_limit_minutes, self.experiment.patience
    if history.stopped == TIME_UP and (not limit or history.seconds < limit * 60):
      history.stopped = ""
    if history.stopped.startswith(NO_BETTER) and not 0 < patience <= history.stale:
      history.stopped = ""
    self.writer.say(f"continuing from the checkpoint of step {step}")
    if history.stopped:
      self.writer.say(
        f"training has ended there: {history.stopped}; a longer time_limit_minutes, or more"
        " patience, continues it"
      )
    return state

  def _leave_branch(self, history: History) -> bool:
    return identity.leave_branch(self.run.workdir, self.run.config, history, self.writer.say)

  def _rewind(self, step: int) -> None:
    """Takes back the lines of the log that are going to be written again."""
    log = self.history.log
    unwritten = [number for number, _ in log["lines"]]
    evaluated, last = self.history.evaluated, unwritten[0] - 1 if unwritten else step
    ends = {"eval": evaluated, "heads": evaluated, "final": -1, "train": last, "warning": last}
    self.writer.rewind(step, ends)
    self.log.restore(log)

  def _publish(self) -> tuple[Any, ...]:
    """Says what a preemption would save, the state after the last completed step; returns it."""
    self.history.seconds = time.monotonic() - self.started
    history, positions = dataclasses.replace(self.history), dict(self.positions)
    held = (self.state, history, positions, self.log.held())
    self.preemption.hold(history.step, held)
    return held

  def save_held(self, step: int, held: Any) -> None:
    """Writes a checkpoint of what was published and waits until it is complete."""
    self._save(step, *held)
    self.checkpoints.wait()

  def _save(
    self, step: int, state: TrainState, history: History, positions: dict[str, Any], log: Any
  ) -> None:
    meta = {
      "history": dataclasses.asdict(dataclasses.replace(history, log=self.log.saved(log))),
      "iterators": [positions[phase.part] for phase in self.experiment.phases],
      "experiment": to_json(self.experiment),
      "config": self.run.config,
      "tokenizers": encode_files(self.files),
      "tokenizer_hash": self.tokenizer_hash,
      "seed": self.experiment.seed,
    }
    self.checkpoints.save(step, state, meta)

  def save(self) -> None:
    """Starts writing a checkpoint of the last completed step."""
    with self.preemption.lock:
      held = self._publish()
    # Without the lock: processes that save together may wait for one whose lock is taken for good.
    self._save(self.history.step, *held)

  # Steps.

  def train(self) -> None:
    """Runs all phases that are left, then writes a last checkpoint."""
    for line in describe.opening_lines(self.run):
      self.writer.say(line)
    self.profiler.check(self.history.step, self.run.total_steps)
    with self.checkpoints, self.profiler:
      for number, end in enumerate(self.run.phase_ends):
        if self.history.step < end and not self.history.stopped:
          self._phase(number, end)
      self._read_log()
      self._evaluate_if_due()
      self.save()

  def _phase(self, number: int, end: int) -> None:
    if len(self.experiment.phases) > 1:
      self.writer.say(describe.phase(self.run, number))
    while self.history.step < end and not self.history.stopped:
      self._evaluate_if_due()
      if self.history.stopped:
        return
      with self.profiler.step(self.history.step + 1, lambda: jax.block_until_ready(self.state)):
        self._one_step(number)
      self._check_time()
      every = self.experiment.checkpoint_every
      # Where an evaluation is due, it saves once it knows its result.
      if every and self.history.step % every == 0 and not self._evaluation_due():
        self.save()

  def _one_step(self, number: int) -> None:
    """Takes a batch, steps, and hands the metrics to the log, which reads the step before's."""
    began = time.monotonic()
    phase, iterator = self.experiment.phases[number], self.run.iterators[number]
    batch = next(iterator)
    waited = time.monotonic() - began
    placed = self.run.place(batch)
    compiled, flops = self._compile(phase.trainable, placed)
    # The lock keeps a preemption from reading buffers that the step is about to reuse.
    with self.preemption.lock:
      self.state, metrics = compiled(self.state, placed)
      self.history.step += 1
      self.positions[phase.part] = iterator.get_state()
      self.log.add(Step(self.history.step, metrics, batch, waited, flops))
      self._publish()
    self.log.read()
    nonfinite.watch(self, self.log.last)

  def _read_log(self) -> None:
    """Waits for the last step and has its metrics logged."""
    self.log.flush()
    nonfinite.watch(self, self.log.last)

  def _compile(self, trainable: str, batch: Any) -> Any:
    """The step's program for these shapes; compiled apart, so that the lock is free meanwhile."""
    key = (trainable, _shapes(batch))
    if key not in self.compiled:
      widest = max((shape for _, shape in key[1]), key=len)
      self.writer.status(f"compiling the step for batches of {' x '.join(map(str, widest))}")
      program = self.run.jitted_step(trainable).lower(self.state, batch).compile()
      flops = (program.cost_analysis() or {}).get("flops", 0.0)
      self.compiled[key] = (program, flops)
    return self.compiled[key]

  def _check_time(self) -> None:
    limit = self.experiment.time_limit_minutes
    if limit and time.monotonic() - self.started > limit * 60:
      self.history.stopped = TIME_UP
      self.writer.say(f"stopping: {TIME_UP} ({limit:g} minutes)")

  # Evaluation.

  def _evaluation_due(self) -> bool:
    step, history = self.history.step, self.history
    if step in (0, history.evaluated):
      return False
    every, last = self.experiment.evaluate_every, step == self.run.total_steps
    now = step % every == 0 if every else self.run.ends_epoch(step)
    return now or last or bool(history.stopped)

  def _evaluate_if_due(self) -> None:
    if not self._evaluation_due():
      return
    self._read_log()
    step, history = self.history.step, self.history
    result = self.run.task.evaluate(
      self.state.weights,
      "valid",
      sharing=self.run.sharing,
      decode=self.experiment.evaluate_sentences,
      status=self.writer.status,
    )
    epoch = round(self.run.epoch(step), 4)
    self.writer.write("eval", step, {"split": "valid", "epoch": epoch, **result.values})
    if self.run.heads is not None:
      self.writer.write("heads", step, {"epoch": epoch, **self.run.heads(self.state.weights)})
    optimizer, score = self.experiment.optimizer, result.values[self.run.task.metric]
    sign = -1 if lower_is_better(self.run.task.metric) else 1
    best = None if history.best is None else sign * history.best
    still = stands_still(optimizer, sign * score, best)
    self._keep(score, better=best is None or sign * score > best)
    history.evaluated = step
    if still:
      with self.preemption.lock:
        opt_state = lower_rate(self.state.opt_state, optimizer.plateau_divisor)
        self.state = self.state.replace(opt_state=opt_state)
    if self.experiment.patience and history.stale >= self.experiment.patience:
      history.stopped = f"{NO_BETTER} {self.run.task.metric} in {history.stale} evaluations"
      self.writer.say(f"stopping: {history.stopped}")
    self.save()

  def _keep(self, score: float, *, better: bool) -> None:
    """Writes the evaluated model, and where it is the best so far, as that."""
    history, models = self.history, self.run.workdir / "models"
    if better:
      history.best, history.best_step, history.stale = score, history.step, 0
      self._save_model(models / "best", score)
    else:
      history.stale += 1
    if self.experiment.keep_models:
      self._save_model(models / f"step-{history.step:08d}", score)
      if self.group.primary:
        for folder in sorted(models.glob("step-*"))[: -self.experiment.keep_models]:
          shutil.rmtree(folder)

  def _save_model(self, folder: Any, score: float) -> None:
    meta = {
      "task": to_json(self.run.task.dataset.resolved_config(), TaskConfig),
      "model": to_json(self.experiment.model, ModelConfig),
      "name": self.experiment.name,
      "step": self.history.step,
      "metric": self.run.task.metric,
      "score": score,
    }
    params = jax.tree.map(np.asarray, sharding.fetch(self.state.weights))
    if self.group.primary:
      save_model_folder(folder, params=params, files=self.files, meta=meta)


def _shapes(batch: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
  return tuple((name, tuple(value.shape)) for name, value in sorted(batch.items()))
