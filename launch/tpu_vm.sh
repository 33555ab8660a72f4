#!/usr/bin/env bash
# Runs taser on one TPU VM or on all hosts of a pod slice: creates the TPU if --type is given, copies and
# installs this checkout, and runs. After a preemption it starts over, and taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE [options] -- COMMAND [FLAGS...]

  launch/tpu_vm.sh --name=taser --zone=us-central2-b --type=v4-32 --spot --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the TPU VM
  --zone=ZONE          its zone
  --project=PROJECT    its project (gcloud's own setting)
  --type=TYPE          creates the TPU if it does not exist, and again after a preemption: v4-32, v5litepod-16
  --version=VERSION    runtime of a TPU that is created (tpu-ubuntu2204-base)
  --spot               a TPU that is created may be preempted
  --retries=N          attempts after a preemption, or while there is no capacity (100); 0: none
  --retry_seconds=N    pause before each, and between checks of a TPU that is starting (60)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --skip_install       the hosts have this checkout already
  --dry_run            print the commands, run nothing
  COMMAND              a taser command; the launcher adds --multihost

Only a TPU that was preempted or terminated is deleted and created again.

Exits with 0 (finished), 2 (a problem that the message names), 75 (preempted or no capacity, and no
retries left), or the status with which installation, copying data or taser failed.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_pod.sh"
name='' zone='' project='' type='' version=tpu-ubuntu2204-base spot='' data='' skip_install='' dry_run=''
retries=100 retry_seconds=60
parse_arguments "name zone project type version data retries retry_seconds" "spot skip_install" "$@"
require name zone
require_number 0 retries
require_number 1 retry_seconds
require_taser_command
require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
[ -z "$spot" ] || [ -n "$type" ] || fail "--spot applies to a TPU that is created: give its --type"
use_scratch

create() {
  request tpu-vm create "$name" "--accelerator-type=$type" "--version=$version" ${spot:+--spot}
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
  run_on "$name" "$scratch/log"
  [ -z "$dry_run" ] || return 0
  after_failure "$(outcome "$scratch/log")"
}

with_retries
