"""A stand-in for Google Cloud with a TPU of two workers, or of one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tpu_cloud import Cloud, make_repository


@pytest.fixture(scope="session")
def repository(tmp_path_factory) -> Path:
  return make_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def cloud(tmp_path, repository) -> Iterator[Cloud]:
  cloud = Cloud(tmp_path / "cloud", repository)
  yield cloud
  cloud.close()


@pytest.fixture
def one_worker(tmp_path, repository) -> Iterator[Cloud]:
  cloud = Cloud(tmp_path / "cloud", repository, workers=1)
  cloud.settings["SHARED"] = ""
  yield cloud
  cloud.close()
