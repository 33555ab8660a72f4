# Sourced by the TPU launchers: asking gcloud, installing on all hosts, running there, and what an
# attempt came to.
# shellcheck shell=bash disable=SC2154  # options are set by parse_arguments
#
# An attempt is finished (0), worth another (75: preempted, a host lost, no capacity) or failed
# (anything else: stop). The launcher defines `is_there`: whether its TPU still is.

archived='' reached='' reason='' state=''

gcloud_tpu() {
  step gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
}

# request WORDS...: has gcloud change something. Returns 75 where it may go well later, 2 where it
# is refused.
request() {
  if [ -n "$dry_run" ]; then
    gcloud_tpu "$@"
    return
  fi
  { gcloud_tpu "$@" 2>&1 >&3 | tee "$scratch/said" >&2; } 3>&1 || refused "$scratch/said"
}

# refused FILE: whether another attempt may change what gcloud said (75) or somebody must (2).
refused() {
  local capacity='RESOURCE_EXHAUSTED|[Nn]o more capacity|[Ii]nsufficient( [a-z]+)? capacity|STOCKOUT'
  local service='UNAVAILABLE|INTERNAL|[Ii]nternal error|DEADLINE_EXCEEDED|ABORTED'
  local http='([A-Za-z]*([Cc]ode|[Ss]tatus|[Ee]rror)|HTTP)["=: (]*(429|50[0234])'
  local network='timed out|[Cc]onnection (reset|refused|aborted)|name resolution'
  if grep -qwE "$capacity|\"code\": 8" "$1"; then
    reason="no capacity"
  elif grep -qwE "$service|\"code\": (4|10|13|14)|$http|$network" "$1"; then
    reason="Google Cloud did not answer"
  else
    return 2
  fi
  return 75
}

# look_at KIND NAME FORMAT: sets `state` to what gcloud says, or to ABSENT where there is no such
# thing. Returns what `refused` does where gcloud itself fails, which tells nothing of the TPU.
look_at() {
  if state="$(gcloud_tpu "$1" describe "$2" "--format=$3" 2>"$scratch/said")"; then
    state="${state:-UNKNOWN}"
  elif grep -qw NOT_FOUND "$scratch/said"; then
    state=ABSENT
  else
    cat "$scratch/said" >&2
    refused "$scratch/said"
  fi
}

# prepare NAME: installs this checkout on every host of a TPU VM and copies --data there. Returns 75
# where the TPU is gone, else what a step failed with.
prepare() {
  local code=0
  [ -n "$skip_install" ] || install_on "$1" || code=$?
  if ((code == 0)) && [ -n "$data" ]; then
    fetch_on "$1" || code=$?
  fi
  if ((code == 0)); then
    reached=yes
    return 0
  fi
  # gcloud has tried ten times to connect. Hosts that were reached before may be starting; where
  # none ever was, a key or a firewall is in the way.
  if [ -n "$reached" ] && ((code == 255)); then return 75; fi
  after_failure "$code"
}

# Copies this checkout to every host of TPU VM $1 and installs it there, once for each version of
# setup.py: the environment is kept, and found again.
install_on() {
  local archive="$scratch/taser_jax.tgz"
  if [ -z "$archived" ]; then
    archive_checkout "$archive" || return
    archived=yes
  fi
  gcloud_tpu tpu-vm scp "$archive" "$1:taser_jax.tgz" --worker=all || return
  gcloud_tpu tpu-vm ssh "$1" --worker=all --command="$(remote_install)"
}

# `set -e` does not see what fails before the last `&&`: a line for each command.
remote_install() {
  cat <<'REMOTE'
set -e
mkdir -p taser_jax
tar -xzf taser_jax.tgz -C taser_jax
cd taser_jax
if ! command -v python3.11 >/dev/null && ! command -v python3.12 >/dev/null; then
  sudo apt-get update -q -o DPkg::Lock::Timeout=600
  sudo apt-get install -qy -o DPkg::Lock::Timeout=600 python3.11 python3.11-venv
fi
. launch/_environment.sh
use_environment '[tpu]'
REMOTE
}

# Copies --data to every host of TPU VM $1.
fetch_on() {
  gcloud_tpu tpu-vm ssh "$1" --worker=all \
    --command="cd taser_jax && .venv/bin/python launch/_fetch.py $(quoted "$data" data)"
}

# Runs the command on every host of TPU VM $1; what they print goes to the terminal and to $2.
run_on() {
  local words code=0
  words="bash taser_jax/launch/_host.sh $(quoted "${rest[@]}")"
  if [ -n "$dry_run" ]; then
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }"
    return
  fi
  {
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }" 2>&1 || code=$?
    # On a line of its own, also where a host was cut off within one.
    printf '\ngcloud-status %s\n' "$code"
  } | tee "$2"
}

# What attempts' logs say: prints the exit status. In this order, since one host that is lost takes
# the others down with statuses of their own:
# a problem to mend (2); a host that was told to stop (75), or was lost (ssh's 255); the job did not
# start, so that no host told a status: ssh's or the shell's; any other failure.
outcome() {
  local statuses transport
  statuses="$(sed -nE 's/.*taser-status ([0-9]+) on .*/\1/p' "$@")"
  transport="$(sed -nE 's/^gcloud-status ([0-9]+)$/\1/p' "$@")"
  if grep -qx 2 <<<"$statuses"; then
    echo 2
  elif grep -qx 75 <<<"$statuses" || grep -qx 255 <<<"$transport"; then
    echo 75
  elif [ -z "$statuses" ]; then
    grep -vxm1 0 <<<"$transport" || echo 1
  elif grep -vqx 0 <<<"$statuses"; then
    grep -vxm1 0 <<<"$statuses"
  elif grep -vqx 0 <<<"$transport"; then
    # Every host that spoke has finished, and one did not speak.
    echo 75
  else
    echo 0
  fi
}

# Returns an attempt's status after a step ended with $1: a TPU that is gone makes hosts fail in
# ways of their own.
after_failure() {
  case "$1" in
    0 | 2 | 75) return "$1" ;;
    *) if is_there; then return "$1"; else return 75; fi ;;
  esac
}

# Runs `attempt`, and again where it returns 75, `retries` times at most. `attempt` prepares what it
# needs.
with_retries() {
  local number status
  for ((number = 1; ; number++)); do
    status=0 reason="preempted, or a host was lost"
    attempt || status=$?
    [ -z "$dry_run" ] || exit 0
    case "$status" in
      0) echo "finished"; exit 0 ;;
      75) echo "$reason (attempt $number of $((retries + 1)))" >&2 ;;
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
