#!/usr/bin/env bash
# Asks Google Cloud for a TPU as a queued resource and waits until it is ready.
#
#   tpu/create.sh --name NAME --zone ZONE --type v5litepod-16 [--spot]
#
#   --type TYPE            ACCELERATOR_TYPE  such as v5litepod-16, v5p-32, v6e-16
#   --runtime VERSION      RUNTIME_VERSION   otherwise the one that belongs to the type
#   --spot                 SPOT              cheaper, and may be taken away at any time
#   --create-flags FLAGS   CREATE_FLAGS      more for gcloud, such as "--network=N --labels=a=b"
#   --poll SECONDS         POLL              between two looks at it (30)
#   --wait MINUTES         WAIT              gives up waiting after that long; the request stays
#
# The TPU is billed from the moment it is ready until tpu/delete.sh. Run again, this finds what is
# there and only waits. The label compmod=made says that the TPU was made here.

. "$(dirname "$0")/common.sh"

parse "--type --runtime --spot --create-flags --poll --wait" "$@"
need TPU_NAME ZONE ACCELERATOR_TYPE

# The software that the documentation names for each kind of TPU; JAX itself comes with set-up.
if [[ -z $RUNTIME_VERSION ]]; then
  case $ACCELERATOR_TYPE in
    v6e-*) RUNTIME_VERSION=v2-alpha-tpuv6e ;;
    v5p-*) RUNTIME_VERSION=v2-alpha-tpuv5 ;;
    v5litepod-*) RUNTIME_VERSION=v2-alpha-tpuv5-lite ;;
    v2-* | v3-* | v4-*) RUNTIME_VERSION=tpu-ubuntu2204-base ;;
    *)
      die "no RUNTIME_VERSION is known for ACCELERATOR_TYPE '$ACCELERATOR_TYPE'. Give --runtime;" \
        "gcloud compute tpus tpu-vm versions list --zone=$ZONE lists them."
      ;;
  esac
fi

request() {
  local flags=() labels=$LABEL
  # gcloud takes the last --labels only.
  # shellcheck disable=SC2086  # several flags
  set -- $CREATE_FLAGS
  while (($#)); do
    case $1 in
      --labels=*) labels+=,${1#*=} ;;
      --labels)
        (($# > 1)) || die "--labels in CREATE_FLAGS needs a value, such as --labels=team=nlp."
        labels+=,$2
        shift
        ;;
      *) flags+=("$1") ;;
    esac
    shift
  done
  tpus queued-resources create "$TPU_NAME" --node-id="$TPU_NAME" \
    --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION" \
    --labels="$labels" ${SPOT:+--spot} "${flags[@]}"
}

ASSUMED=NONE look_or_die
shown=$FOUND
if [[ $SITUATION == none ]]; then
  say "asking for $ACCELERATOR_TYPE${SPOT:+ (spot)} with $RUNTIME_VERSION; billed once it is ready"
  request
  look_or_die
else
  say "found $FOUND"
  [[ -z $FOUND_TYPE || $FOUND_TYPE == "$ACCELERATOR_TYPE" ]] ||
    die "$TPU_NAME is of type $FOUND_TYPE, not $ACCELERATOR_TYPE. Choose another --name, or" \
      "delete it with tpu/delete.sh."
fi

deadline=${WAIT:+$((SECONDS + 60 * WAIT))}
while [[ $SITUATION != ready ]]; do
  [[ $FOUND == "$shown" ]] || say "$FOUND"
  shown=$FOUND
  case $SITUATION in
    gone)
      die "$FOUND; it is lost and its name taken. tpu/resume.sh replaces it and continues the" \
        "run; tpu/delete.sh only removes it."
      ;;
    none) die "$TPU_NAME is not there any more; somebody deleted it." ;;
    unknown) look_or_die ;;
  esac
  ((${deadline:-SECONDS} >= SECONDS)) ||
    die "waited $WAIT minutes; $FOUND. The request stays: run this again to wait on, or" \
      "tpu/delete.sh."
  sleep "$POLL"
  # A look may fail while a network does; the next one tells.
  look || continue
done
say "$TPU_NAME is ready. Next: tpu/setup.sh"
