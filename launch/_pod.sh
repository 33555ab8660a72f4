# Sourced by the TPU launchers: installing on all hosts, running there, and what an attempt came to.
# shellcheck shell=bash disable=SC2154  # options are set by parse_arguments
#
# An attempt is finished (0), preempted (75: worth another) or failed (anything else: stop).

gcloud_tpu() {
  step gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
}

# Copies this checkout to every host of TPU VM $1 and installs it there, once for each version of
# setup.py: the environment is kept, and found again.
install_on() {
  local archive="$scratch/taser_jax.tgz"
  if [ ! -e "$archive" ]; then
    step tar --exclude=.git --exclude=.venv --exclude=runs --exclude=./data --exclude='*.egg-info' --exclude='.*_cache' \
      --exclude=__pycache__ -czf "$archive" -C "$(dirname "${BASH_SOURCE[0]}")/.." .
  fi
  gcloud_tpu tpu-vm scp "$archive" "$1:taser_jax.tgz" --worker=all
  gcloud_tpu tpu-vm ssh "$1" --worker=all --command="$(remote_install)"
}

remote_install() {
  cat <<'REMOTE'
set -e
mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && cd taser_jax
if ! command -v python3.11 >/dev/null && ! command -v python3.12 >/dev/null; then
  sudo apt-get update -q && sudo apt-get install -qy python3.11 python3.11-venv
fi
. launch/_environment.sh && use_environment '[tpu]'
REMOTE
}

# Copies --data to every host of TPU VM $1.
fetch_on() {
  gcloud_tpu tpu-vm ssh "$1" --worker=all \
    --command="cd taser_jax && .venv/bin/python launch/_fetch.py $(quoted "$data" data)"
}

# Runs the command on every host of TPU VM $1; what they print goes to the terminal and to $2.
run_on() {
  local words
  words="bash taser_jax/launch/_host.sh $(quoted "${rest[@]}")"
  if [ -n "$dry_run" ]; then
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }"
    return
  fi
  {
    code=0
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }" 2>&1 || code=$?
    echo "gcloud-status $code"
  } | tee "$2"
}

# described KIND NAME FORMAT: what gcloud says, or ABSENT.
described() {
  local said
  said="$(gcloud compute tpus "$1" describe "$2" "--zone=$zone" ${project:+"--project=$project"} \
    "--format=$3" 2>/dev/null)" || said=ABSENT
  echo "${said:-ABSENT}"
}

# state_of NAME: READY, PREEMPTED, ..., or ABSENT.
state_of() {
  described tpu-vm "$1" "value(state)"
}

# What attempts' logs say: prints the exit status. In this order, since one host that is lost takes
# the others down with statuses of their own:
# a problem to mend (2); a host that was told to stop (75), or was lost (ssh's 255, no status at
# all); any other failure.
outcome() {
  local statuses transport
  statuses="$(sed -nE 's/.*taser-status ([0-9]+) on .*/\1/p' "$@")"
  transport="$(sed -nE 's/^gcloud-status ([0-9]+)$/\1/p' "$@")"
  if grep -qx 2 <<<"$statuses"; then
    echo 2
  elif [ -z "$statuses" ] || grep -qx 75 <<<"$statuses" || grep -qx 255 <<<"$transport"; then
    echo 75
  elif grep -vqx 0 <<<"$statuses"; then
    grep -vxm1 0 <<<"$statuses"
  elif grep -vqx 0 <<<"$transport"; then
    # Every host that spoke has finished, and one did not speak.
    echo 75
  else
    echo 0
  fi
}

# Runs `attempt`, and again after a preemption, `retries` times at most. `attempt` prepares what it
# needs and sets `status`.
with_retries() {
  local number
  for ((number = 1; ; number++)); do
    attempt
    [ -z "$dry_run" ] || exit 0
    case "$status" in
      0) echo "finished"; exit 0 ;;
      75) echo "preempted, or a host was lost (attempt $number of $((retries + 1)))" >&2 ;;
      2) echo "stopped: see the error above; mend it and start again" >&2; exit 2 ;;
      *) echo "failed with status $status: see the output above" >&2; exit "$status" ;;
    esac
    if ((number > retries)); then
      echo "no retries are left; run the same command again to go on" >&2
      exit 75
    fi
    sleep "$retry_seconds"
  done
}
