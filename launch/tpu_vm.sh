#!/usr/bin/env bash
# Runs taser on one TPU VM or on all hosts of a pod slice: makes the TPU if asked to, copies and
# installs this checkout, runs, and after a preemption does it again: taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE [options] -- COMMAND [FLAGS...]

  launch/tpu_vm.sh --name=taser --zone=us-central2-b --type=v4-32 --spot --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --name=NAME          the TPU VM
  --zone=ZONE          its zone
  --project=PROJECT    its project (gcloud's own setting)
  --type=TYPE          makes the TPU where there is none, and anew after a preemption: v4-32, v5litepod-16
  --version=VERSION    runtime of a TPU that is made (tpu-ubuntu2204-base)
  --spot               a TPU that is made may be preempted
  --retries=N          attempts after a preemption, or while there is no capacity (100); 0: none
  --retry_seconds=N    pause before each, and between looks at a TPU that is starting (60)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --skip_install       the hosts have this checkout already
  --dry_run            print the commands, run nothing
  COMMAND              of taser; --multihost is added

A TPU that was preempted or terminated is deleted and made anew; one in any other state never is.

Ends with 0 (finished), 2 (a problem the message tells), 75 (preempted or no capacity, and no retries
left), or what installing, copying data or taser failed with.
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
[ -z "$spot" ] || [ -n "$type" ] || fail "--spot is for a TPU that is made: give its --type"
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

# Makes the TPU READY. One with a disk that may be wanted again is not deleted.
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
    ABSENT | PREEMPTED | TERMINATED) echo "  fix: give --type=TYPE to have it made" >&2 ;;
    *) echo "  fix: gcloud compute tpus tpu-vm start $name --zone=$zone, or delete it to have it made anew" >&2 ;;
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
