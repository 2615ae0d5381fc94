#!/usr/bin/env bash
# Ends a run: it saves its last completed step first. The TPU stays, and is billed.
#
#   tpu/stop.sh --run RUN
#
#   --run RUN   RUN
#
# tpu/launch.sh with the same arguments continues it.

. "$(dirname "$0")/common.sh"

parse "--run" "$@"
need TPU_NAME ZONE RUN
need_ready
on all bash compmod/worker.sh stop "$RUN"
