"""Uninterrupted runs, made once for all tests and processes of the session."""

import os

import pytest
from programs import Place, Program


@pytest.fixture(scope="session")
def place(tmp_path_factory):
  """Data, configuration, compile cache and the finished reference run."""
  root = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:  # the workers' folders lie in one that they share
    root = root.parent
  made = Place(root / "programs")
  made.root.mkdir(exist_ok=True)
  made.once("reference", made.make)
  return made


@pytest.fixture(scope="session")
def two_phases(place):
  """A finished run of two phases: all but the routers' parameters train, then those alone."""
  workdir = place.root / "phases"

  def make():
    with Program(place, workdir, variant="two") as program:
      program.trained()

  place.once("phases", make)
  return workdir
