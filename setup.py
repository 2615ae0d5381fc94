"""Puts the configurations of the checkout into the wheel, as `compmod_jax/configs`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
  """Copies `configs/` beside the package's modules; a checkout is read where it stands."""

  def run(self) -> None:
    """Builds, then copies."""
    super().run()
    if not self.editable_mode:
      folder = Path(self.build_lib) / "compmod_jax" / "configs"
      folder.mkdir(parents=True, exist_ok=True)
      for path in Path(__file__).parent.glob("configs/*.py"):
        shutil.copyfile(path, folder / path.name)


setup(cmdclass={"build_py": BuildWithConfigs})
