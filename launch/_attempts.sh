# Sourced by the launchers that connect to hosts: installs, runs, and decides the outcome of an attempt.
# shellcheck shell=bash disable=SC2154  # options are set by parse_arguments
#
# The outcome is 0 (finished), 75 (repeat: preempted, a host lost, no capacity) or another status (failed: stop).
# The launcher defines
#   send_to NODE FILE NAME   copies a file to the home folder of every host of NODE
#   connect NODE COMMAND     runs a shell command on every host of NODE; status 255: the connection failed
#   variables_of NODE        prints assignments for its shell
#   is_there                 whether the hosts still exist

archived='' reached='' reason=''
install='mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && bash taser_jax/launch/_install.sh'

# Connections run in process groups of their own, which Ctrl-C does not reach.
end_connections() {
  local group
  for group in $(jobs -p); do kill -TERM -- "-$group" 2>/dev/null; done
}

# prepare NAME: installs this checkout on every host of it and copies --data there. Returns 75
# if the TPU is gone, otherwise the status of the failing step.
prepare() {
  local code=0
  [ -n "$skip_install" ] || install_on "$1" || code=$?
  if ((code == 0)) && [ -n "$setup" ]; then
    connect "$1" "$setup" || code=$?
  fi
  if ((code == 0)) && [ -n "$data" ]; then
    fetch_on "$1" || code=$?
  fi
  if ((code == 0)); then
    reached=yes
    return 0
  fi
  # gcloud has tried ten times to connect. Hosts that were reached before may be starting; otherwise a key or a
  # firewall is the likely cause.
  if [ -n "$reached" ] && ((code == 255)); then return 75; fi
  after_failure "$code"
}

# Copies this checkout to every host of $1 and installs it there; later attempts reuse the environment.
install_on() {
  local archive="$scratch/taser_jax.tgz"
  if [ -z "$archived" ]; then
    archive_checkout "$archive" || return
    archived=yes
  fi
  send_to "$1" "$archive" taser_jax.tgz || return
  connect "$1" "$install"
}

# Copies --data to every host of $1.
fetch_on() {
  connect "$1" "cd taser_jax && .venv/bin/python launch/_fetch.py $(quoted "$data" data)"
}

# Runs the command on every host of $1, with output to the terminal and to $2.
run_on() {
  local words code=0
  words="$(variables_of "$1")bash taser_jax/launch/_host.sh $(quoted "${rest[@]}")"
  if [ -n "$dry_run" ]; then
    connect "$1" "${words% }"
    return
  fi
  {
    connect "$1" "${words% }" 2>&1 || code=$?
    # On a line of its own, even if a host was cut off within a line.
    printf '\nconnection-status %s\n' "$code"
  } | tee "$2"
}

# run_all NODE...: runs the command on all hosts of these at once; returns the attempt's status.
run_all() {
  local vm logs=()
  set -m
  for vm in "$@"; do
    logs+=("$scratch/log.$vm")
    if [ -n "$dry_run" ]; then
      run_on "$vm"
    else
      : >"$scratch/log.$vm"
      run_on "$vm" "$scratch/log.$vm" </dev/null &
    fi
  done
  set +m
  wait
  [ -n "$dry_run" ] || after_failure "$(outcome "${logs[@]}")"
}

# outcome LOG...: prints the exit status of an attempt. When one host is lost, the others fail with various
# statuses, so the order is: a problem to fix (2); a host that was preempted (75) or lost (ssh's 255); a job that
# did not start, so that no host reports a status (ssh's or the shell's); any other failure.
outcome() {
  local statuses transport
  statuses="$(sed -nE 's/.*taser-status ([0-9]+) on .*/\1/p' "$@")"
  transport="$(sed -nE 's/^connection-status ([0-9]+)$/\1/p' "$@")"
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

# after_failure STATUS: the attempt's status after a step that ended with STATUS. When the TPU is gone, hosts fail
# with arbitrary statuses.
after_failure() {
  case "$1" in
    0 | 2 | 75) return "$1" ;;
    *) if is_there; then return "$1"; else return 75; fi ;;
  esac
}

# Runs `attempt`, and repeats it at most `retries` times while it returns 75.
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
