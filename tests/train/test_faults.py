"""The disk fails under a writer: one paragraph, nothing is lost, the same command goes on."""

import random
import shutil

import pytest
from xla_flags import QUICK

from benchmarks import faults, kills

pytestmark = [
  pytest.mark.programs,
  pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A run without a fault, and room for those with; its programs have one device."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", QUICK)
    made = faults.Place(tmp_path_factory.mktemp("faults"), "recurrent")
    status, shown, _ = made.run(None, workdir=made.root / "reference")
    assert status == 0, shown
    yield made


def _writers(*names):
  return [one for one in faults.TRAINING if one.name in names]


def test_a_run_that_met_faults_in_its_writers_ends_as_one_without(place):
  """In the order in which a run comes to them, so that each start gets a little farther."""
  writers = _writers("metrics.jsonl", "checkpoint: arrays (orbax)")
  for writer, error in zip(writers, ("io", "full"), strict=True):
    outcome = place.strike(writer, error)
    assert outcome.struck, writer.name
    assert outcome.wrong == [], writer.name
  status, shown, _ = place.run(None)
  assert status == 0, shown
  assert kills.differences(place.root / "reference", place.workdir) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("error", faults.ERRORS)
def test_every_writer_may_fail(tmp_path, error):
  found, different = faults.suffer(faults.Place(tmp_path, "masked"), [error], print)
  assert [(one.writer, one.wrong) for one in found if one.wrong] == []
  assert different == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", kills.KINDS)
def test_kills_at_random_moments_lose_nothing(tmp_path, kind):
  count, moments = kills.Kind(), random.Random(1)
  kills.prepare(kind, count, tmp_path)
  while count.kills < 5 and not count.failed:
    kills.torment(kind, count, 5, tmp_path, moments, lambda: False)
  assert not count.failed, count.notes
  assert count.kills == 5
