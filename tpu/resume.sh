#!/usr/bin/env bash
# Brings a run back after a preemption, from wherever things stand: deletes what is left of a lost
# TPU, asks for a new one, sets it up and launches the run, which continues from its checkpoint.
#
#   tpu/resume.sh --run RUN [--watch --yes] -- --config configs/nmt_cah.py ...
#
#   the options of tpu/create.sh, tpu/setup.sh and tpu/launch.sh, and
#   --watch          WATCH  goes on doing so until the run has ended by itself
#   --yes                   does not ask before it deletes a TPU that is lost and that
#                           tpu/create.sh made; others it does not delete
#
# With nothing there yet it starts the run from the beginning: one command for a whole training.
# Exit status with --watch: that of the run.

. "$(dirname "$0")/common.sh"
here=$(cd "$(dirname "$0")" && pwd)

parse "--type --runtime --spot --create-flags --poll --wait --shared --revision --git --prepare \
--run --watch --yes --" "$@"
need TPU_NAME ZONE ACCELERATOR_TYPE RUN
[[ $SHARED ]] ||
  say "warning: no --shared folder: a preempted run is lost, and this starts it from the beginning"

# The commit of the beginning, whatever is committed here while this watches.
REVISION=$(git -C "$here" rev-parse --verify --quiet "${REVISION:-HEAD}^{commit}") ||
  die "REVISION is no commit of this repository. git log lists them."

# A TPU that runs, with the run on it.
start() {
  "$here/create.sh" && "$here/setup.sh" && "$here/launch.sh" -- "${ARGS[@]}"
}

# Whether to launch a run that is not training: 0 for yes. Ends the script where it has ended.
interrupted() {
  case $STATE:$CODE in
    running: | partly:) return 1 ;;
    ended:0)
      say "$RUN has finished"
      exit 0
      ;;
    none: | ended:3 | ended:143 | ended:killed) return 0 ;;
  esac
  # The first time somebody wants it again, and may have mended what was wrong.
  [[ $first ]] && return 0
  say "$RUN ended by itself; it is not launched again. See tpu/logs.sh --run $RUN"
  [[ $CODE != stopped ]] || exit 143
  exit "$CODE"
}

first=1 failures=0
while :; do
  status=0
  if ! look; then
    status=1
  elif [[ $SITUATION == unknown ]]; then
    look_or_die
  elif [[ $SITUATION == deleting ]]; then
    say "$FOUND; waiting"
    sleep "$POLL"
    continue
  elif [[ $SITUATION == gone ]]; then
    say "$FOUND"
    [[ ! $YES || $DRY_RUN || $FOUND_LABEL == "${LABEL#*=}" ]] ||
      die "$TPU_NAME is lost, but it has no label $LABEL: tpu/create.sh did not make it, and --yes" \
        "does not delete it. Choose another --name, or delete it with tpu/delete.sh."
    confirm "$TPU_NAME is lost; a new one needs its name."
    { delete_tpu && start; } || status=$?
  elif [[ $SITUATION != ready ]]; then
    start || status=$?
  elif look_at_run; then
    if interrupted; then start || status=$?; fi
  else
    start || status=$? # it was never set up
  fi
  # 2 is a mistake of ours, which waiting does not mend; else the TPU may just be going.
  ((status != 2)) || exit 2
  if ((status)); then
    failures=$((failures + 1))
    ((failures < 5)) || die "failed $failures times in a row; see above."
    say "that failed; trying again in $POLL seconds"
  else
    first="" failures=0
    [[ $WATCH ]] || exit 0
  fi
  sleep "$POLL"
done
