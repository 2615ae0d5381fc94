#!/usr/bin/env bash
# Starts a training run on all workers, where it goes on when the connection ends.
#
#   tpu/launch.sh --run RUN -- --config configs/nmt_cah.py --config.FIELD=VALUE ...
#
#   --run RUN        RUN     its folder in the shared folder
#   --shared PLACE   SHARED  as for tpu/setup.sh
#
# What follows -- is for python -m train.main. Several workers train together (--multihost). The
# same command continues a run that was interrupted; a run that is training is left alone.

. "$(dirname "$0")/common.sh"

parse "--run --shared --" "$@"
need TPU_NAME ZONE RUN
((${#ARGS[@]})) ||
  die "nothing to train. Give the arguments of python -m train.main after --, for example" \
    "-- --config configs/nmt_cah.py."
for argument in "${ARGS[@]}"; do
  [[ $argument != --workdir* ]] ||
    die "--workdir is chosen by --run: $RUN in the shared folder. Leave it out."
done
need_ready
if ((WORKERS > 1)); then
  [[ $SHARED ]] ||
    die "SHARED is not set, and $TPU_NAME has $WORKERS workers, which need one folder for their" \
      "checkpoints. Give --shared gs://BUCKET/FOLDER or --shared HOST:/EXPORT, here and to" \
      "tpu/setup.sh."
  ARGS=(--multihost "${ARGS[@]}")
fi

look_at_run || die "the workers could not say what they run; is tpu/setup.sh done?"
case $STATE in
  running)
    say "$RUN is training already on all $WORKERS worker(s); nothing to do"
    exit 0
    ;;
  partly)
    echo "$REPORT"
    say "$RUN is on some workers only, and starting the others would not bring them together." \
      "Wait a minute until those notice, or run tpu/stop.sh; then launch again."
    exit 1
    ;;
esac
on all bash compmod/worker.sh launch "$RUN" "$SHARED" "${ARGS[@]}"
say "see tpu/logs.sh --run $RUN --follow, tpu/status.sh --run $RUN"
