"""A cloud of folders and processes for the tests of the TPU scripts; see `stub/gcloud`."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub"
SETTINGS = {
  "TPU_NAME": "my-tpu",
  "ZONE": "us-west4-a",
  "ACCELERATOR_TYPE": "v5litepod-16",
  "SHARED": "gs://bucket/folder",
  "RUN": "nmt",
  "POLL": "0.3",
}
TRAIN = ("--", "--config", "configs/nmt_cah.py")


def make_repository(folder: Path) -> Path:
  """A small repository of two commits with the scripts, and what they need of this one."""
  shutil.copytree(ROOT / "tpu", folder / "tpu")
  shutil.copytree(ROOT / "requirements", folder / "requirements")
  for name in ("Makefile", "pyproject.toml"):
    shutil.copy(ROOT / name, folder)
  git = ["git", "-C", str(folder), "-c", "user.name=name", "-c", "user.email=name@localhost"]
  subprocess.run([*git, "init", "--quiet"], check=True)
  subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=first"], check=True)
  subprocess.run([*git, "add", "."], check=True)
  subprocess.run([*git, "commit", "--quiet", "--message=second"], check=True)
  return folder


class Cloud:
  """What the stand-in for gcloud keeps, and the scripts run against it.

  Args:
    folder: where everything lies.
    repository: whose scripts are run.
    workers: of the TPU that is going to be made.
  """

  def __init__(self, folder: Path, repository: Path, workers: int = 2):
    self.folder = folder
    self.repository = repository
    folder.mkdir()
    self.settings = dict(SETTINGS)
    self.set(requests={}, workers=workers, created=["ACTIVE"], preempt=False, failures=0)

  def state(self) -> dict[str, Any]:
    path = self.folder / "state.json"
    return json.loads(path.read_text()) if path.exists() else {}

  def set(self, **state: object) -> None:
    with (self.folder / "lock").open("w") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      (self.folder / "state.json").write_text(json.dumps(self.state() | state))

  def environment(self) -> dict[str, str]:
    path = f"{STUB}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    home = {"HOME": str(self.folder), "CLOUD": str(self.folder), "PATH": path}
    return home | {name: value for name, value in self.settings.items() if value}

  def script(self, name: str) -> Path:
    return self.repository / "tpu" / f"{name}.sh"

  def run(self, script: str, *arguments: str, status: int = 0) -> str:
    """What a script says, on either channel; it must end with `status`."""
    done = subprocess.run(
      [self.script(script), *arguments],
      cwd=self.folder,
      env=self.environment(),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=300,
    )
    assert done.returncode == status, done.stdout
    return done.stdout

  def run_at_a_terminal(self, script: str, *arguments: str, answer: str) -> tuple[int, str]:
    """Exit status of a script whose question is answered, and what it says."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
      [self.script(script), *arguments],
      env=self.environment(),
      stdin=theirs,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    os.write(mine, f"{answer}\n".encode())
    said, _ = process.communicate(timeout=300)
    os.close(mine)
    os.close(theirs)
    return process.returncode, said

  def begin(self, script: str, *arguments: str) -> subprocess.Popen[str]:
    """A script that goes on while the test does."""
    return subprocess.Popen(
      [self.script(script), *arguments],
      env=self.environment(),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def start(self, *arguments: str) -> None:
    """A TPU with the run on it."""
    self.run("create")
    self.run("setup")
    self.run("launch", *(arguments or TRAIN))

  def preempt(self) -> None:
    """Takes the TPU away, as soon as anybody looks."""
    self.set(preempt=True)

  def calls(self, *words: str) -> list[list[str]]:
    """The calls of gcloud that have all these words."""
    path = self.folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [call for line in lines if set(words) <= set(call := json.loads(line))]

  def worker(self, number: int = 0) -> Path:
    return self.folder / "workers" / str(number)

  def trained(self, number: int = 0) -> list[str]:
    """The arguments of every training program that was started on a worker, a line each."""
    path = self.worker(number) / "trained"
    return path.read_text().splitlines() if path.exists() else []

  def finish(self) -> None:
    """Lets training end, on all workers and from now on."""
    (self.folder / "finish").touch()

  def wait_for_end(self) -> int:
    """The highest exit status of the run on the workers, once all have one."""

    def statuses() -> list[int] | None:
      workers = list((self.folder / "workers").iterdir())
      files = [worker / "compmod/jobs/nmt/status" for worker in workers]
      texts = [file.read_text().strip() if file.exists() else "" for file in files]
      return [int(text) for text in texts] if all(texts) else None

    return max(self.wait(statuses))

  def wait_for_step(self, step: int) -> None:
    """Returns once training has come that far."""

    def reached() -> bool:
      # A file that is being written is empty.
      texts = [path.read_text().strip() for path in self.folder.glob("**/nmt/step")]
      return any(int(text) >= step for text in texts if text)

    self.wait(reached)

  def wait(self, found: Callable[[], Any]) -> Any:
    """The first true thing that is found; machines that have much else to do get time."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
      if result := found():
        return result
      time.sleep(0.05)
    raise AssertionError("it never came")

  def close(self) -> None:
    """Ends what still trains, and removes everything."""
    for path in self.folder.glob("workers/*/compmod/jobs/*/pid"):
      pid = path.read_text().strip()
      if re.search("train.main", _command_line(pid)):
        os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(self.folder, ignore_errors=True)


def _command_line(pid: str) -> str:
  try:
    return Path(f"/proc/{pid}/cmdline").read_text()
  except OSError:
    return ""
