#!/usr/bin/env bash
# Copies a run's folder and its workers' logs here.
#
#   tpu/fetch.sh --run RUN [--to runs]
#
#   --run RUN        RUN
#   --to FOLDER      TO      the run comes to FOLDER/RUN (runs/RUN)
#   --shared PLACE   SHARED  as for tpu/setup.sh; a run in a bucket is fetched without the TPU
#
# Run again, it brings what is new.

. "$(dirname "$0")/common.sh"

parse "--run --to --shared" "$@"
need TPU_NAME ZONE RUN
TO=${TO:-runs}
[[ $DRY_RUN ]] || mkdir -p "$TO/$RUN"
if [[ $SHARED == gs://* ]]; then
  run gcloud storage rsync --recursive "${SHARED%/}/$RUN" "$TO/$RUN" \
    ${PROJECT_ID:+"--project=$PROJECT_ID"}
  say "$RUN is in $TO/$RUN"
  look_or_die
  if [[ $SITUATION != ready ]]; then
    say "$FOUND; no logs of its workers"
    exit 0
  fi
else
  need_ready
  folder=${SHARED:+shared}
  copy 0 "$TPU_NAME:compmod/${folder:-runs}/$RUN" "$TO"
  say "$RUN is in $TO/$RUN"
fi
[[ $DRY_RUN ]] || mkdir -p "$TO/$RUN/logs"
for ((worker = 0; worker < WORKERS; worker++)); do
  copy "$worker" "$TPU_NAME:compmod/jobs/$RUN/log" "$TO/$RUN/logs/worker_$worker.log"
done
say "its workers' logs are in $TO/$RUN/logs"
