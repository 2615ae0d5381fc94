"""The scripts for TPUs, run against a stand-in for gcloud whose workers are processes here."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tpu_cloud import ROOT, STUB, TRAIN, Cloud

pytestmark = pytest.mark.programs


def revision(cloud: Cloud) -> str:
  return git(cloud.repository, "rev-parse", "HEAD")


def git(folder: Path, *arguments: str) -> str:
  command = ["git", "-C", str(folder), *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_run_survives_a_preemption_and_its_results_are_fetched(cloud):
  cloud.set(created=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
  said = cloud.run("create", "--spot")
  assert "asking for v5litepod-16 (spot) with v2-alpha-tpuv5-lite" in said
  assert "PROVISIONING" in said
  cloud.run("setup")
  cloud.run("launch", *TRAIN)
  cloud.wait_for_step(3)
  for number in (0, 1):
    assert cloud.trained(number) == [
      "-m train.main --multihost --config configs/nmt_cah.py"
      f" --workdir {cloud.worker(number)}/compmod/shared/nmt"
    ]
    assert (cloud.worker(number) / "compmod/installed").read_text().strip() == revision(cloud)
  assert cloud.run("status", status=75).count("running") == 2

  cloud.preempt()
  assert "PREEMPTED" in cloud.run("status", status=69)
  assert "tpu/resume.sh" in cloud.run("launch", *TRAIN, status=2)
  assert "tpu/resume.sh" in cloud.run("create", status=2)
  assert "add --yes" in cloud.run("resume", *TRAIN, status=2)
  assert not cloud.calls("delete")

  cloud.finish()
  cloud.run("resume", "--spot", "--yes", *TRAIN)
  assert cloud.wait_for_end() == 0
  log = cloud.run("logs")
  assert int(re.findall(r"continuing from step (\d+)", log)[0]) >= 3
  assert "finished at step" in log
  assert cloud.run("status").count("exit status 0") == 2
  verbs = [call[3] for call in cloud.calls("queued-resources") if call[3] != "describe"]
  assert verbs == ["create", "delete", "create"]

  cloud.run("fetch", "--to", "here")
  assert int((cloud.folder / "here/nmt/step").read_text()) >= 3
  logs = sorted((cloud.folder / "here/nmt/logs").iterdir())
  assert [path.name for path in logs] == ["worker_0.log", "worker_1.log"]
  cloud.run("delete", "--yes")
  assert "nothing to delete" in cloud.run("delete", "--yes")
  # What is in a bucket can be had without the TPU.
  cloud.run("fetch", "--to", "there")
  assert (cloud.folder / "there/nmt/step").exists()


def test_one_command_watches_a_run_over_a_preemption_until_it_has_finished(one_worker):
  one_worker.settings["SHARED"] = "gs://bucket/folder"
  with one_worker.begin("resume", "--watch", "--yes", *TRAIN) as watching:
    one_worker.wait_for_step(3)
    one_worker.preempt()
    one_worker.wait(lambda: len(one_worker.calls("queued-resources", "create")) == 2)
    one_worker.finish()
    said, _ = watching.communicate(timeout=300)
  assert watching.returncode == 0, said
  assert "nmt has finished" in said
  assert len(one_worker.calls("queued-resources", "create")) == 2


def test_watching_launches_again_where_only_a_process_was_lost(one_worker):
  one_worker.finish()
  said = one_worker.run("resume", "--watch", *TRAIN, "--config.fail_once=3")
  assert "nmt has finished" in said
  assert len(one_worker.trained()) == 2
  assert len(one_worker.calls("queued-resources", "create")) == 1


def test_a_run_that_ends_by_itself_is_not_launched_again_and_its_status_is_found(one_worker):
  one_worker.start(*TRAIN, "--config.fail=2")
  assert one_worker.wait_for_end() == 2
  assert one_worker.run("status", status=2).count("exit status 2") == 1
  said = one_worker.run("resume", "--watch", *TRAIN, "--config.fail=2", status=2)
  assert "not launched again" in said
  assert len(one_worker.trained()) == 2  # once by us, once when resuming was asked for


def test_every_script_run_twice_does_no_harm_and_says_what_it_found(cloud):
  cloud.run("create")
  assert "found queued resource my-tpu in us-west4-a: ACTIVE" in cloud.run("create")
  assert len(cloud.calls("queued-resources", "create")) == 1
  cloud.run("setup")
  assert cloud.run("setup").count("is installed already") == 2
  assert len((cloud.worker() / "made").read_text().splitlines()) == 1
  assert len((cloud.worker() / "mounted").read_text().splitlines()) == 1
  cloud.run("launch", *TRAIN)
  assert "is training already on all 2 worker(s)" in cloud.run("launch", *TRAIN)
  cloud.run("resume", *TRAIN)
  cloud.finish()
  assert cloud.wait_for_end() == 0
  assert cloud.run("launch", *TRAIN).count("has finished; not launched again") == 2
  assert len(cloud.trained()) == len(cloud.trained(1)) == 1
  cloud.run("fetch")
  before = sorted(cloud.folder.glob("runs/**/*"))
  cloud.run("fetch")
  assert sorted(cloud.folder.glob("runs/**/*")) == before
  assert cloud.run("stop").count("exit status 0") == 2


def test_a_launch_on_a_worker_that_trains_already_starts_nothing(one_worker):
  one_worker.start(*TRAIN)
  again = "bash compmod/worker.sh launch nmt '' --config other"
  command = ["compute", "tpus", "tpu-vm", "ssh", "my-tpu", f"--command={again}", "--zone=z"]
  path = STUB / "gcloud"
  done = subprocess.run(
    [path, *command], env=one_worker.environment(), capture_output=True, text=True, check=True
  )
  assert "is training already" in done.stdout
  one_worker.wait_for_step(1)
  assert len(one_worker.trained()) == 1


def test_a_run_that_is_stopped_saves_and_is_continued_by_launching_again(cloud):
  cloud.start()
  cloud.wait_for_step(2)
  assert cloud.run("stop").count("is told to end; it saves first") == 2
  assert cloud.wait_for_end() == 143
  assert cloud.run("status", status=143).count("stopped") == 2
  cloud.finish()
  cloud.run("launch", *TRAIN)
  assert cloud.wait_for_end() == 0
  log = cloud.run("logs", "--worker", "all")
  assert log.count("t1v-n-0a1b2c3d-w-0: saved") == log.count("t1v-n-0a1b2c3d-w-1: saved") == 1
  assert int(re.findall(r"w-0: continuing from step (\d+)", log)[1]) >= 2


def test_following_a_log_ends_with_the_run(one_worker):
  one_worker.start()
  one_worker.wait_for_step(1)
  with one_worker.begin("logs", "--follow") as following:
    assert following.stdout is not None
    following.stdout.readline()
    one_worker.finish()
    said, _ = following.communicate(timeout=300)
  assert "finished at step" in said
  assert following.returncode == 0


def test_where_some_workers_train_and_some_do_not_nothing_is_launched(cloud):
  cloud.start(*TRAIN)
  cloud.wait(lambda: cloud.trained(1))
  pid = int((cloud.worker(1) / "compmod/jobs/nmt/pid").read_text())
  os.kill(pid, 9)
  cloud.wait((cloud.worker(1) / "compmod/jobs/nmt/status").exists)
  said = cloud.run("launch", *TRAIN, status=1)
  assert "w-0 nmt: running" in said
  assert "w-1 nmt: exit status 137" in said
  assert len(cloud.trained(1)) == 1


def test_setting_up_changes_nothing_while_a_run_is_training(one_worker):
  one_worker.start(*TRAIN)
  said = one_worker.run("setup", "--revision", "HEAD~1", status=1)
  assert "nmt is training; nothing was changed" in said
  assert (one_worker.worker() / "compmod/installed").read_text().strip() == revision(one_worker)


def test_the_commit_asked_for_is_installed_with_the_commands_of_the_makefile(one_worker):
  one_worker.run("create")
  said = one_worker.run("setup", "--git", str(one_worker.repository))
  assert "lost with it if it is preempted" in said
  code = one_worker.worker() / "compmod/code"
  assert git(code, "rev-parse", "HEAD") == revision(one_worker)
  assert not git(code, "status", "--porcelain")
  made = (one_worker.worker() / "made").read_text().split()
  # The real make knows the target that the stand-in was asked for.
  command = ["make", "--dry-run", "--always-make", *made]
  done = subprocess.run(command, cwd=code.parent, capture_output=True, text=True, check=True)
  assert "pip install" in done.stdout
  assert "--editable ." in done.stdout
  assert "requirements/tpu.txt" in (one_worker.worker() / "pip").read_text()


def test_a_script_of_ones_own_runs_on_every_worker_before_the_installation(cloud, tmp_path):
  prepare = tmp_path / "prepare"
  prepare.write_text('echo here >"$HOME/prepared"\n')
  cloud.run("create")
  cloud.run("setup", "--prepare", str(prepare))
  assert all((cloud.worker(number) / "prepared").exists() for number in (0, 1))


def test_buckets_and_nfs_are_mounted_so_that_workers_see_each_others_files(one_worker):
  one_worker.settings["SHARED"] = "gs://bucket/folder"
  one_worker.run("create")
  one_worker.run("setup")
  mounted = (one_worker.worker() / "mounted").read_text().split()
  assert {"--rename-dir-limit=1000000", "--metadata-cache-ttl-secs=0", "--only-dir=folder"} <= set(
    mounted
  )
  other = "10.0.0.9:/export"
  assert "take a new TPU" in one_worker.run("setup", "--shared", other, status=1)
  assert "is not mounted" in one_worker.run("launch", "--shared", other, *TRAIN, status=1)
  one_worker.run("delete", "--yes")
  one_worker.run("create")
  one_worker.run("setup", "--shared", other)
  assert "mount -t nfs 10.0.0.9:/export shared" in (one_worker.worker() / "sudo").read_text()
  one_worker.finish()
  one_worker.run("launch", "--shared", other, *TRAIN)
  assert one_worker.wait_for_end() == 0
  one_worker.run("fetch", "--shared", other)
  assert (one_worker.folder / "runs/nmt/logs/worker_0.log").exists()


def test_one_worker_needs_no_shared_folder_and_no_multihost(one_worker):
  one_worker.start()
  one_worker.wait_for_step(1)
  one_worker.finish()
  assert one_worker.wait_for_end() == 0
  assert "--multihost" not in one_worker.trained()[0]
  one_worker.run("fetch")
  assert (one_worker.folder / "runs/nmt/step").exists()


def test_several_workers_without_a_shared_folder_are_refused(cloud):
  cloud.settings["SHARED"] = ""
  cloud.run("create")
  assert "--shared gs://BUCKET/FOLDER" in cloud.run("launch", *TRAIN, status=2)


@pytest.mark.parametrize("script", ["delete", "resume"])
def test_nothing_is_deleted_without_asking(one_worker, script):
  one_worker.run("create")
  if script == "resume":
    one_worker.preempt()
    one_worker.run("status", status=69)
  arguments = TRAIN if script == "resume" else ()
  said = one_worker.run(script, *arguments, status=2)
  assert "Nothing is deleted without asking" in said
  status, said = one_worker.run_at_a_terminal(script, *arguments, answer="no")
  assert status == 2
  assert "nothing was deleted" in said
  assert not one_worker.calls("delete")
  status, said = one_worker.run_at_a_terminal(script, *arguments, answer="yes")
  assert status == 0, said
  assert len(one_worker.calls("delete")) == 1


def test_resuming_with_yes_deletes_only_what_these_scripts_made(one_worker):
  one_worker.settings["CREATE_FLAGS"] = "--labels=team=nlp --network=n --labels cost=low"
  one_worker.run("create")
  labels = one_worker.state()["requests"]["my-tpu"]["labels"]
  assert labels == {"compmod": "made", "team": "nlp", "cost": "low"}

  requests = one_worker.state()["requests"]
  requests["my-tpu"]["labels"] = {"team": "nlp"}  # as made by hand
  one_worker.set(requests=requests)
  one_worker.preempt()
  one_worker.run("status", status=69)
  said = one_worker.run("resume", "--yes", *TRAIN, status=2)
  assert "has no label compmod=made" in said
  assert not one_worker.calls("delete")
  # Who is asked and answers may delete it.
  status, said = one_worker.run_at_a_terminal("resume", *TRAIN, answer="yes")
  assert status == 0, said
  assert len(one_worker.calls("delete")) == 1


@pytest.mark.parametrize("script", ["delete", "resume"])
def test_yes_in_the_environment_deletes_nothing(one_worker, script):
  one_worker.run("create")
  one_worker.preempt()
  one_worker.run("status", status=69)
  one_worker.settings["YES"] = "1"
  arguments = TRAIN if script == "resume" else ()
  assert "Nothing is deleted without asking" in one_worker.run(script, *arguments, status=2)
  assert not one_worker.calls("delete")


def test_a_password_in_the_git_url_is_neither_shown_nor_kept(one_worker):
  one_worker.run("create")
  # A port where nothing listens, so that git fails with a message that has the address.
  url = "http://user:s3cr3t@127.0.0.1:9/code.git"
  said = one_worker.run("setup", "--git", url, status=1)
  assert "127.0.0.1:9" in said
  assert "cannot be fetched" in said
  said += one_worker.run("setup", "--dry-run", "--git", url)
  assert "s3cr3t" not in said
  assert "s3cr3t" not in (one_worker.folder / "calls").read_text()
  found = subprocess.run(["grep", "-r", "s3cr3t", one_worker.worker()], capture_output=True)
  assert found.returncode == 1, found.stdout
  # A URL that failed is not used by the next set-up, which has none.
  one_worker.run("setup")


@pytest.fixture
def export() -> Iterator[Path]:
  """A worker's folder whose mounted export is not writable, for a user who is not root."""
  folder = Path(tempfile.mkdtemp())
  worker = folder / "compmod"
  shutil.copytree(ROOT / "tests/tpu/worker", folder / "tools")
  (folder / "export").mkdir()
  (worker / "venv/bin").mkdir(parents=True)
  shutil.copy(ROOT / "tpu/worker.sh", worker)
  shutil.copy(folder / "tools/trainer", worker / "venv/bin/python")
  (worker / "code").mkdir()
  (worker / "shared").symlink_to(folder / "export")
  (worker / "installed").write_text("revision")
  (worker / "shared_place").write_text("10.0.0.9:/export\n")
  (folder / "finish").touch()
  if os.geteuid() == 0:
    for path in (folder, *folder.rglob("*")):
      os.chown(path, 65534, 65534, follow_symlinks=False)
  (folder / "export").chmod(0o555)
  yield folder
  (folder / "export").chmod(0o755)
  shutil.rmtree(folder)


def test_of_a_shared_export_only_the_folder_of_the_run_is_made_writable(export):
  def launch(run: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      ["bash", "compmod/worker.sh", "launch", run, "10.0.0.9:/export", "--config", "c"],
      cwd=export,
      user=65534 if os.geteuid() == 0 else None,
      group=65534 if os.geteuid() == 0 else None,
      env={
        "HOME": str(export),
        "CLOUD": str(export),
        "HOSTNAME": "w-0",
        "PATH": f"{export}/tools:/usr/local/bin:/usr/bin:/bin",
      },
      capture_output=True,
      text=True,
    )

  done = launch("nmt")
  assert done.returncode == 0, done.stderr
  assert "nmt launched" in done.stdout
  assert (export / "export/nmt").is_dir()
  assert (export / "export").stat().st_mode & 0o777 == 0o555
  owner = f"{(export / 'export').stat().st_uid}:{(export / 'export').stat().st_gid}"
  asked = ["mkdir --parents shared/nmt", f"chown {owner} shared/nmt"]
  assert (export / "sudo").read_text().splitlines() == asked
  (export / "export/nmt").chmod(0o555)
  # No writing into a folder of somebody else, and no taking it away from them.
  done = launch("nmt")
  assert done.returncode == 1
  assert "may not write into it. Choose another --run" in done.stderr
  assert (export / "sudo").read_text().splitlines() == asked


def test_a_lost_request_is_replaced_and_a_waiting_one_is_waited_for(one_worker):
  one_worker.set(created=["WAITING_FOR_RESOURCES", "FAILED"])
  assert "FAILED; it is lost" in one_worker.run("create", status=2)
  one_worker.set(created=["WAITING_FOR_RESOURCES"])
  assert "waited 0 minutes" in one_worker.run("resume", "--yes", "--wait=0", *TRAIN, status=2)
  assert "waited 0 minutes" in one_worker.run("create", "--wait=0", status=2)
  assert len(one_worker.calls("queued-resources", "create")) == 2


def test_a_failing_gcloud_is_not_taken_for_a_tpu_that_does_not_exist(one_worker):
  one_worker.set(failures=1)
  assert "the service is unavailable" in one_worker.run("create", status=2)
  assert not one_worker.calls("create")


def test_a_state_that_is_not_known_is_left_alone(one_worker):
  one_worker.set(created=["ACTIVE"])
  one_worker.run("create")
  requests = one_worker.state()["requests"]
  requests["my-tpu"]["node"] = "STOPPED"
  one_worker.set(requests=requests)
  assert "know no remedy" in one_worker.run("resume", "--yes", *TRAIN, status=2)
  assert not one_worker.calls("delete")


def test_a_tpu_of_another_type_is_not_taken_for_the_one_asked_for(one_worker):
  one_worker.run("create")
  assert "is of type v5litepod-16" in one_worker.run("create", "--type=v5p-8", status=2)


def test_arguments_reach_training_as_they_are(one_worker):
  words = ["--config", "a b", "--config.text=it's $HOME", "--config.none="]
  one_worker.finish()
  one_worker.start("--", *words)
  assert one_worker.wait_for_end() == 0
  command = (one_worker.worker() / "compmod/jobs/nmt/command").read_text()
  assert shlex.split(command)[3:7] == words
