"""Who is there: all processes of a run report to process 0 before they begin.

JAX itself waits in silence for processes that never come. Here a wrong start ends at a deadline, in
all that are there, by naming who is missing and where the others are.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from compmod_jax.core.errors import UserError
from compmod_jax.core.types import JSON
from compmod_jax.training.distributed.connections import Line, Links


def rendezvous(
  address: tuple[str, int],
  process: int,
  processes: int,
  *,
  about: JSON,
  timeout: float,
  silence: int,
  on_loss: Callable[[str], None],
) -> Links:
  """Waits until all processes are there.

  Args:
    address: host and port at which process 0 listens.
    process: number of this one.
    processes: how many there are.
    about: what must be the same in all: anything that JSON can hold.
    timeout: seconds until all must be there.
    silence: seconds after which one that does not answer is lost.
    on_loss: see `Links`.

  Raises:
    UserError: some are missing (they are named), two have the same number, or they differ.
  """
  hello = {
    "process": process,
    "processes": processes,
    "host": f"{socket.gethostname()}, pid {os.getpid()}",
    "about": about,
  }
  if process == 0:
    hosts, peers = _receive(address, hello, time.monotonic() + timeout, timeout)
  else:
    hosts, peers = _report(address, hello, time.monotonic() + timeout, timeout)
  for line in peers.values():
    line.wait(None)
    line.watch(silence)
  return Links(process, hosts, peers, on_loss)


def is_local(host: str) -> bool:
  """Whether only processes of this machine can reach a host of this name."""
  return host in ("localhost", "127.0.0.1")


def _receive(
  address: tuple[str, int], hello: dict[str, Any], end: float, timeout: float
) -> tuple[list[str], dict[int, Line]]:
  """Process 0: waits for the others; hosts and connections."""
  processes, there, lines = hello["processes"], {0: hello}, dict[int, Line]()
  host, port = address
  try:
    server = socket.create_server(("127.0.0.1" if is_local(host) else "", port))
  except OSError as error:
    raise UserError(
      f"Process 0 cannot listen at port {port}: {error.strerror}. Choose another port:"
      " --multihost.coordinator HOST:PORT uses PORT and its neighbour."
    ) from error
  with server:
    while len(there) < processes and (left := end - time.monotonic()) > 0:
      server.settimeout(left)
      try:
        line = Line(server.accept()[0])
      except OSError:  # nobody came
        continue
      said = _said(line, min(left, 10), hello)
      if said is None:
        continue
      problem = _mistake(said, hello, there)
      if problem:
        _refuse([line, *lines.values()], problem)
      there[said["process"]], lines[said["process"]] = said, line
  missing = [number for number in range(processes) if number not in there]
  if missing:
    seen = "; ".join(f"{number} on {said['host']}" for number, said in sorted(there.items()))
    _refuse(
      list(lines.values()),
      f"{len(there)} of {processes} processes reported within {timeout:g} seconds. Missing: process"
      f" {', '.join(map(str, missing))}. Reported: {seen}. Start the missing ones with the same"
      f" --multihost.coordinator ({host}:...), let their machines reach port {port} of this one, or"
      " raise --multihost.timeout.",
    )
  hosts = [there[number]["host"] for number in range(processes)]
  for line in lines.values():
    line.send({"hosts": hosts})
  return hosts, lines


def _said(line: Line, seconds: float, hello: dict[str, Any]) -> dict[str, Any] | None:
  """What a process reports, none if it is none of ours."""
  line.wait(seconds)
  with contextlib.suppress(OSError, ValueError):
    said = line.receive()
    if isinstance(said, dict) and said.keys() == hello.keys():
      return said
  line.close()
  return None


def _mistake(said: dict[str, Any], mine: dict[str, Any], there: dict[int, Any]) -> str | None:
  """What is wrong with a process that reports."""
  who = f"Process {said['process']} on {said['host']}"
  if said["processes"] != mine["processes"]:
    return (
      f"{who} was started with {said['processes']} processes, process 0 with"
      f" {mine['processes']}. Give all the same --multihost.processes."
    )
  if said["process"] in there:
    return (
      f"{who} has the number of the one on {there[said['process']]['host']}. Give each process its"
      " own --multihost.process."
    )
  if said["about"] != mine["about"]:
    return (
      f"{who} was started with {said['about']}, process 0 with {mine['about']}. Start all processes"
      " with the same version and configuration."
    )
  return None


def _refuse(lines: list[Line], problem: str) -> None:
  """Tells all who are there what is wrong, and raises it."""
  for line in lines:
    with contextlib.suppress(OSError):
      line.send({"problem": problem})
      line.close()
  raise UserError(problem)


def _report(
  address: tuple[str, int], hello: dict[str, Any], end: float, timeout: float
) -> tuple[list[str], dict[int, Line]]:
  """The others: report to process 0, and wait until all are there; hosts and its connection."""
  host, port = address
  reason = "no answer"
  while time.monotonic() < end:
    try:
      line = Line(socket.create_connection(address, timeout=min(10.0, timeout)))
    except OSError as error:
      reason = error.strerror or str(error)
      time.sleep(0.2)
      continue
    try:
      line.wait(timeout + 10)  # process 0 may have begun to wait later
      line.send(hello)
      answer = line.receive()
    except (OSError, ValueError) as error:
      answer, reason = None, str(error)
    if answer is not None and "hosts" in answer:
      return answer["hosts"], {0: line}
    line.close()
    if answer is not None:
      raise UserError(answer["problem"])
    time.sleep(0.2)  # it ended; the next one may be about to start
  raise UserError(
    f"Process {hello['process']} on {hello['host']} did not find process 0 at {host}:{port} within"
    f" {timeout:g} seconds ({reason}). Missing: process 0. Start it on {host}, open its port, or"
    " correct --multihost.coordinator."
  )
