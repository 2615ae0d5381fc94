"""The training loop: phases of steps, with evaluation, checkpoints, a log, and hooks."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable

import jax

from compmod_jax.analysis.watch import HeadWatch
from compmod_jax.tasks.base import Batch
from compmod_jax.tools import describe
from compmod_jax.training.distributed.multihost import Group
from compmod_jax.training.hooks import (
  Hook,
  KeepModels,
  LowerRateOnPlateau,
  StopAtTimeLimit,
  StopWithoutProgress,
  WatchHeads,
  WriteScores,
)
from compmod_jax.training.log import Log, Step
from compmod_jax.training.nonfinite import ReportNonFinite
from compmod_jax.training.preemption import Preemption
from compmod_jax.training.profiling import Profiler
from compmod_jax.training.resume import Moment, RunCheckpoints
from compmod_jax.training.run import Run
from compmod_jax.training.step import TrainState
from compmod_jax.training.writer import Writer


class Loop:
  """Trains a run from where its workdir stands to its end; see `train`.

  Attributes:
    run: the run.
    state: parameters, optimizer and counters after the last step.
    history: where the run stands.
    hooks: called at steps and evaluations, in this order.
    files: the tokenizers.
    started: when training would have begun if it had not been interrupted.

  Args:
    hooks: further ones, called after those of every run.
  """

  def __init__(
    self,
    run: Run,
    writer: Writer,
    preemption: Preemption,
    group: Group = Group(),
    profiler: Profiler | None = None,
    hooks: Iterable[Hook] = (),
  ):
    self.run, self.writer, self.preemption, self.group = run, writer, preemption, group
    self.experiment, self.profiler = run.experiment, profiler or Profiler()
    self.hooks = [*standard_hooks(run), *hooks]
    self.checkpoints = RunCheckpoints(run, writer, group)
    self.files = self.checkpoints.files
    self.compiled: dict[Hashable, tuple[jax.stages.Compiled, float]] = {}
    self.log = Log(run, writer)
    self.state, self.history = self.checkpoints.restore(self.log, self.hooks)
    phases = zip(self.experiment.phases, run.iterators, strict=True)
    self.positions = {phase.part: iterator.get_state() for phase, iterator in phases}
    self.started = time.monotonic() - self.history.seconds
    self._publish()
    preemption.save = self.save_held

  def train(self) -> None:
    """Runs all phases that are left, then writes a last checkpoint."""
    for line in describe.opening_lines(self.run):
      self.writer.say(line)
    self.profiler.check(self.history.step, self.run.total_steps)
    with self.checkpoints.checkpointer, self.profiler:
      for number, end in enumerate(self.run.phase_ends):
        if self.history.step < end and not self.history.stopped:
          self._phase(number, end)
      self._read(self.log.flush)
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
        self._step(number)
      for hook in self.hooks:
        hook.after_step(self)
      every = self.experiment.checkpoint_every
      # Where an evaluation is due, it saves once its result is known.
      if every and self.history.step % every == 0 and not self._evaluation_due():
        self.save()

  # Steps.

  def _step(self, number: int) -> None:
    """Takes a batch, steps, and hands the metrics to the log, which reads the step before's."""
    began = time.monotonic()
    phase, iterator = self.experiment.phases[number], self.run.iterators[number]
    batch = next(iterator)
    waited = time.monotonic() - began
    placed = self.run.place(batch)
    compiled, flops = self._compile(phase.trainable, placed)
    # The lock keeps a preemption from reading buffers that the step is about to reuse.
    with self.preemption.lock:
      self.state, metrics = compiled(self.state, placed, self.run.key)
      self.history.step += 1
      self.positions[phase.part] = iterator.get_state()
      self.log.add(Step(self.history.step, metrics, batch, waited, flops))
      self._publish()
    self._read(self.log.read)

  def _compile(self, trainable: str, batch: Batch) -> tuple[jax.stages.Compiled, float]:
    """The step's program for these shapes, and its operations.

    Compiled apart, so that the lock is free meanwhile.
    """
    shapes = tuple((name, tuple(value.shape)) for name, value in sorted(batch.items()))
    key = (trainable, shapes)
    if key not in self.compiled:
      widest = max((shape for _, shape in shapes), key=len)
      self.writer.status(f"compiling the step for batches of {' x '.join(map(str, widest))}")
      program = self.run.jitted_step(trainable).lower(self.state, batch, self.run.key).compile()
      flops = (program.cost_analysis() or {}).get("flops", 0.0)
      self.compiled[key] = (program, flops)
    return self.compiled[key]

  def _read(self, read: Callable[[], None]) -> None:
    """Has the log read metrics, and shows hooks the last of them."""
    read()
    if self.log.last is not None:
      for hook in self.hooks:
        hook.after_read(self, self.log.last)

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
    self._read(self.log.flush)
    result = self.run.task.evaluate(
      self.state.weights,
      "valid",
      sharing=self.run.sharing,
      decode=self.experiment.evaluate_sentences,
      status=self.writer.status,
    )
    for hook in self.hooks:
      hook.after_evaluation(self, result.values, result.values[self.run.task.metric])
    self.history.evaluated = self.history.step
    self.save()

  # Checkpoints.

  def save(self) -> None:
    """Starts writing a checkpoint of the last completed step."""
    with self.preemption.lock:
      moment = self._publish()
    # Without the lock: processes that save together may wait for one whose lock is taken for good.
    self.checkpoints.save(moment, self.log)

  def save_held(self, step: int, moment: Moment) -> None:
    """Writes a checkpoint of what was published and waits until it is complete."""
    self.checkpoints.save(moment, self.log)
    self.checkpoints.checkpointer.wait()

  def change(self, change: Callable[[TrainState], TrainState]) -> None:
    """Replaces the state by a function of it, while no preemption can save it."""
    with self.preemption.lock:
      self.state = change(self.state)

  def _publish(self) -> Moment:
    """Hands a preemption what it would save: the state after the last completed step."""
    self.history.seconds = time.monotonic() - self.started
    states = ((hook.name, hook.state()) for hook in self.hooks)
    self.history.hooks = {name: state for name, state in states if state is not None}
    moment = Moment(
      self.state, dataclasses.replace(self.history), dict(self.positions), self.log.held()
    )
    self.preemption.hold(self.history.step, moment)
    return moment


def standard_hooks(run: Run) -> list[Hook]:
  """The hooks of every run, in the order in which they are called."""
  count = run.experiment.watch_sentences
  watching = [WatchHeads(HeadWatch(run.task, count, sharing=run.sharing))] if count else []
  return [
    ReportNonFinite(),
    StopAtTimeLimit(),
    WriteScores(),
    *watching,
    LowerRateOnPlateau(),
    KeepModels(),
    StopWithoutProgress(),
  ]
