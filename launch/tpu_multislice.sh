#!/usr/bin/env bash
# Runs taser on several TPU slices: requests them as one queued resource, waits for them, installs on every
# host of every slice, runs, and requests them again after a preemption.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_multislice.sh --name=NAME --zone=ZONE --type=TYPE --slices=N [options] -- COMMAND [FLAGS...]

  launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the queued resource; slices are NAME-0, NAME-1, ...
  --zone=ZONE          its zone
  --project=PROJECT    its project (gcloud's own setting)
  --type=TYPE          of one slice: v4-32, v5litepod-64
  --slices=N           their number (2 or more)
  --version=VERSION    runtime (tpu-ubuntu2204-base)
  --spot               slices may be preempted
  --retries=N          attempts after a preemption or a failed queued resource (100); 0: none
  --retry_seconds=N    pause before each, and between checks of the queue (60)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --skip_install       the hosts have this checkout already
  --dry_run            print the commands, run nothing
  COMMAND              a taser command; the launcher adds --multihost and, to `train` without
                       MESH_REPLICA or MeshConfig.across_slices, --gin.MESH_REPLICA=N

Exit statuses are those of launch/tpu_vm.sh.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_pod.sh"
name='' zone='' project='' type='' slices='' version=tpu-ubuntu2204-base spot='' data='' skip_install=''
dry_run='' retries=100 retry_seconds=60
parse_arguments "name zone project type slices version data retries retry_seconds" "spot skip_install" "$@"
require name zone type slices
require_number 1 slices retry_seconds
require_number 0 retries
((slices > 1)) || fail "--slices is $slices; for one slice use launch/tpu_vm.sh"
require_taser_command
require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
if [ "${rest[0]}" = train ] && ! grep -qE 'MESH_REPLICA|across_slices' <<<"${rest[*]}"; then
  rest+=("--gin.MESH_REPLICA=$slices")
fi
use_scratch
# Each slice runs in its own process group, which Ctrl-C does not reach.
trap 'end_slices; exit 130' INT
trap 'end_slices; exit 143' TERM

end_slices() {
  local group
  for group in $(jobs -p); do kill -TERM -- "-$group" 2>/dev/null; done
}

create() {
  request queued-resources create "$name" "--node-count=$slices" "--node-prefix=$name" \
    "--accelerator-type=$type" "--runtime-version=$version" ${spot:+--spot}
}

look() {
  look_at queued-resources "$name" "value(state.state)"
}

is_there() {
  look && [ "$state" = ACTIVE ]
}

# Waits for the slices, however long the queue. Requests them if nobody has, and again if they were taken
# away.
make_ready() {
  local former='' renewed=''
  if [ -n "$dry_run" ]; then
    create
    return
  fi
  while true; do
    look || return
    [ "$state" = "$former" ] || echo "queued resource $name: $state"
    former="$state"
    case "$state" in
      ACTIVE) return ;;
      ABSENT) create || return ;;
      SUSPENDED | FAILED)
        # Shows the reason: FAILED may be a lack of capacity or of permission.
        gcloud_tpu queued-resources describe "$name" "--format=value(state)" >&2 || true
        request queued-resources delete "$name" --force || return
        if [ "$state" = FAILED ] || [ -n "$renewed" ]; then
          reason="queued resource $name: $state"
          return 75
        fi
        renewed=yes
        continue
        ;;
    esac
    sleep "$retry_seconds"
  done
}

attempt() {
  local slice logs=()
  make_ready || return
  for ((slice = 0; slice < slices; slice++)); do
    prepare "$name-$slice" || return
  done
  set -m
  for ((slice = 0; slice < slices; slice++)); do
    logs+=("$scratch/log.$slice")
    if [ -n "$dry_run" ]; then
      run_on "$name-$slice" "$scratch/log.$slice"
    else
      : >"$scratch/log.$slice"
      run_on "$name-$slice" "$scratch/log.$slice" </dev/null &
    fi
  done
  set +m
  wait
  [ -z "$dry_run" ] || return 0
  after_failure "$(outcome "${logs[@]}")"
}

with_retries
