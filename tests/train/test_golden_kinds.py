"""Models of every kind that an older version trained open and give the numbers that they gave."""

import importlib.util
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
spec = importlib.util.spec_from_file_location("golden_kinds", GOLDEN / "kinds.py")
kinds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kinds)
# Under top_k the last bits decide between units whose scores are close, and these change all else.
TOLERANCE = {"translation, all options": 0.05}
EXPECTED = json.loads((kinds.KINDS / "expected.json").read_text())


def test_every_kind_has_its_numbers():
  assert EXPECTED.keys() == kinds.CASES.keys()


@pytest.mark.parametrize("kind", EXPECTED)
def test_an_old_model_of_every_kind_gives_its_numbers(kind, tmp_path):
  """Scores, outputs, terms of the objective and gradients; the last bits differ by machine."""
  with tarfile.open(kinds.KINDS / f"{kinds.name_of(kind)}.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  found, expected = kinds.numbers_of(tmp_path / "run"), EXPECTED[kind]
  rtol = TOLERANCE.get(kind, 2e-4)
  assert found["outputs"] == expected["outputs"]
  for what in ("values", "terms", "gradients"):
    assert found[what].keys() >= expected[what].keys(), what
    for name, value in expected[what].items():
      np.testing.assert_allclose(found[what][name], value, rtol=rtol, atol=1e-5, err_msg=name)
  np.testing.assert_allclose(found["objective"], expected["objective"], rtol=rtol)
