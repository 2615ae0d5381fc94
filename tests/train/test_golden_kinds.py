"""Models of every kind that an older version trained open and give the numbers that they gave."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
spec = importlib.util.spec_from_file_location("golden_kinds", GOLDEN / "kinds.py")
kinds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kinds)
EXPECTED = json.loads((kinds.KINDS / "expected.json").read_text())


def test_every_kind_has_its_numbers():
  assert EXPECTED.keys() == kinds.CASES.keys()


@pytest.mark.parametrize("kind", EXPECTED)
def test_an_old_model_of_every_kind_gives_its_numbers(kind, tmp_path):
  """Scores, outputs, terms of the objective and gradients; the last bits differ by machine."""
  with tarfile.open(kinds.KINDS / f"{kinds.name_of(kind)}.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  found, expected = kinds.numbers_of(tmp_path / "run"), EXPECTED[kind]
  rtol = 2e-4
  assert found["outputs"] == expected["outputs"]
  for what in ("values", "terms", "gradients"):
    assert found[what].keys() >= expected[what].keys(), what
    for name, value in expected[what].items():
      np.testing.assert_allclose(found[what][name], value, rtol=rtol, atol=1e-5, err_msg=name)
  np.testing.assert_allclose(found["objective"], expected["objective"], rtol=rtol)


# The unit with the least score was left out where XLA computed the two sides of a comparison apart.
ALL_STAY = """
import sys, jax, jax.numpy as jnp, numpy as np
import compmod_jax
from compmod_jax.core.intermediates import Intermediates
model = compmod_jax.load(sys.argv[1])
batch = next(model.task.dataset.train_batches(seed=0, multiple=1)[0])
batch = {name: jnp.asarray(value) for name, value in batch.items()}
sites = frozenset(model.task.model.routing_sites())
def weights(params):
  intermediates = Intermediates(capture=sites)
  model.task.model.forward(params, batch, intermediates=intermediates)
  return intermediates.captured
for site, found in jax.jit(weights)(model.params).items():
  print(site, int(np.sum(np.asarray(found) == 0)))
"""


@pytest.mark.programs
def test_all_units_have_weights_where_all_are_kept_as_users_compile(tmp_path):
  with tarfile.open(kinds.KINDS / "translation-all-options.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  shown = subprocess.run(
    [sys.executable, "-c", ALL_STAY, str(tmp_path / "run")],
    env=environment | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  without = dict(line.split() for line in shown.splitlines())
  assert len(without) == 9
  assert set(without.values()) == {"0"}
