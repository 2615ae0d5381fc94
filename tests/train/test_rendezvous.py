"""A wrong start of several processes ends soon and says what is wrong; a loss is heard by all."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from programs import free_ports

from compmod_jax.core.errors import UserError
from compmod_jax.training.distributed.connections import Line
from compmod_jax.training.distributed.multihost import Group, Multihost, find_place, silent
from compmod_jax.training.distributed.rendezvous import rendezvous


def together(*starts: Callable[[], Any]) -> list[Any]:
  """What each gives, all started at once: a value or the error that it raises."""
  found: list[Any] = [None] * len(starts)

  def run(number: int) -> None:
    try:
      found[number] = starts[number]()
    except (UserError, LookupError) as error:
      found[number] = error

  threads = [threading.Thread(target=run, args=(number,)) for number in range(len(starts))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  return found


def call(port: int, process: int, processes: int, about: Any = 1, **options: Any) -> Callable:
  """Reports as one process."""
  options = {"timeout": 10, "silence": 9, "on_loss": lambda _: None, **options}
  return lambda: rendezvous(("127.0.0.1", port), process, processes, about=about, **options)


@pytest.fixture
def groups():
  """Three processes that found each other; the last one's losses are collected in `.heard`."""
  heard: list[str] = []
  port = free_ports()
  found = together(*(call(port, number, 3, on_loss=heard.append) for number in range(3)))
  made = [Group(links) for links in found]
  yield made, heard
  for group in made:
    group.links.leave()
  for group in made:
    group.links.close()


def test_processes_that_never_came_are_named_to_those_who_did():
  port = free_ports()
  began = time.monotonic()
  errors = together(call(port, 0, 4, timeout=1), call(port, 2, 4, timeout=1))
  assert time.monotonic() - began < 10
  for error in errors:
    assert isinstance(error, UserError)
    assert "2 of 4 processes reported within 1 seconds. Missing: process 1, 3." in str(error)
    assert f"2 on {socket.gethostname()}, pid " in str(error)
    assert f"port {port}" in str(error)


def test_a_process_whose_coordinator_is_not_there_says_so():
  port = free_ports()
  (error,) = together(call(port, 1, 2, timeout=1))
  assert f"did not find process 0 at 127.0.0.1:{port} within 1 seconds (Connection" in str(error)
  assert "Missing: process 0" in str(error)


@pytest.mark.parametrize(
  ("second", "words"),
  [
    ((1, 3, 1), "was started with 3 processes, process 0 with 2"),
    ((0, 2, 1), "cannot listen at port"),
    ((1, 2, 5), "was started with 5, process 0 with 1"),
  ],
)
def test_processes_that_were_started_differently_are_told(second, words):
  port = free_ports()
  errors = together(call(port, 0, 2, timeout=2), call(port, *second, timeout=2))
  assert any(words in str(error) for error in errors)
  assert all(isinstance(error, UserError) for error in errors)


def test_two_processes_with_one_number_are_told():
  port = free_ports()
  errors = together(*(call(port, number, 3, timeout=5) for number in (0, 1, 1)))
  assert all("has the number of the one on" in str(error) for error in errors)


def test_strangers_at_the_port_are_ignored():
  port = free_ports()

  def stranger():
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\n"):
      time.sleep(0.1)
      with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(text)

  def late():
    time.sleep(0.6)
    return call(port, 1, 2)()

  first, _, second = together(call(port, 0, 2), stranger, late)
  assert first.hosts == second.hosts
  for links in (first, second):
    links.leave()
    links.close()


def test_what_one_process_gives_all_others_get_in_order(groups):
  made, _ = groups
  for round in range(3):
    found = together(*(lambda g=group: g.links.gather("x", [round, g.process]) for group in made))
    assert found == [[[round, 0], [round, 1], [round, 2]]] * 3


def test_process_0_decides_and_goes_first(groups):
  made, _ = groups
  order: list[int] = []
  together(*(lambda g=group: g.first("turn", lambda: order.append(g.process)) for group in made))
  assert order[0] == 0
  assert sorted(order) == [0, 1, 2]
  found = together(*(lambda g=group: g.decide("name", lambda: str(g.process)) for group in made))
  assert found == ["0", "0", "0"]


def test_a_mistake_that_process_0_finds_ends_all(groups):
  made, _ = groups

  def wrong():
    raise UserError("the folder is in use")

  found = together(*(lambda g=group: g.first("set up", wrong) for group in made))
  assert [str(error) for error in found] == ["the folder is in use"] * 3


def test_everyone_hears_of_a_process_that_is_gone_and_who_it_was(groups):
  made, heard = groups
  name = made[0].links.name(2)
  made[2].links.close()
  found = together(*(lambda g=group: g.links.gather("y", timeout=10) for group in made[:2]))
  assert all(f"{name} is lost: its connection closed" in str(error) for error in found)
  assert [text.split(":")[0] for text in heard] == [f"{name} is lost"] * 2


def test_processes_that_are_there_but_do_not_answer_are_named(groups):
  made, _ = groups
  links = [group.links for group in made]
  links[0].listen("who is there", lambda _: links[0].post("here"))
  links[1].listen("who is there", lambda _: links[1].post("here"))
  assert silent(links[1], 0.5) == links[1].name(2)


def test_nobody_misses_a_process_that_said_that_it_leaves(groups):
  made, heard = groups
  made[2].links.leave()
  assert made[0].links.get("leave", 2, 5) is None
  made[2].links.close()
  found = together(*(lambda g=group: g.links.get("nothing", 1, 0.3) for group in made[:2]))
  assert all("did not answer" in str(error) for error in found)
  assert heard == []


def test_a_group_of_one_needs_nobody():
  group = Group()
  assert group.primary
  assert group.first("x", lambda: 3) == group.decide("x", lambda: 3) == 3
  group.meet("y")


def test_a_silent_connection_is_watched_by_the_kernel():
  with socket.create_server(("127.0.0.1", 0)) as server:
    one = socket.create_connection(server.getsockname())
    line = Line(one)
    line.watch(9)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000
    line.close()


# Options.


def test_what_is_left_out_is_found_on_slurm(monkeypatch):
  job = {
    "SLURM_JOB_ID": "4095",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
  }
  for name, value in job.items():
    monkeypatch.setenv(name, value)
  assert find_place(Multihost(on=True)) == ("gpu007", 65535, 2, 3)
  assert find_place(Multihost(on=True, coordinator="other:7000")) == ("other", 7000, 2, 3)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"on": True}, r"--multihost\.coordinator, --multihost\.process, --multihost\.processes: not"),
    ({"on": True, "coordinator": "a:1", "process": 2, "processes": 2}, "is 2 of 2 processes"),
    ({"on": True, "coordinator": "a", "process": 0, "processes": 2}, "'a'; give HOST:PORT"),
    ({"process": 1}, r"--multihost\.process without --multihost"),
    ({"on": True, "timeout": 0}, r"--multihost\.timeout is 0"),
    ({"on": True, "heartbeat": 1}, r"--multihost\.heartbeat is 1; it must be 3"),
  ],
)
def test_options_that_make_no_sense_are_named(options, words):
  with pytest.raises(UserError, match=words):
    find_place(Multihost(**options))
