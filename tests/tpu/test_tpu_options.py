"""What the scripts for TPUs ask for, say and print; that shellcheck finds nothing in them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tpu_cloud import ROOT, TRAIN

SCRIPTS = ["create", "setup", "launch", "status", "logs", "stop", "resume", "fetch", "delete"]


@pytest.mark.parametrize(
  ("script", "name", "value", "remedy"),
  [
    ("create", "TPU_NAME", "", "Give --name, or export TPU_NAME"),
    ("setup", "ZONE", "", "Give --zone, or export ZONE"),
    ("create", "ACCELERATOR_TYPE", "", "Give --type, or export ACCELERATOR_TYPE"),
    ("create", "ACCELERATOR_TYPE", "v99-8", "Give --runtime"),
    ("launch", "RUN", "", "Give --run, or export RUN"),
    ("launch", "RUN", "a b", "letters, digits"),
    ("setup", "SHARED", "bucket", "gs://BUCKET/FOLDER"),
    ("create", "TPU_NAME", "My_TPU", "small letters"),
    ("setup", "REVISION", "nothing", "git log lists them"),
    ("create", "POLL", "soon", "must be seconds"),
  ],
)
def test_a_missing_or_wrong_setting_is_named_with_its_remedy(cloud, script, name, value, remedy):
  cloud.settings[name] = value
  arguments = TRAIN if script == "launch" else ()
  said = cloud.run(script, *arguments, status=2)
  assert name in said
  assert remedy in said
  assert not cloud.calls()


def test_wrong_options_are_told():
  for arguments, remedy in [
    (("--nmae", "x"), "has no option --nmae"),
    (("--name",), "--name needs a value"),
    (("--", "x"), "takes nothing after --"),
  ]:
    command = [ROOT / "tpu/delete.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert remedy in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_the_commands_and_runs_none(cloud, script):
  arguments = TRAIN if script in ("launch", "resume") else ()
  printed = cloud.run(script, "--dry-run", *arguments).splitlines()
  commands = [line for line in printed if line.startswith("gcloud ")]
  assert commands
  assert not cloud.calls()
  assert not (cloud.folder / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script):
  command = [ROOT / "tpu" / f"{script}.sh", "--help"]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert f"tpu/{script}.sh" in done.stdout
  assert "TPU_NAME" in done.stdout


def test_all_shell_scripts_are_shellcheck_clean():
  beside = Path(sys.executable).parent / "shellcheck"
  shellcheck = beside if beside.exists() else shutil.which("shellcheck")
  assert shellcheck, "install the project with its test extra"
  scripts = [*(ROOT / "tpu").rglob("*.sh"), *(ROOT / "tpu").rglob("*.sbatch")]
  scripts += (ROOT / "tests/tpu/worker").iterdir()
  assert len(scripts) >= 18
  # SC1091: that it does not read common.sh again for every script that does.
  command = [shellcheck, "--exclude=SC1091", *scripts]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout
