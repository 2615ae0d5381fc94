"""Connections among the processes of a run: what they tell each other, and who is lost.

Every process has one with process 0, which passes on what it hears. The kernel closes a connection
at once where its process ends, and after some seconds of silence where its machine or the network
does, so that no thread of ours must find time to say that it lives. Lines of JSON are exchanged.
"""

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from compmod_jax.core.types import JSON

_LONGEST = 1 << 20  # bytes of a line


class Links:
  """Connections of one process with all others; `rendezvous` makes it.

  Args:
    process: number of this process.
    hosts: where each process runs, in words.
    peers: process -> its connection; process 0 has all, the others have that of process 0.
    on_loss: called once, in a thread, with a sentence on the process that is gone.
  """

  def __init__(
    self,
    process: int,
    hosts: list[str],
    peers: dict[int, "Line"],
    on_loss: Callable[[str], None],
  ):
    self.process, self.hosts, self._peers, self._on_loss = process, hosts, peers, on_loss
    self.lost: str | None = None
    self._news = threading.Condition()
    self._said: dict[tuple[str, int], Any] = {}
    self._listeners: dict[str, Callable[[Any], object]] = {}
    self._rounds: Counter[str] = Counter()
    self._leaving: set[int] = set()
    self._closed = False
    for peer, line in peers.items():
      threading.Thread(target=self._read, args=(peer, line), daemon=True).start()

  @property
  def processes(self) -> int:
    """How many processes there are."""
    return len(self.hosts)

  def post(self, key: str, value: JSON = None) -> None:
    """Tells all processes something that JSON can hold; each key once."""
    self._hear({"key": key, "from": self.process, "value": value})

  def listen(self, key: str, call: Callable[[Any], object]) -> None:
    """Has `call` called, in a thread, with what any process posts under a key."""
    self._listeners[key] = call

  def get(self, key: str, process: int, timeout: float | None = None) -> Any:
    """What a process posted under a key, as soon as it is there.

    Raises:
      LookupError: the time is over, or a process was lost.
    """
    place = (key, process)
    with self._news:
      self._news.wait_for(lambda: place in self._said or self.lost, timeout)
      if place not in self._said:
        raise LookupError(self.lost or f"{self.name(process)} did not answer in {timeout} seconds")
      return self._said[place]

  def gather(self, key: str, value: JSON = None, timeout: float | None = None) -> list[Any]:
    """What every process gives, by its number; all must call it, the n-th time together.

    Raises:
      LookupError: as `get`.
    """
    self._rounds[key] += 1
    place = f"{key} {self._rounds[key]}"
    self.post(place, value)
    return [self.get(place, process, timeout) for process in range(self.processes)]

  def leave(self) -> None:
    """Says that this process ends, so that nobody misses it."""
    self.post("leave")

  @property
  def leaving(self) -> bool:
    """Whether this process said that it ends."""
    return self.process in self._leaving

  def close(self) -> None:
    """Closes the connections."""
    self._closed = True
    for line in self._peers.values():
      line.close()

  def name(self, process: int) -> str:
    """A process in words."""
    return f"process {process} of {self.processes} ({self.hosts[process]})"

  def _read(self, peer: int, line: "Line") -> None:
    why = "its connection closed: it ended, or was killed"
    try:
      while message := line.receive():
        self._hear(message, peer)
    except (OSError, ValueError) as error:
      if isinstance(error, TimeoutError):
        why = "its machine does not answer"
    if peer not in self._leaving and not self._closed:
      self._hear({"key": "lost", "from": self.process, "value": [peer, why]})

  def _hear(self, message: dict[str, Any], origin: int | None = None) -> None:
    """Takes a message in, and passes it on: process 0 to all others, they their own to it."""
    key, sender, value = message["key"], message["from"], message["value"]
    if key == "leave":
      self._leaving.add(sender)
    for peer, line in self._peers.items():
      if peer != origin:
        with contextlib.suppress(OSError):  # reading notices
          line.send(message)
    if key in self._listeners:
      self._listeners[key](value)
    with self._news:
      self._said.setdefault((key, sender), value)
      first = key in ("lost", "failed") and self.lost is None and sender != self.process
      if key == "lost" and self.lost is None:
        first = True
        self.lost = f"{self.name(value[0])} is lost: {value[1]}"
      elif first:
        self.lost = f"{self.name(sender)} stopped: {value}"
      self._news.notify_all()
    if first:
      self._on_loss(str(self.lost))


class Line:
  """One connection, on which objects travel as lines of JSON."""

  def __init__(self, connection: socket.socket):
    self._socket, self._rest = connection, b""
    self._lock = threading.Lock()

  def send(self, message: JSON) -> None:
    """Sends an object."""
    with self._lock:
      self._socket.sendall(json.dumps(message).encode() + b"\n")

  def receive(self) -> Any:
    """The next object; None where the connection was closed."""
    while b"\n" not in self._rest:
      more = self._socket.recv(1 << 16)
      if not more or len(self._rest) > _LONGEST:
        return None
      self._rest += more
    line, _, self._rest = self._rest.partition(b"\n")
    return json.loads(line)

  def wait(self, seconds: float | None) -> None:
    """How long to wait for the next object; None: for ever."""
    self._socket.settimeout(seconds)

  def watch(self, silence: int) -> None:
    """Has the kernel close the connection where the other side is silent for `silence` seconds."""
    options = {
      "TCP_KEEPIDLE": max(1, silence // 3),
      "TCP_KEEPINTVL": max(1, silence // 3),
      "TCP_KEEPCNT": 2,
      "TCP_USER_TIMEOUT": 1000 * silence,
    }
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
      if hasattr(socket, name):  # not everywhere
        self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

  def close(self) -> None:
    """Ends the connection."""
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()
