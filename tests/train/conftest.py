"""One uninterrupted run, made once for all tests and processes of the session."""

import fcntl
import os

import pytest
from programs import Place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
  """Data, configuration, compile cache and the finished reference run."""
  root = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:  # the workers' folders lie in one that they share
    root = root.parent
  made = Place(root / "programs")
  made.root.mkdir(exist_ok=True)
  with open(made.root / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (made.root / "done").exists():
      made.make()
      (made.root / "done").touch()
  return made
