"""Several processes that train together. Only here: jax.distributed.

    with joined(options, about=...) as group:      # before JAX touches a device
      group.first("set up", make)                  # process 0 first, then the others
      ...

Every process runs the same program on its own devices, and what one computes with others all must
compute, in the same order. Where one is lost the others end within seconds: their last line names
it, and their exit status is `LOST`.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import tyro

from compmod_jax.core import errors
from compmod_jax.core.types import JSON
from compmod_jax.training.distributed.connections import Links
from compmod_jax.training.distributed.rendezvous import is_local, rendezvous

T = TypeVar("T")

LOST = 3  # exit status where another process was lost
_GRACE = 5.0  # seconds in which the reason of an error, or of an end, may still arrive


@dataclasses.dataclass(frozen=True)
class Multihost:
  """Several processes that train together, on one machine or many.

  On TPU pods, GKE and Slurm what is left out of the first three is found.
  """

  on: Annotated[bool, tyro.conf.arg(aliases=["--multihost"])] = False
  """Train together with other processes, which are started with the same command."""
  coordinator: str | None = None
  """HOST:PORT of process 0; it listens there and at the next port."""
  process: int | None = None
  """Number of this process, from 0."""
  processes: int | None = None
  """How many processes there are."""
  timeout: int = 300
  """Seconds in which all processes must have reported."""
  heartbeat: int = 30
  """Seconds of silence after which a process counts as lost."""

  def __post_init__(self):
    given = {"coordinator": self.coordinator, "process": self.process, "processes": self.processes}
    wrong = [name for name, value in given.items() if value is not None]
    errors.check(
      self.on or not wrong,
      f"--multihost.{' --multihost.'.join(wrong)} without --multihost; with it, this process trains"
      " together with others. Add it, or leave these out.",
    )
    for name, least in (("timeout", 1), ("heartbeat", 3)):
      value = getattr(self, name)
      errors.check(value >= least, f"--multihost.{name} is {value}; it must be {least} or more.")


class Group:
  """The processes that train together, or the only one.

  Attributes:
    links: connections with the others; none where there are none.
    process: number of this process.
  """

  def __init__(self, links: Links | None = None):
    self.links = links
    self.process = links.process if links else 0

  @property
  def primary(self) -> bool:
    """Whether this process writes what is written once: logs, reports, models."""
    return self.process == 0

  def decide(self, key: str, make: Callable[[], T]) -> T:
    """What process 0 makes of it, JSON, in all of them; so is the `UserError` that it raises."""
    if self.links is None:
      return make()
    answer: dict[str, Any] = {}
    if self.primary:
      try:
        answer = {"value": make()}
      except errors.UserError as error:
        answer = {"problem": str(error)}
    answer = self.links.gather(key, answer)[0]
    if "problem" in answer:
      raise errors.UserError(answer["problem"])
    return answer["value"]

  def first(self, key: str, make: Callable[[], T]) -> T:
    """Calls `make` in process 0, and once that is done, in all others."""
    made: list[T] = []
    self.decide(key, lambda: made.append(make()))
    return made[0] if made else make()

  def meet(self, key: str) -> None:
    """Returns when all processes are here."""
    if self.links is not None:
      self.links.gather(key)


@contextlib.contextmanager
def joined(options: Multihost, *, about: JSON = None) -> Iterator[Group]:
  """Joins the other processes; at the end waits until all have come there.

  Args:
    options: who and where they are.
    about: what must be the same in all: anything that JSON can hold.

  Raises:
    UserError: some are missing, or something about them is wrong.
  """
  if not options.on:
    yield Group()
    return
  import jax

  place = find_place(options)
  words = _LastWords()
  links = words.links = rendezvous(
    (place.host, place.port + 1 if place.port < 65535 else place.port - 1),
    place.process,
    place.processes,
    about=about,
    timeout=options.timeout,
    silence=options.heartbeat,
    on_loss=words.lost,
  )
  links.listen("who is there", lambda _: links.post("here"))
  try:
    _initialise(place, options)
    group = Group(links)
    yield group
    group.meet("end")
    links.leave()
    jax.distributed.shutdown()
    links.close()
  except BaseException as error:
    if not isinstance(error, errors.UserError | SystemExit):
      # What fails for want of another process often fails before it is known to be lost.
      words.wait(_GRACE)
    words.end(error)
    raise


class _LastWords:
  """Ends this process where another is lost, saying so, before JAX aborts it in its own words."""

  def __init__(self):
    self.links: Links | None = None
    self._status: int | None = None
    # JAX aborts in a thread of its own, where signal handlers of Python do not run.
    self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: self._aborted())
    ctypes.CDLL(None).signal(signal.SIGABRT, self._handler)

  def lost(self, text: str) -> None:
    """Says who is lost and ends the process, unless it is about to end for reasons of its own."""
    if " stopped: " in text:  # so may this one have, for the same reason
      time.sleep(_GRACE / 2)
    if self._status is None and not (self.links and self.links.leaving):
      self._say(text)

  def wait(self, seconds: float) -> None:
    """Waits whether another process is lost, which ends this one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end or (self.links and self.links.lost):
      time.sleep(0.05)

  def end(self, error: BaseException) -> None:
    """Has the process end as soon as the error was shown, without waiting for the others."""
    self._status = 2 if isinstance(error, errors.UserError) else 1
    if isinstance(error, SystemExit):
      self._status = error.code if isinstance(error.code, int) else 0
    if self.links:
      self.links.post("failed", " ".join(str(error).split())[:500] or repr(error))
    atexit.register(self._exit)  # runs before JAX's, which waits for all

  def _exit(self) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(self._status or 0)

  def _aborted(self) -> None:
    if self._status is not None or (self.links and self.links.leaving):
      time.sleep(_GRACE)  # it is about to end as it should
      os._exit(LOST if self._status is None else self._status)
    lost = silent(self.links) if self.links else ""
    self._say((self.links and self.links.lost) or f"{lost or 'another process'} does not answer")

  def _say(self, text: str) -> NoReturn:
    sys.stdout.flush()
    line = f"error: {text}. This process ends too. Run the same command on all to continue from the"
    os.write(2, f"\n{line} last checkpoint.\n".encode())
    os._exit(LOST)


def silent(links: Links, seconds: float = _GRACE / 2) -> str:
  """The processes that do not answer, in words; their threads run even while they compute."""
  links.post("who is there")
  end = time.monotonic() + seconds
  missing = []
  for process in range(links.processes):
    try:
      links.get("here", process, max(0.0, end - time.monotonic()))
    except LookupError:
      missing.append(process)
  # What the others say comes by way of process 0.
  return ", ".join(map(links.name, missing[:1] if 0 in missing else missing))


class _Place(NamedTuple):
  """Where this process and the first one are."""

  host: str
  port: int
  process: int
  processes: int


def find_place(options: Multihost) -> _Place:
  """What the options say, with what JAX finds of a cluster in place of what they leave out.

  Raises:
    UserError: something was neither given nor found, or is wrong.
  """
  # Not public, but the only way to what `jax.distributed.initialize` finds before it waits for all.
  from jax._src.clusters import ClusterEnv

  coordinator, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
    options.coordinator, options.processes, options.process, None, None, options.timeout
  )
  missing = {"coordinator": coordinator, "process": process, "processes": processes}
  names = [f"--multihost.{name}" for name, value in missing.items() if value is None]
  errors.check(
    not names,
    f"{', '.join(names)}: not given, and this is no TPU pod, GKE or Slurm job where it could be"
    " found. Give it, for example --multihost.coordinator HOST:PORT --multihost.process 0"
    " --multihost.processes 2.",
  )
  assert coordinator is not None
  assert process is not None
  assert processes is not None
  errors.check(
    0 <= process < processes,
    f"--multihost.process is {process} of {processes} processes; they count from 0.",
  )
  host, port = _address(coordinator)
  return _Place(host, port, process, processes)


def _address(coordinator: str) -> tuple[str, int]:
  """Host and port of a coordinator.

  Raises:
    UserError: it is not HOST:PORT, or there is no port next to it.
  """
  host, _, port = coordinator.rpartition(":")
  errors.check(
    host and port.isdecimal() and 0 < int(port) < 65536,
    f"--multihost.coordinator is {coordinator!r}; give HOST:PORT, for example 10.0.0.1:8476.",
  )
  return host.strip("[]"), int(port)


def _initialise(place: _Place, options: Multihost) -> None:
  """Makes the devices of all processes one JAX system."""
  import jax

  # SIGTERM is ours; see `Preemption`.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      f"{place.host}:{place.port}",
      place.processes,
      place.process,
      initialization_timeout=options.timeout,
      heartbeat_timeout_seconds=options.heartbeat,
      shutdown_timeout_seconds=options.heartbeat,
      coordinator_bind_address=f"127.0.0.1:{place.port}" if is_local(place.host) else None,
    )
  except RuntimeError as error:
    raise errors.UserError(
      f"JAX cannot join the processes at {place.host}:{place.port}: {str(error).splitlines()[0]}."
      " Let all machines reach that port, or choose another one with --multihost.coordinator."
    ) from error
  jax.devices()  # all wait for each other here, while all are sure to come
