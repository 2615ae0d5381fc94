#!/usr/bin/env bash
# Says how a TPU is and, with --run, how that run is on every worker.
#
#   tpu/status.sh [--run RUN]
#
#   --run RUN   RUN
#
# Exit status with --run: the run's own once it has ended (0: finished; 3: a worker was lost and
# 143: told to end, both continued by launching again; 2: a mistake in its arguments); 75 while it
# is training, 69 where there is no such run or no TPU to ask.

. "$(dirname "$0")/common.sh"

parse "--run" "$@"
need TPU_NAME ZONE
look_or_die
say "$FOUND"
[[ $RUN ]] || exit 0
[[ $SITUATION == ready ]] || exit 69
look_at_run || die "the workers could not say what they run; is tpu/setup.sh done?"
[[ ! $DRY_RUN ]] || exit 0
echo "$REPORT"
case $STATE in
  ended)
    case $CODE in
      stopped) exit 143 ;;
      killed) exit 137 ;;
      *) exit "$CODE" ;;
    esac
    ;;
  none) exit 69 ;;
  *) exit 75 ;;
esac
