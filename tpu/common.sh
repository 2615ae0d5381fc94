# shellcheck shell=bash
# What the scripts of this folder share: settings, gcloud, and what it says of a TPU. Sourced.
# shellcheck disable=SC2034  # the scripts read what is set here

set -euo pipefail
# Dry runs print here, also from inside of $(...).
exec 3>&1
SCRIPT=$(basename "$0")

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
  echo "error: bash $BASH_VERSION is too old; these scripts need 4.4 or newer." >&2
  exit 2
fi

# Every setting is an option or a variable of the environment; the option wins. Only --yes has to
# be given: a YES exported for another program must not delete a TPU.
declare -A VARIABLE=(
  [--name]=TPU_NAME [--zone]=ZONE [--project]=PROJECT_ID [--type]=ACCELERATOR_TYPE
  [--runtime]=RUNTIME_VERSION [--shared]=SHARED [--run]=RUN [--revision]=REVISION [--git]=GIT_URL
  [--prepare]=PREPARE [--worker]=WORKER [--lines]=LINES_SHOWN [--to]=TO [--poll]=POLL
  [--wait]=WAIT [--create-flags]=CREATE_FLAGS [--ssh-flags]=SSH_FLAGS
)
declare -A SWITCH=(
  [--spot]=SPOT [--yes]=YES [--dry-run]=DRY_RUN [--watch]=WATCH [--follow]=FOLLOW
)
# What create.sh marks its TPUs with, so that resume.sh knows which ones it may delete.
LABEL=compmod=made
declare -A EXAMPLE=(
  [TPU_NAME]=my-tpu [ZONE]=us-west4-a [ACCELERATOR_TYPE]=v5litepod-16 [RUN]=nmt
)
for variable in "${VARIABLE[@]}" "${SWITCH[@]}"; do
  declare -gx "$variable=${!variable:-}"
done
for variable in "${SWITCH[@]}"; do
  [[ ${!variable} != 0 && ${!variable} != false ]] || declare -gx "$variable="
done
YES=""
POLL=${POLL:-30}
ARGS=()
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

say() { echo "$SCRIPT${DRY_RUN:+ (dry run)}: $*"; }

die() {
  echo "error: $*" >&2
  exit 2
}

# Prints the comment at the top of the script.
usage() {
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
  cat <<'TEXT'

Options of every script, and the variables that can be set instead:
  --name NAME        TPU_NAME    of the TPU and of its queued resource
  --zone ZONE        ZONE        such as us-west4-a
  --project ID       PROJECT_ID  otherwise the project that gcloud is set to
  --ssh-flags FLAGS  SSH_FLAGS   for every ssh and scp, such as --internal-ip
  --dry-run          DRY_RUN     prints the gcloud commands and runs none
  --help
TEXT
}

# parse "OPTIONS OF THE SCRIPT" "$@": options into their variables, what follows -- into ARGS.
parse() {
  local known=" --name --zone --project --ssh-flags --dry-run $1 "
  shift
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        exit 0
        ;;
      --)
        [[ $known == *" -- "* ]] || die "$SCRIPT takes nothing after --. See $SCRIPT --help."
        ARGS=("${@:2}")
        return
        ;;
      --*=*)
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
    esac
    [[ $known == *" $1 "* ]] || die "$SCRIPT has no option $1. See $SCRIPT --help."
    if [[ ${SWITCH[$1]:-} ]]; then
      declare -gx "${SWITCH[$1]}=1"
      shift
    else
      (($# > 1)) || die "$1 needs a value. See $SCRIPT --help."
      declare -gx "${VARIABLE[$1]}=$2"
      shift 2
    fi
  done
}

# need VARIABLE ...: ends the script unless all are set.
need() {
  local variable option
  for variable in "$@"; do
    [[ -z ${!variable} ]] || continue
    for option in "${!VARIABLE[@]}"; do
      [[ ${VARIABLE[$option]} != "$variable" ]] || break
    done
    die "$variable is not set. Give $option, or export $variable, for example" \
      "export $variable=${EXAMPLE[$variable]}."
  done
  [[ $TPU_NAME =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "TPU_NAME is '$TPU_NAME'; it must be small letters, digits and hyphens, a letter first."
  [[ -z $RUN || $RUN =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] ||
    die "RUN is '$RUN'; it names a folder: letters, digits, dots, hyphens and underscores only."
  [[ -z $SHARED || $SHARED =~ ^gs://[^/]+(/.*)?$ || $SHARED =~ ^[^/:]+:/.+$ ]] ||
    die "SHARED is '$SHARED'; it must be a bucket (gs://BUCKET/FOLDER) or NFS (HOST:/EXPORT)."
  [[ $POLL =~ ^[0-9.]+$ && $WAIT =~ ^[0-9]*$ ]] ||
    die "POLL is '$POLL' and WAIT is '$WAIT'; they must be seconds and whole minutes."
  [[ $DRY_RUN ]] || command -v gcloud >/dev/null ||
    die "gcloud is not on the PATH. Install the Google Cloud CLI and run gcloud auth login."
}

# quoted WORD ...: as one line for a shell, with no more quotes than it needs.
quoted() {
  local word text=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    text+="$word "
  done
  echo "${text% }"
}

run() {
  if [[ $DRY_RUN ]]; then quoted "$@" >&3; else "$@"; fi
}

# tpus GROUP VERB NAME ...: a command of gcloud on TPUs.
tpus() {
  run gcloud compute tpus "$@" "--zone=$ZONE" ${PROJECT_ID:+"--project=$PROJECT_ID"}
}

# on WORKER COMMAND ...: runs a command on a worker, or on `all` of them at once.
on() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm ssh "$TPU_NAME" --worker="$1" --command="$(quoted "${@:2}")" $SSH_FLAGS </dev/null
}

# copy WORKER SOURCE ... DESTINATION: to or from workers; a remote path is NAME:PATH.
copy() {
  # shellcheck disable=SC2086  # several flags
  tpus tpu-vm scp --recurse "${@:2}" --worker="$1" $SSH_FLAGS </dev/null
}

# describe GROUP FIELDS ASSUMED: fields of the TPU; NONE where it does not exist; fails where gcloud
# does. A dry run asks nobody, and takes what is assumed.
describe() {
  local errors=$SCRATCH/errors
  if [[ $DRY_RUN ]]; then
    tpus "$1" describe "$TPU_NAME" "--format=value($2)"
    echo "$3"
  elif ! tpus "$1" describe "$TPU_NAME" "--format=value($2)" 2>"$errors"; then
    if ! grep -qE 'NOT_FOUND|was not found' "$errors"; then
      cat "$errors" >&2
      return 1
    fi
    echo NONE
  fi
}

# Finds out how the TPU is. Sets SITUATION to none, waiting, ready, gone (preempted or failed: it
# never comes back by itself), deleting or unknown; FOUND to what gcloud calls it; FOUND_TYPE;
# FOUND_LABEL, the value of LABEL's key; and WORKERS to their number.
look() {
  local queued node=NONE addresses fields="tpu.nodeSpec[0].node"
  fields=state.state,$fields.acceleratorType,$fields.labels.${LABEL%=*}
  queued=$(describe queued-resources "$fields" "${ASSUMED:-ACTIVE}") || return 1
  read -r queued FOUND_TYPE FOUND_LABEL <<<"$queued"
  FOUND="queued resource $TPU_NAME in $ZONE: $queued" WORKERS=0
  case $queued in
    NONE) SITUATION=none ;;
    ACCEPTED | CREATING | WAITING_FOR_RESOURCES | PROVISIONING) SITUATION=waiting ;;
    SUSPENDING | SUSPENDED | FAILED) SITUATION=gone ;;
    DELETING) SITUATION=deleting ;;
    ACTIVE)
      node=$(describe tpu-vm 'state,networkEndpoints[].ipAddress' 'READY 10.0.0.1') || return 1
      read -r node addresses <<<"$node"
      FOUND+=", its TPU: $node"
      # One address each, whichever way gcloud separates them.
      WORKERS=$(grep -oE '[0-9a-f]*[.:][0-9a-f.:]+' <<<"$addresses" | wc -l)
      case $node in
        READY) SITUATION=ready ;;
        PREEMPTED | TERMINATED) SITUATION=gone ;;
        # Where the node is not there any more, its queued resource says so soon.
        NONE | CREATING | STARTING | RESTARTING | REIMAGING | REPAIRING | DELETING)
          SITUATION=waiting
          ;;
        *) SITUATION=unknown ;;
      esac
      ;;
    *) SITUATION=unknown ;;
  esac
}

look_or_die() {
  look || die "gcloud could not say how $TPU_NAME is; its message is above."
  [[ $SITUATION != unknown ]] ||
    die "$FOUND; these scripts know no remedy for that. gcloud compute tpus tpu-vm describe" \
      "$TPU_NAME --zone=$ZONE says more."
}

# Ends the script, saying what helps, unless the TPU can be used.
need_ready() {
  look_or_die
  case $SITUATION in
    none) die "there is no TPU $TPU_NAME in $ZONE. tpu/create.sh makes it." ;;
    waiting) die "$FOUND; not ready yet. tpu/create.sh waits for it." ;;
    gone) die "$FOUND; it is lost. tpu/resume.sh replaces it and continues the run." ;;
    deleting) die "$FOUND; it is being deleted." ;;
  esac
}

# Asks whether to do what cannot be undone.
confirm() {
  local answer
  [[ ! $YES && ! $DRY_RUN ]] || return 0
  [[ -t 0 ]] || die "$1 Nothing is deleted without asking, and here is nobody to ask: add --yes."
  read -r -p "$1 Type yes to delete it: " answer
  [[ $answer == yes ]] || die "nothing was deleted."
}

delete_tpu() {
  tpus queued-resources delete "$TPU_NAME" --force --quiet
}

# What the workers say of the run. Sets STATE to none, running, partly (on some workers only) or
# ended; CODE to the exit status that says why it ended; REPORT to a line for every worker.
look_at_run() {
  local running none codes code
  REPORT=$(on all bash compmod/worker.sh status "$RUN") || return 1
  STATE=none CODE=""
  [[ ! $DRY_RUN ]] || return 0
  REPORT=$(grep '^compmod: ' <<<"$REPORT" | sort) || return 1
  codes=$(grep -oE '[^ ]+$' <<<"$REPORT")
  running=$(grep -cx running <<<"$codes") || true
  none=$(grep -cx nothing <<<"$codes") || true
  if ((running == WORKERS)); then
    STATE=running
  elif ((running || (none && none < WORKERS))); then
    STATE=partly
  elif ((!none)); then
    STATE=ended
    # 3 says that another process was lost and 143 that all were told to end: consequences.
    CODE=$(grep -vxE '0|3|143|stopped|killed' <<<"$codes" | head -n 1) || true
    for code in stopped killed 143 3 0; do
      [[ $CODE ]] || CODE=$(grep -xm 1 "$code" <<<"$codes") || true
    done
  fi
}
