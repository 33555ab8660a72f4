# Sourced by the TPU launchers: requests to gcloud, and the last line, which says what is still billed.
# shellcheck shell=bash disable=SC2034,SC2154  # options are set by parse_arguments, results are for _attempts.sh
#
# The launcher defines `resource` (kind and name of what it creates, flags that delete it), `label` (the field with
# the launcher's label), `look`, which sets `state`, and `is_there`: whether its TPU still exists.

state=''

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

# Whether this launcher created the resource, for this user.
is_ours() {
  [ "$(gcloud_tpu "${resource[0]}" describe "$name" "--format=value($label)" 2>/dev/null)" = "$launched_by" ]
}

# Whether the outputs that allow a deletion hold anything; otherwise sets `kept`.
outputs_are_there() {
  local address listed
  for address in ${outputs[@]+"${outputs[@]}"}; do
    address="${address%/}/"
    if ! listed="$(step gcloud storage ls "$address" ${project:+"--project=$project"} --quiet)"; then
      kept="gcloud found nothing in $address, or could not look"
      return 1
    # A folder made by hand is an object of that name.
    elif ! grep -qvxF -e "$address" -e '' <<<"$listed"; then
      kept="$address is empty"
      return 1
    fi
  done
}

# farewell STATUS: deletes the TPU if --delete asks for it, and prints as the last line whether it is still billed.
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
  elif [ -n "$wanted" ] && ! outputs_are_there; then
    : # The last line says why.
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

# Prints the plan, and makes `farewell` run however the script ends.
begin() {
  print_plan "$1"
  use_scratch
  [ -z "$dry_run" ] || return 0
  trap 'end_connections; exit 130' INT
  trap 'end_connections; exit 143' TERM HUP
  trap 'farewell $? || true; rm -rf "$scratch"' EXIT
}

# request WORDS...: asks gcloud for a change. Returns 75 if it may succeed later, 2 if it is refused.
request() {
  if [ -n "$dry_run" ]; then
    gcloud_tpu "$@"
    return
  fi
  { gcloud_tpu "$@" 2>&1 >&3 | tee "$scratch/said" >&2; } 3>&1 || refused "$scratch/said"
}

# quota_exceeded FILE: whether gcloud reported this; prints the quota. Only a person can raise it. (Quotas of requests
# per minute are reported in other words.)
quota_exceeded() {
  local exceeded
  exceeded="$(grep -oEm1 "Quota( limit)? '[^']+' (has been exceeded|exhausted)[^\"]*" "$1")" || return
  echo "error: the project's quota is too small: $exceeded" >&2
  echo "  fix: ask for more of it, or take another --zone, --type or price (--spot has quotas of its own)" >&2
}

# refused FILE: 75 if gcloud's error may be temporary, 2 if somebody must act.
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

# Functions that launch/_attempts.sh needs; one connection reaches all hosts of a TPU VM.
send_to() {
  gcloud_tpu tpu-vm scp "$2" "$1:$3" --worker=all
}

connect() {
  gcloud_tpu tpu-vm ssh "$1" --worker=all "--command=$2"
}

variables_of() {
  :
}
