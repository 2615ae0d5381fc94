#!/usr/bin/env bash
# Deletes a TPU and its queued resource, which ends the billing. Asks first.
#
#   tpu/delete.sh [--yes]
#
#   --yes   does not ask (an option only: YES in the environment does not count)
#
# The workers' disks go with it; a shared folder (bucket, NFS) stays, and is billed by itself.

. "$(dirname "$0")/common.sh"

parse "--yes" "$@"
need TPU_NAME ZONE
look_or_die
if [[ $SITUATION == none ]]; then
  say "there is no queued resource $TPU_NAME in $ZONE; nothing to delete"
  exit 0
fi
say "found $FOUND"
if [[ $SITUATION == deleting ]]; then
  say "it is being deleted already"
  exit 0
fi
confirm "This deletes $TPU_NAME with its workers' disks; runs that are not fetched or shared go."
delete_tpu
say "deleted $TPU_NAME"
