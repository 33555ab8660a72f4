#!/usr/bin/env bash
# Runs taser on several TPU slices: requests them as one queued resource, waits for them, installs this checkout on
# every host of every slice, and runs. After a preemption it requests them again.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_multislice.sh --name=NAME --zone=ZONE --type=TYPE --slices=N [options] -- COMMAND [FLAGS...]

  launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the queued resource; slices are NAME-0, NAME-1, ...
  --zone=ZONE          its zone
  --project=PROJECT    its project (gcloud's own setting)
  --type=TYPE          type of one slice: v4-32, v5litepod-64
  --slices=N           number of slices: 2 or more; 1 with --max_run_duration
  --max_run_duration=TIME   flex-start: waits for capacity, and ends after this time, for example 10h
USAGE
  pod_usage
  cat <<'USAGE'

  COMMAND              a taser command; the launcher adds --multihost and, to `train` without
                       MESH_REPLICA or MeshConfig.across_slices, --gin.MESH_REPLICA=N

Exit statuses and the last line are those of launch/tpu_vm.sh.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_tpus.sh"
. "$here/_attempts.sh"
. "$here/_pod.sh"
slices=''
parse_arguments "$POD_OPTIONS slices" "$POD_SWITCHES" "$@"
require name zone type slices
require_number 1 slices
((slices > 1)) || [ -n "$max_run_duration" ] || fail "--slices is $slices; for one slice use launch/tpu_vm.sh"
resource=(queued-resources "$name" --force) label="tpu.nodeSpec[0].node.labels.launcher"
check_pod_options
add_mesh_replica

create() {
  local nodes=("--node-count=$slices" "--node-prefix=$name")
  # gcloud wants a count of at least 2.
  ((slices > 1)) || nodes=("--node-id=$name-0")
  request queued-resources create "$name" "${nodes[@]}" \
    "--accelerator-type=$type" "--runtime-version=$version" "${creation[@]}"
}

look() {
  look_at queued-resources "$name" "value(state.state)"
}

is_there() {
  look && [ "$state" = ACTIVE ]
}

# Waits for the slices, however long the queue. Requests them if they do not exist, and again if they were taken
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
        # Shows the reason: FAILED may be a lack of capacity, of quota or of permission.
        gcloud_tpu queued-resources describe "$name" "--format=value(state)" >"$scratch/why" || true
        cat "$scratch/why" >&2
        request queued-resources delete "$name" --force || return
        ! quota_exceeded "$scratch/why" || return 2
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
  local slice nodes=()
  make_ready || return
  for ((slice = 0; slice < slices; slice++)); do
    nodes+=("$name-$slice")
    prepare "$name-$slice" || return
  done
  run_all "${nodes[@]}"
}

begin "$slices"
with_retries
