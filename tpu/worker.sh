#!/usr/bin/env bash
# What the other scripts have done on a worker. They copy it to ~/compmod there and call it.
#
#   worker.sh install REVISION SHARED   code (code.bundle, or from the URL in the file git_url),
#                                       environment, shared folder
#   worker.sh launch RUN SHARED ARGUMENT ...  starts python -m train.main in the background
#   worker.sh status RUN                a line whose last word says how the run is
#   worker.sh log RUN LINES FOLLOW PREFIX
#   worker.sh stop RUN
#
# A run has a folder jobs/RUN: command, log, pid, and status once it has ended. Its lock is held by
# the training program itself, so that it is free if and only if nothing trains.

set -Eeuo pipefail
# 1 and not 2, which the callers keep for mistakes in their own arguments, or 255, which gcloud
# takes for a connection that failed.
trap 'exit 1' ERR
cd "$(dirname "$0")"
HOME_FOLDER=$PWD
HOSTNAME=${HOSTNAME:-$(hostname)}

say() { echo "compmod: $HOSTNAME $*"; }

fail() {
  echo "error: $HOSTNAME: $*" >&2
  exit 1
}

locked() {
  [[ -e $1/lock ]] && ! flock --shared --nonblock "$1/lock" true
}

# A Python that is new enough; Ubuntu 22.04 on TPU VMs has 3.10.
find_python() {
  local python uv
  for python in python3.13 python3.12 python3.11 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$python"
      return
    fi
  done
  python3 -m pip install --quiet --user uv >&2
  uv=$(python3 -m site --user-base)/bin/uv
  "$uv" python install --quiet 3.12 >&2
  "$uv" python find 3.12
}

mount_shared() {
  local place=$1 bucket folder
  [[ $place ]] || return 0
  mkdir -p shared
  if mountpoint --quiet shared; then
    [[ $(<shared_place) == "$place" ]] ||
      fail "shared is $(<shared_place) already; take a new TPU for $place."
    return
  fi
  if [[ $place == gs://* ]]; then
    command -v gcsfuse >/dev/null || sudo apt-get install --quiet --yes gcsfuse ||
      fail "gcsfuse cannot be installed. Give --prepare a script with the lines of the page" \
        "'Install Cloud Storage FUSE' of Google Cloud's documentation for Ubuntu."
    bucket=${place#gs://} folder=""
    [[ $bucket != */?* ]] || folder=${bucket#*/}
    # What one worker writes the others must see at once, and checkpoints are renamed folders.
    gcsfuse --implicit-dirs --rename-dir-limit=1000000 --metadata-cache-ttl-secs=0 \
      --metadata-cache-negative-ttl-secs=0 ${folder:+"--only-dir=${folder%/}"} \
      "${bucket%%/*}" "$HOME_FOLDER/shared"
  else
    command -v mount.nfs >/dev/null || sudo apt-get install --quiet --yes nfs-common
    sudo mount -t nfs "$place" shared
  fi
  echo "$place" >shared_place
}

# An export often belongs to root. Only the run's folder becomes this user's; what lies beside it,
# and who may write there, is not ours to change.
make_run_folder() {
  local folder=$1
  if [[ ! -e $folder && ! -w ${folder%/*} ]]; then
    # Other workers do the same at the same time.
    { sudo mkdir --parents "$folder" && sudo chown "$(id -u):$(id -g)" "$folder"; } ||
      fail "$folder cannot be made. Make it where the export is kept, writable for uid $(id -u)."
  fi
  [[ ! -e $folder || -w $folder ]] ||
    fail "$folder belongs to $(stat --format='%U (uid %u)' "$folder"), and uid $(id -u) may not" \
      "write into it. Choose another --run, or give it to this user with chown."
}

# The commit, from the URL in the file git_url if there is one; that file may hold a password.
fetch_code() {
  local revision=$1 url=""
  [[ ! -e git_url ]] || url=$(<git_url)
  rm -f git_url
  if [[ $url ]]; then
    GIT_TERMINAL_PROMPT=0 git -C code.new fetch --quiet "$url" "$revision" 2> >(
      sed --regexp-extended 's#://[^/@ ]*@#://***@#g' >&2
    ) || fail "revision ${revision:0:12} cannot be fetched; git's message is above."
  else
    git -C code.new fetch --quiet ../code.bundle to-install
  fi
}

install() {
  local revision=$1 place=$2 job
  if [[ -e installed && $(<installed) == "$revision" ]]; then
    rm -f git_url
    mount_shared "$place"
    say "revision ${revision:0:12} is installed already"
    return
  fi
  for job in jobs/*; do
    ! locked "$job" ||
      fail "${job#jobs/} is training; nothing was changed. Wait for it, or run tpu/stop.sh."
  done
  rm -f installed
  bash prepare.sh
  mount_shared "$place"
  rm -rf code.new
  git init --quiet code.new
  fetch_code "$revision"
  git -C code.new checkout --quiet FETCH_HEAD
  rm -rf code
  mv code.new code
  make -C code PYTHON="$(find_python)" VENV="$HOME_FOLDER/venv" "$HOME_FOLDER/venv/.run"
  venv/bin/pip install --quiet --no-deps --require-hashes --requirement code/requirements/tpu.txt
  echo "$revision" >installed
  say "installed revision ${revision:0:12}"
}

launch() {
  local run=$1 job=jobs/$1 folder=runs command
  [[ -z $2 ]] || folder=shared
  [[ -e installed ]] || fail "nothing is installed. Run tpu/setup.sh."
  [[ $folder == runs ]] || { mountpoint --quiet shared && [[ $(<shared_place) == "$2" ]]; } ||
    fail "$2 is not mounted. Run tpu/setup.sh with the same --shared."
  [[ $folder == runs ]] || make_run_folder "$folder/$run"
  mkdir -p "$job"
  command=("$HOME_FOLDER/venv/bin/python" -m train.main "${@:3}")
  command+=(--workdir "$HOME_FOLDER/$folder/$run")
  exec 9>>"$job/lock"
  # Not at once: who asks whether it is locked holds it for a moment.
  if ! flock --timeout 2 9; then
    say "$run is training already"
    return
  fi
  if [[ -e $job/status && $(<"$job/status") == 0 ]] &&
    [[ ${command[*]@Q} == "$(<"$job/command")" ]]; then
    say "$run has finished; not launched again"
    return
  fi
  rm -f "$job/status" "$job/stopped" "$job/pid"
  echo "${command[*]@Q}" >"$job/command"
  setsid nohup bash "$HOME_FOLDER/worker.sh" train "$run" "${command[@]}" \
    >>"$job/log" 2>&1 </dev/null &
  say "$run launched"
}

# In the background, with the lock on descriptor 9, which the program inherits.
train() {
  local job=$HOME_FOLDER/jobs/$1 status=0
  shift
  cd code
  # An accelerator that fails must be an error: training on its host's CPU would cost as much.
  export JAX_PLATFORMS=${JAX_PLATFORMS:-tpu,cpu}
  if [[ -d $HOME_FOLDER/shared/data ]]; then
    export COMPMOD_DATA=${COMPMOD_DATA:-$HOME_FOLDER/shared/data}
  fi
  echo "== $(date --utc +%FT%TZ) $HOSTNAME: ${*@Q}"
  (
    echo "$BASHPID" >"$job/pid"
    exec "$@"
  ) || status=$?
  echo "== $(date --utc +%FT%TZ) $HOSTNAME: exit status $status"
  echo "$status" >"$job/status.new"
  mv "$job/status.new" "$job/status"
}

status() {
  local run=$1 job=jobs/$1
  if [[ ! -e $job/lock ]]; then
    say "$run: nothing"
  elif locked "$job"; then
    say "$run: running"
  elif [[ ! -e $job/status ]]; then
    say "$run: killed"
  elif [[ -e $job/stopped && $(<"$job/status") == 143 ]]; then
    say "$run: stopped"
  else
    say "$run: exit status $(<"$job/status")"
  fi
}

log() {
  local job=jobs/$1 options=(--lines="$2") prefix=""
  [[ -e $job/log ]] || fail "there is no run $1 here."
  if [[ $3 == 1 ]] && locked "$job"; then
    options+=(--follow --pid="$(<"$job/pid")")
  fi
  [[ $4 != all ]] || prefix="$HOSTNAME: "
  tail "${options[@]}" "$job/log" | sed --unbuffered "s/^/$prefix/"
}

stop() {
  local job=jobs/$1
  if ! locked "$job"; then
    status "$1"
    return
  fi
  for _ in {1..50}; do
    [[ ! -s $job/pid ]] || break
    sleep 0.1
  done
  touch "$job/stopped"
  kill -TERM "$(<"$job/pid")"
  say "$1 is told to end; it saves first"
}

case ${1:-} in
  install | launch | train | status | log | stop) "$@" ;;
  *) fail "'${1:-}' is none of install, launch, status, log and stop." ;;
esac
