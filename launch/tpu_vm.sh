#!/usr/bin/env bash
# Runs taser on one TPU VM or on all hosts of a pod slice. Creates the TPU if --type is given, copies and installs this
# checkout, and runs. After a preemption it starts over, and taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE [options] -- COMMAND [FLAGS...]

  launch/tpu_vm.sh --name=taser --zone=us-central2-b --type=v4-32 --spot --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the TPU VM
  --zone=ZONE          its zone
  --project=PROJECT    its project (gcloud's own setting)
  --type=TYPE          create the TPU if it does not exist, and again after a preemption: v4-32, v5litepod-16
USAGE
  pod_usage
  cat <<'USAGE'

  COMMAND              a taser command; the launcher adds --multihost

Only a TPU that was preempted or terminated is deleted and created again. For flex-start use
launch/tpu_multislice.sh with --slices=1.

Exits with 0 (finished), 2 (a problem to fix; see the message), 75 (preempted or no capacity, and no retries
left), or the status with which installation, copying data or taser failed. The last line says whether the TPU
still runs.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_tpus.sh"
. "$here/_attempts.sh"
. "$here/_pod.sh"
parse_arguments "${POD_OPTIONS/max_run_duration /}" "$POD_SWITCHES" "$@"
require name zone
resource=(tpu-vm "$name") label=labels.launcher
check_pod_options

create() {
  request tpu-vm create "$name" "--accelerator-type=$type" "--version=$version" "${creation[@]}"
}

look() {
  look_at tpu-vm "$name" "value(state)"
}

is_there() {
  look && [ "$state" = READY ]
}

# Makes the TPU READY. Never deletes one whose disk may still be wanted.
make_ready() {
  local looks
  if [ -n "$dry_run" ]; then
    [ -z "$type" ] || create
    return
  fi
  for ((looks = 0; ; looks++)); do
    look || return
    case "$state" in
      *ING | MAINTENANCE) ;;
      *) break ;;
    esac
    ((looks > 0)) || echo "TPU $name is $state: waiting"
    if ((looks >= 30)); then
      reason="TPU $name is still $state"
      return 75
    fi
    sleep "$retry_seconds"
  done
  case "$state" in
    READY) return ;;
    ABSENT | PREEMPTED | TERMINATED)
      if [ -n "$type" ]; then
        [ "$state" = ABSENT ] || request tpu-vm delete "$name" || return
        create
        return
      fi
      ;;
  esac
  echo "error: TPU $name in $zone is $state, expected READY" >&2
  case "$state" in
    ABSENT | PREEMPTED | TERMINATED) echo "  fix: give --type=TYPE to create it" >&2 ;;
    *) echo "  fix: gcloud compute tpus tpu-vm start $name --zone=$zone, or delete it so that it is created again" >&2 ;;
  esac
  return 2
}

attempt() {
  make_ready || return
  prepare "$name" || return
  run_all "$name"
}

begin 1
with_retries
