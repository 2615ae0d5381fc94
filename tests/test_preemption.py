"""Signals end a run within seconds, with the last completed step saved, whatever it is doing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compmod_jax.training.checkpoint import Checkpointer
from compmod_jax.training.preemption import Preemption

ROOT = Path(__file__).parents[1]

# A training program of three steps that then stays in the phase asked for.
_TRAIN = """
import sys, threading, time
from pathlib import Path
from compmod_jax.training.preemption import Preemption
preemption = Preemption()
import jax, jax.numpy as jnp
from compmod_jax.training.checkpoint import Checkpointer
phase, directory = sys.argv[1:]
checkpointer = Checkpointer(Path(directory), asynchronous=True)

def save(step, state):
  checkpointer.save(step, state, {"step": step})
  checkpointer.wait()

preemption.save = save
step_function = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
state = {"x": jnp.zeros((600, 600)), "y": jnp.zeros(3)}
compiled = step_function.lower(state).compile()

def advance(step):
  global state
  with preemption.lock:
    state = compiled(state)
    preemption.hold(step, state)

for step in (1, 2, 3):
  advance(step)

def slow(x):
  for i in range(400):
    x = jnp.sin(x @ x + i) * jnp.cos(x[::-1]) + jnp.cumsum(x, axis=i % 2)
  return x.sum()

forever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0] >= 0, lambda x: x * 0.5, x))
if phase == "compile":
  lowered = jax.jit(jax.grad(slow)).lower(jnp.ones((16, 16)))
  print("ready", flush=True)
  lowered.compile()
elif phase == "compile under the lock":
  with preemption.lock:
    preemption._patience = 1.0
    lowered = jax.jit(jax.grad(slow)).lower(jnp.ones((16, 16)))
    print("ready", flush=True)
    lowered.compile()
elif phase == "trace":
  print("ready", flush=True)
  while True:
    jax.jit(lambda x: jnp.sin(x) + 1).lower(jnp.ones(3))
elif phase == "jitted loop":
  compiled_loop = forever.lower(jnp.ones(3)).compile()
  print("ready", flush=True)
  compiled_loop(jnp.ones(3)).block_until_ready()
elif phase == "python loop":
  print("ready", flush=True)
  while True:
    pass
elif phase == "train":
  print("ready", flush=True)
  for step in range(4, 10**9):
    advance(step)
    state["y"].block_until_ready()
elif phase == "save":
  print("ready", flush=True)
  for step in range(4, 10**9):
    advance(step)
    checkpointer.save(step, state, {"step": step})
print("the phase ended by itself", flush=True)
"""


def _start(code, *arguments, **options):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
  pipe = subprocess.PIPE
  process = subprocess.Popen(
    command, stdout=pipe, stderr=pipe, env=environment, text=True, **options
  )
  assert process.stdout.readline() == "ready\n", process.stderr.read()
  return process


def _finish(process, timeout=20.0):
  """(exit status, rest of stdout, stderr) of a process, which must end in time."""
  try:
    out, err = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    process.communicate()
    raise
  return process.returncode, out, err


@pytest.mark.programs
@pytest.mark.parametrize(
  "phase",
  ["compile", "compile under the lock", "trace", "jitted loop", "python loop", "train", "save"],
)
def test_sigterm_saves_the_last_completed_step_in_every_phase(phase, tmp_path):
  process = _start(_TRAIN, phase, tmp_path)
  time.sleep(0.5)
  process.send_signal(signal.SIGTERM)
  status, out, err = _finish(process)
  state = {"x": jnp.zeros((600, 600)), "y": jnp.zeros(3)}
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  restored, meta, step = Checkpointer(tmp_path, report=pytest.fail).restore(abstract)
  assert err == f"SIGTERM: checkpoint of step {step} saved; run the same command to continue\n"
  assert (status, out) == (143, "")
  assert meta == {"step": step}
  assert step > 3 if phase in ("train", "save") else step == 3
  assert all(np.all(np.asarray(leaf) == step) for leaf in restored.values())


_LIGHT = """
import os, signal, subprocess, sys, threading, time
from compmod_jax.training.preemption import Preemption
preemption = Preemption()
def save(step, held):
  os.write(1, f"saving {step} {held}\\n".encode())
  time.sleep(0.5)
"""
_WAIT = """
print("ready", flush=True)
time.sleep(60)
"""


def test_before_the_first_step_it_leaves_at_once_and_says_that_nothing_was_saved():
  process = _start(_LIGHT + "preemption.save = save" + _WAIT)
  process.send_signal(signal.SIGTERM)
  assert _finish(process) == (
    143, "", "SIGTERM: nothing was saved, as no step was completed yet\n"
  )  # fmt: skip


def test_ctrl_c_saves_too_and_its_status_is_130():
  process = _start(_LIGHT + "preemption.save = save; preemption.hold(5, 'a')" + _WAIT)
  process.send_signal(signal.SIGINT)
  status, out, err = _finish(process)
  assert (status, out) == (130, "saving 5 a\n")
  assert err.startswith("SIGINT: checkpoint of step 5 saved")


def test_more_signals_while_saving_change_nothing():
  process = _start(_LIGHT + "preemption.save = save; preemption.hold(5, 'a')" + _WAIT)
  process.send_signal(signal.SIGTERM)
  assert process.stdout.readline() == "saving 5 a\n"
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
    process.send_signal(number)
    time.sleep(0.05)
  status, out, err = _finish(process)
  assert (status, out, err.count("\n")) == (143, "", 1)


def test_a_failed_save_is_told_and_the_status_is_1():
  code = """
def save(step, held):
  raise OSError("the disk is full")
preemption.save = save
preemption.hold(5, None)
"""
  process = _start(_LIGHT + code + _WAIT)
  process.send_signal(signal.SIGTERM)
  assert _finish(process) == (
    1, "", "SIGTERM: the checkpoint of step 5 could not be saved: the disk is full\n"
  )  # fmt: skip


def test_a_program_that_ends_meanwhile_waits_for_the_save():
  code = """
preemption.save = save
preemption.hold(5, "a")
print("ready", flush=True)
preemption.requested.wait()
preemption.close()
print("not reached", flush=True)
"""
  process = _start(_LIGHT + code)
  process.send_signal(signal.SIGTERM)
  status, out, _ = _finish(process)
  assert (status, out) == (143, "saving 5 a\n")


def test_the_main_thread_does_not_step_while_the_state_is_saved():
  code = """
preemption.save = save
preemption.hold(0, "a")
print("ready", flush=True)
preemption.requested.wait()
time.sleep(0.2)
preemption.hold(1, "b")
print("not reached", flush=True)
"""
  process = _start(_LIGHT + code)
  process.send_signal(signal.SIGTERM)
  status, out, _ = _finish(process)
  assert (status, out) == (143, "saving 0 a\n")


def test_a_full_pipe_on_the_main_thread_does_not_keep_the_process():
  code = """
preemption.save = lambda step, held: None
preemption.hold(1, None)
print("ready", flush=True)
while True:
  sys.stdout.write("x" * 10000)
"""
  process = _start(_LIGHT + code)
  time.sleep(0.3)  # by now it is stuck, as nobody reads
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=20) == 143
  process.communicate()


def test_child_processes_stop_on_sigterm_and_leave_the_parent_alone():
  code = """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # a fork with threads around is what is tried here
preemption.save = save
preemption.hold(1, None)
print("ready", flush=True)
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print(child.wait(10), flush=True)
for method in ("fork", "forkserver"):
  context = multiprocessing.get_context(method)
  child = context.Process(target=time.sleep, args=(60,))
  child.start()
  time.sleep(0.3)
  child.terminate()
  child.join(10)
  print(child.exitcode, flush=True)
"""
  process = _start(_LIGHT + code)
  assert _finish(process) == (0, "-15\n-15\n-15\n", "")


def test_closing_puts_the_former_handlers_back():
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  threads = threading.active_count()
  with Preemption() as preemption:
    assert signal.getsignal(signal.SIGTERM) is not before[0]
    preemption.hold(1, None)
  preemption.close()
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
  assert threading.active_count() == threads


def test_other_signals_are_none_of_its_business():
  seen = []
  before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
  try:
    with Preemption() as preemption:
      signal.raise_signal(signal.SIGUSR1)
      time.sleep(0.1)
      assert not preemption.requested.is_set()
  finally:
    signal.signal(signal.SIGUSR1, before)
  assert seen == [1]


def test_a_scheduler_may_announce_itself_with_another_signal():
  code = _LIGHT.replace("Preemption()", "Preemption([signal.SIGTERM, signal.SIGUSR1])")
  process = _start(code + "preemption.save = save; preemption.hold(5, 'a')" + _WAIT)
  process.send_signal(signal.SIGUSR1)
  status, out, _ = _finish(process)
  assert (status, out) == (128 + signal.SIGUSR1, "saving 5 a\n")
