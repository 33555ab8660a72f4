# Sourced by the TPU launchers: requests to gcloud, installation on all hosts, running there, and the
# outcome of an attempt.
# shellcheck shell=bash disable=SC2154  # options are set by parse_arguments
#
# An attempt has finished (0), should be repeated (75: preempted, a host lost, no capacity) or has failed
# (anything else: stop). The launcher defines `resource` (kind and name of what it creates, flags that delete it),
# `label` (where that has the launcher's label), `look`, which sets `state`, and `is_there`: whether its TPU still
# exists.

archived='' reached='' reason='' state=''

# Sets `words` to a gcloud command.
tpu_words() {
  local flags=()
  case "$2" in ssh | scp) flags=(${ssh_flags[@]+"${ssh_flags[@]}"}) ;; esac
  words=(gcloud ${track[@]+"${track[@]}"} compute tpus "$@" ${flags[@]+"${flags[@]}"} "--zone=$zone")
  words+=(${project:+"--project=$project"} --quiet)
}

gcloud_tpu() {
  local words
  tpu_words "$@"
  step "${words[@]}"
}

delete_command() {
  local words
  tpu_words "${resource[0]}" delete "${resource[1]}" "${resource[@]:2}"
  words="$(quoted "${words[@]}")"
  echo "${words% }"
}

# Checks that it was created by this launcher, for this user.
is_ours() {
  [ "$(gcloud_tpu "${resource[0]}" describe "$name" "--format=value($label)" 2>/dev/null)" = "$launched_by" ]
}

# farewell STATUS: deletes what --delete names, and says as the last line whether something is still billed.
farewell() {
  local wanted='' what="TPU $name" by_hand
  by_hand="$(delete_command)"
  # A second Ctrl-C.
  trap 'echo "$what may still run and be billed; delete it: $by_hand" >&2; exit 130' INT
  if ! look; then
    echo "$what may still run and be billed; delete it: $by_hand" >&2
    return
  fi
  case "$delete $1" in always* | "success 0") wanted=yes ;; esac
  if [ "$state" = ABSENT ]; then
    echo "$what does not exist; nothing is billed" >&2
    return
  elif [ -n "$wanted" ] && ! is_ours; then
    kept="others made it"
  elif [ -n "$wanted" ]; then
    echo "deleting $what (--delete=$delete) ..." >&2
    if request "${resource[0]}" delete "${resource[1]}" "${resource[@]:2}"; then
      echo "$what was deleted; nothing is billed any more" >&2
      return
    fi
    kept="gcloud did not delete it"
  fi
  case "$state" in
    PREEMPTED | TERMINATED | SUSPENDED | FAILED) what+=" is $state, not billed" ;;
    STOPPED) what+=" is STOPPED, only its disks are billed" ;;
    *) what+=" is $state and billed until you delete it" ;;
  esac
  [ "$delete" = success ] && (($1 != 0)) && kept="the command has not finished; --delete=success"
  echo "$what${kept:+ ($kept)}: $by_hand" >&2
}

# Prints the plan, and has `farewell` said however the script ends.
begin() {
  print_plan "$1"
  use_scratch
  [ -z "$dry_run" ] || return 0
  trap 'end_connections; exit 130' INT
  trap 'end_connections; exit 143' TERM HUP
  trap 'farewell $? || true; rm -rf "$scratch"' EXIT
}

# Connections run in process groups of their own, which Ctrl-C does not reach.
end_connections() {
  local group
  for group in $(jobs -p); do kill -TERM -- "-$group" 2>/dev/null; done
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

# quota_exceeded FILE: whether gcloud said so; names the quota. Only a person can raise it, unlike one for requests
# per minute, which has other words.
quota_exceeded() {
  local exceeded
  exceeded="$(grep -oEm1 "Quota( limit)? '[^']+' (has been exceeded|exhausted)[^\"]*" "$1")" || return
  echo "error: the project's quota is too small: $exceeded" >&2
  echo "  fix: ask for more of it, or take another --zone, --type or price (--spot has quotas of its own)" >&2
}

# refused FILE: 75 if what gcloud said may pass by itself, 2 if somebody must act.
refused() {
  local capacity='RESOURCE_EXHAUSTED|[Nn]o more capacity|[Ii]nsufficient( [a-z]+)? capacity|STOCKOUT'
  local service='UNAVAILABLE|INTERNAL|[Ii]nternal error|DEADLINE_EXCEEDED|ABORTED'
  local http='([A-Za-z]*([Cc]ode|[Ss]tatus|[Ee]rror)|HTTP)["=: (]*(429|50[0234])'
  local network='timed out|[Cc]onnection (reset|refused|aborted)|name resolution'
  if quota_exceeded "$1"; then
    return 2
  elif grep -qwE "$capacity|\"code\": 8" "$1"; then
    reason="no capacity"
  elif grep -qwE "$service|\"code\": (4|10|13|14)|$http|$network" "$1"; then
    reason="Google Cloud did not answer"
  else
    echo "  types of this zone: gcloud compute tpus tpu-vm accelerator-types list --zone=$zone; runtimes: versions list" >&2
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
  if ((code == 0)) && [ -n "$setup" ]; then
    gcloud_tpu tpu-vm ssh "$1" --worker=all "--command=$setup" || code=$?
  fi
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

# run_all NODE...: runs the command on all hosts of these TPU VMs at once; returns the attempt's status.
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
