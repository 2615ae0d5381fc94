"""The templates for GKE and Slurm: they parse, agree with themselves, and run against stand-ins."""

import dataclasses
import math
import os
import re
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from compmod_jax.commands.config_option import parse
from compmod_jax.commands.train import Args

ROOT = Path(__file__).parents[2]

# A step of two tasks; its exit status is the highest of theirs.
SRUN = """#!/usr/bin/env bash
[[ $1 == --kill-on-bad-exit=0 ]] || exit 99
highest=0
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID
  status=0
  "${@:2}" || status=$?
  ((status <= highest)) || highest=$status
done
exit "$highest"
"""
SCONTROL = '#!/usr/bin/env bash\necho "$*" >>"$FOLDER/requeued"\n'
# A training program whose second process ends with $STATUS.
PYTHON = """#!/usr/bin/env bash
echo "$SLURM_PROCID $JAX_PLATFORMS $*" >>"$FOLDER/trained"
((SLURM_PROCID == 0)) && exit "$FIRST"
exit "$STATUS"
"""


def jobset() -> dict[str, Any]:
  template = string.Template((ROOT / "tpu/gke/jobset.yaml").read_text())
  comments, text = re.split("^(?=apiVersion)", template.template, maxsplit=1, flags=re.MULTILINE)
  values = {"RUN": "nmt", "IMAGE": "image", "BUCKET": "bucket"}
  assert all(f"{name}=" in comments for name in values)
  return yaml.safe_load(string.Template(text).substitute(values))


def parsed(arguments: list[str]) -> Args:
  """The arguments of a training command, of which `--multihost` must be the first."""
  assert arguments[0] == "--multihost"
  return parse(Args, arguments[1:])


def test_the_jobset_asks_for_all_chips_of_its_slice():
  job = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
  assert job["completions"] == job["parallelism"]
  pod = job["template"]["spec"]
  topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
  chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
  assert math.prod(map(int, topology.split("x"))) == job["completions"] * chips


def test_the_jobset_trains_in_the_shared_folder_and_starts_again_except_after_mistakes():
  spec = jobset()["spec"]
  job = spec["replicatedJobs"][0]["template"]["spec"]
  (container,) = job["template"]["spec"]["containers"]
  assert container["command"][:3] == ["python", "-m", "train.main"]
  args = parsed(container["command"][3:])
  assert args.workdir.is_relative_to(container["volumeMounts"][0]["mountPath"])
  assert dataclasses.asdict(args.config)["time_limit_minutes"] == 0
  (volume,) = job["template"]["spec"]["volumes"]
  options = volume["csi"]["volumeAttributes"]["mountOptions"].split(",")
  assert len(options) == 6
  assert not any(" " in option for option in options)
  assert volume["name"] == container["volumeMounts"][0]["name"]
  (rule,) = job["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"] == {
    "containerName": container["name"],
    "operator": "In",
    "values": [2],
  }
  assert spec["failurePolicy"]["maxRestarts"] > 0


def test_the_container_runs_as_the_user_of_its_image_who_may_write_to_the_bucket():
  lines = (ROOT / "tpu/gke/Dockerfile").read_text().splitlines()
  (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
  assert lines[-1] == f"USER {user}"
  pod = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  assert pod["securityContext"]["runAsNonRoot"] is True
  assert pod["securityContext"]["runAsUser"] == int(user) > 0
  (container,) = pod["containers"]
  assert container["securityContext"]["allowPrivilegeEscalation"] is False
  options = pod["volumes"][0]["csi"]["volumeAttributes"]["mountOptions"].split(",")
  assert {f"uid={user}", f"gid={pod['securityContext']['runAsGroup']}"} <= set(options)


def test_the_image_is_built_from_what_it_copies_and_from_nothing_else():
  lines = (ROOT / "tpu/gke/Dockerfile").read_text().splitlines()
  copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
  ignored = (ROOT / ".dockerignore").read_text().splitlines()
  assert "*" in ignored
  assert {line[1:] for line in ignored if line.startswith("!")} == set(copied)


def test_what_the_image_copies_is_there():
  lines = (ROOT / "tpu/gke/Dockerfile").read_text().splitlines()
  copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
  assert {"compmod_jax", "train", "configs", "requirements"} <= set(copied)
  assert all((ROOT / name).exists() for name in copied)


@pytest.fixture
def slurm(tmp_path):
  """Runs the batch script where the program's second process ends with a status."""
  for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("bin/python", PYTHON)):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

  def run(
    *arguments: str,
    status: int = 0,
    first: int = 0,
    restarts: int | None = 0,
    most: str | None = None,
  ) -> subprocess.CompletedProcess[str]:
    environment = {
      "PATH": f"{tmp_path}:{os.environ['PATH']}",
      "FOLDER": str(tmp_path),
      "STATUS": str(status),
      "FIRST": str(first),
      "COMPMOD_VENV": str(tmp_path),
      "COMPMOD_RUNS": "/shared/runs",
      "SLURM_JOB_ID": "17",
    }
    if restarts is not None:
      environment["SLURM_RESTART_COUNT"] = str(restarts)
    if most is not None:
      environment["MAX_RESTARTS"] = most
    command = ["bash", str(ROOT / "tpu/slurm/train.sbatch"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)

  return run


TRAIN = ("nmt", "--config", "configs/nmt_cah.py", "--config.seed=3")


def test_the_batch_job_starts_the_same_training_in_every_task(slurm, tmp_path):
  done = slurm(*TRAIN)
  assert done.returncode == 0, done.stderr
  first, second = (tmp_path / "trained").read_text().splitlines()
  assert first.split()[:4] == ["0", "cuda,cpu", "-m", "train.main"]
  assert first.split()[1:] == second.split()[1:]
  args = parsed(first.split()[4:])
  assert args.workdir == Path("/shared/runs/nmt")
  assert dataclasses.asdict(args.config)["seed"] == 3
  assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("status", [143, 3])
def test_a_batch_job_that_was_interrupted_goes_back_into_the_queue(slurm, tmp_path, status):
  assert slurm(*TRAIN, status=status).returncode == 0
  assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize(("first", "requeued"), [(1, False), (2, False), (143, True), (137, True)])
def test_where_one_process_ends_the_others_are_lost_and_its_status_counts(
  slurm, tmp_path, first, requeued
):
  done = slurm(*TRAIN, first=first, status=3)
  assert done.returncode == (0 if requeued else first)
  assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.parametrize(("status", "restarts"), [(2, 0), (1, 0), (143, 50)])
def test_a_batch_job_does_not_try_mistakes_again_nor_for_ever(slurm, tmp_path, status, restarts):
  assert slurm(*TRAIN, status=status, restarts=restarts).returncode == status
  assert not (tmp_path / "requeued").exists()


def test_a_batch_job_that_may_never_go_on_by_itself_ends_with_its_status(slurm, tmp_path):
  # Slurm counts restarts from the first one on; before it there is no variable.
  done = slurm(*TRAIN, status=143, restarts=None, most="0")
  assert done.returncode == 143
  assert "after 0 restarts; submit it again to go on" in done.stderr
  assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("most", ["-1", "many", "1.5"])
def test_a_number_of_restarts_that_is_none_is_refused(slurm, tmp_path, most):
  done = slurm(*TRAIN, most=most)
  assert done.returncode == 2
  assert f"MAX_RESTARTS is '{most}'; it must be a whole number" in done.stderr
  assert not (tmp_path / "trained").exists()


def test_a_batch_job_without_a_configuration_or_an_environment_says_so(slurm, tmp_path):
  done = slurm("nmt")
  assert done.returncode == 2
  assert "sbatch tpu/slurm/train.sbatch RUN" in done.stderr
  (tmp_path / "bin/python").unlink()
  done = slurm(*TRAIN)
  assert done.returncode == 2
  assert "COMPMOD_VENV" in done.stderr


def test_the_batch_job_has_a_task_for_every_gpu_and_is_told_before_its_time_is_over():
  text = (ROOT / "tpu/slurm/train.sbatch").read_text()
  options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, flags=re.MULTILINE))
  assert options["ntasks-per-node"] == options["gpus-per-node"]
  assert options["signal"].startswith("TERM@")
  assert "requeue" in options
