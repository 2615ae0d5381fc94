#!/usr/bin/env bash
# Shows the end of a run's log.
#
#   tpu/logs.sh --run RUN [--follow] [--worker all]
#
#   --run RUN     RUN
#   --follow      FOLLOW       goes on until the run ends; Ctrl-C ends only the showing
#   --worker N    WORKER       0 by default; all shows all workers, each line with its worker
#   --lines N     LINES_SHOWN  40 by default

. "$(dirname "$0")/common.sh"

parse "--run --follow --worker --lines" "$@"
need TPU_NAME ZONE RUN
need_ready
WORKER=${WORKER:-0}
on "$WORKER" bash compmod/worker.sh log "$RUN" "${LINES_SHOWN:-40}" "${FOLLOW:-0}" "$WORKER"
