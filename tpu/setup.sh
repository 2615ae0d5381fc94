#!/usr/bin/env bash
# Installs this project on all workers of a TPU, and mounts the folder that they share.
#
#   tpu/setup.sh [--shared gs://BUCKET/FOLDER | --shared HOST:/EXPORT] [--revision REV]
#
#   --shared PLACE   SHARED    where runs are kept: a bucket, or an NFS export (Filestore). Needed
#                              by several workers, and to survive a preemption
#   --revision REV   REVISION  the commit to install (HEAD); what is not committed stays here
#   --git URL        GIT_URL   workers fetch the commit from there; otherwise it is copied to them.
#                              A password or token in it is neither shown nor kept
#   --prepare FILE   PREPARE   a bash script that runs on every worker first
#
# Run again, it installs only what is missing; it changes nothing while a run is training.

. "$(dirname "$0")/common.sh"
here=$(cd "$(dirname "$0")" && pwd)

parse "--shared --revision --git --prepare" "$@"
need TPU_NAME ZONE
[[ -z $PREPARE || -f $PREPARE ]] || die "PREPARE is '$PREPARE', which is not a file here."
revision=$(git -C "$here" rev-parse --verify --quiet "${REVISION:-HEAD}^{commit}") ||
  die "REVISION is '$REVISION', which is no commit of this repository. git log lists them."
if [[ -n $(git -C "$here" status --porcelain --untracked-files=no) ]]; then
  say "note: changes that are not committed are not installed"
fi
need_ready

files=$SCRATCH/files
mkdir "$files"
cp "$here/worker.sh" "$files"
cp "${PREPARE:-/dev/null}" "$files/prepare.sh"
# In a file and not in the command, which gcloud logs and every user of a worker can list.
(umask 077 && echo "$GIT_URL" >"$files/git_url")
if [[ ! $GIT_URL ]]; then
  # A bundle and not an archive, so that runs record the commit that they were made with; from a
  # clone, so that no reference is made in this repository.
  git clone --quiet --bare --shared "$here/.." "$SCRATCH/git"
  git -C "$SCRATCH/git" update-ref refs/heads/to-install "$revision"
  git -C "$SCRATCH/git" bundle create --quiet "$files/code.bundle" refs/heads/to-install
fi

say "copying to $WORKERS worker(s)"
on all mkdir -p compmod
copy all "$files"/* "$TPU_NAME:compmod/"
say "installing revision ${revision:0:12}"
on all bash compmod/worker.sh install "$revision" "$SHARED"
[[ $SHARED ]] ||
  say "note: no --shared folder: runs are on the worker's disk, and lost with it if it is preempted"
say "$TPU_NAME is set up. Next: tpu/launch.sh --run RUN -- --config configs/nmt_cah.py"
