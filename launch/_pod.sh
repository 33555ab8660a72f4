# Sourced by the TPU launchers: requests to gcloud, installation on all hosts, running there, and the
# outcome of an attempt.
# shellcheck shell=bash disable=SC2154  # options are set by parse_arguments
#
# An attempt has finished (0), should be repeated (75: preempted, a host lost, no capacity) or has failed
# (anything else: stop). The launcher defines `is_there`: whether its TPU still exists.

archived='' reached='' reason='' state=''

gcloud_tpu() {
  step gcloud compute tpus "$@" "--zone=$zone" ${project:+"--project=$project"} --quiet
}

# request WORDS...: makes gcloud change something. Returns 75 if it may succeed later, 2 if it is
# refused.
request() {
  if [ -n "$dry_run" ]; then
    gcloud_tpu "$@"
    return
  fi
  { gcloud_tpu "$@" 2>&1 >&3 | tee "$scratch/said" >&2; } 3>&1 || refused "$scratch/said"
}

# refused FILE: 75 if what gcloud said may pass by itself, 2 if somebody must act.
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

# look_at KIND NAME FORMAT: sets `state` to what gcloud reports, or to ABSENT if the resource does not
# exist. If gcloud itself fails, the state is unknown: returns the status of `refused`.
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
# if the TPU is gone, otherwise the status of the failing step.
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
  # gcloud has tried ten times to connect. Hosts that were reached before may be starting; if none
  # ever was, a key or a firewall is the cause.
  if [ -n "$reached" ] && ((code == 255)); then return 75; fi
  after_failure "$code"
}

# Copies this checkout to every host of TPU VM $1 and installs it there, once per version of setup.py:
# later attempts reuse the environment.
install_on() {
  local archive="$scratch/taser_jax.tgz"
  if [ -z "$archived" ]; then
    archive_checkout "$archive" || return
    archived=yes
  fi
  gcloud_tpu tpu-vm scp "$archive" "$1:taser_jax.tgz" --worker=all || return
  gcloud_tpu tpu-vm ssh "$1" --worker=all --command="$(remote_install)"
}

# One line per command: `set -e` ignores failures before the last `&&`.
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

# Runs the command on every host of TPU VM $1; their output goes to the terminal and to $2.
run_on() {
  local words code=0
  words="bash taser_jax/launch/_host.sh $(quoted "${rest[@]}")"
  if [ -n "$dry_run" ]; then
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }"
    return
  fi
  {
    gcloud_tpu tpu-vm ssh "$1" --worker=all --command="${words% }" 2>&1 || code=$?
    # On a line of its own, even if a host was cut off within a line.
    printf '\ngcloud-status %s\n' "$code"
  } | tee "$2"
}

# outcome LOG...: prints the exit status of an attempt. One lost host takes the others down with other
# statuses, so the order is: a problem to fix (2); a host told to stop (75) or lost (ssh's 255); a job that
# did not start, so that no host reports a status (ssh's or the shell's); any other failure.
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
    # Every host that reported has finished, and one did not report.
    echo 75
  else
    echo 0
  fi
}

# after_failure STATUS: the attempt's status, given that of a step. When the TPU is gone, hosts fail with
# arbitrary statuses.
after_failure() {
  case "$1" in
    0 | 2 | 75) return "$1" ;;
    *) if is_there; then return "$1"; else return 75; fi ;;
  esac
}

# Runs `attempt`, and repeats it while it returns 75, at most `retries` times.
with_retries() {
  local number status
  for ((number = 1; ; number++)); do
    status=0 reason="preempted, or a host was lost"
    attempt || status=$?
    [ -z "$dry_run" ] || exit 0
    case "$status" in
      0) echo "finished"; exit 0 ;;
      75) echo "$reason (attempt $number of $((retries + 1)))" >&2 ;;
      2) echo "stopped: see the error above; fix it and start again" >&2; exit 2 ;;
      *) echo "failed with status $status: see the output above" >&2; exit "$status" ;;
    esac
    if ((number > retries)); then
      echo "no retries are left; rerun the command to resume" >&2
      exit 75
    fi
    sleep "$retry_seconds"
  done
}
