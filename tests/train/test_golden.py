"""A run that version 1 of the checkpoint and model formats wrote goes on opening."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from programs import Place, Program, make_newer, metrics_of

import compmod_jax
from compmod_jax.core.errors import UserError
from compmod_jax.training.checkpoint import Checkpointer

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT = "checkpoints/step_00000400"
# The configuration is the saved one, so that it must go on being readable too.
CONFIG = """
from pathlib import Path
from compmod_jax.training.workdir import saved_experiment

def get_config(variant):
  return saved_experiment(Path({!r}))
"""


@pytest.fixture
def golden(tmp_path, monkeypatch):
  """The golden workdir, unpacked."""
  monkeypatch.setenv("GOLDEN_DATA", str(GOLDEN / "data"))
  with tarfile.open(GOLDEN / "run.tar.xz") as archive:
    archive.extractall(tmp_path, filter="data")
  return tmp_path / "run"


@pytest.fixture(scope="module")
def expected():
  """What followed from it when it was made."""
  return json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.programs
def test_an_old_checkpoint_is_continued_with_the_losses_of_its_time(golden, expected, tmp_path):
  place = Place(tmp_path, optimised=True)
  place.config.write_text(CONFIG.format(str(golden)))
  with Program(place, golden) as program:
    shown = program.trained()
  assert "continuing from the checkpoint of step 400\n" in shown
  for kind in ("train", "eval"):
    found = {str(line["step"]): line["loss"] for line in metrics_of(golden, kind)}
    assert found.keys() == expected[kind].keys()
    wanted = [expected[kind][step] for step in found]
    np.testing.assert_allclose(list(found.values()), wanted, rtol=1e-5)


def test_an_old_model_translates_as_it_did(golden, expected):
  sources, outputs, scores = zip(*expected["translations"], strict=True)
  model = compmod_jax.load(golden)
  assert model.translate(list(sources)) == list(outputs)
  found = model.task.generator(
    model.task.model, model.params, list(sources), model.task.dataset.config.decode
  )
  np.testing.assert_allclose([best[0].score for best in found], scores, rtol=1e-5)


def test_the_schema_version_is_in_every_file_from_the_first_one(golden):
  for name in (f"{CHECKPOINT}/meta.json", "models/best/model.json", "tokenizers/model.json"):
    assert json.loads((golden / name).read_text())["schema"] == 1


def test_a_newer_schema_is_refused_with_a_message(golden):
  path = golden / "models" / "best" / "model.json"
  path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
  with pytest.raises(
    UserError, match=r"model\.json: has schema version 99, and this program reads"
  ):
    compmod_jax.load(golden)
  make_newer(golden / CHECKPOINT)
  with pytest.raises(UserError, match="has schema version 99, and this program reads versions up"):
    Checkpointer(golden / "checkpoints").restore({})
