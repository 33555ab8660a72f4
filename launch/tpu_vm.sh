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
  --retries=N          attempts after a preemption (100)
  --retry_seconds=N    pause before each (60)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --skip_install       the hosts have this checkout already
  --dry_run            print the commands, run nothing
  COMMAND              of taser; --multihost is added

Ends with 0 (finished), 2 (a problem the message tells), 75 (preempted, no retries left), or what
taser failed with.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_pod.sh"
name='' zone='' project='' type='' version=tpu-ubuntu2204-base spot='' data='' skip_install='' dry_run=''
retries=100 retry_seconds=60 status=0
parse_arguments "name zone project type version data retries retry_seconds" "spot skip_install" "$@"
require name zone
require_number retries retry_seconds
require_taser_command
require_program gcloud "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
[ -z "$spot" ] || [ -n "$type" ] || fail "--spot is for a TPU that is made: give its --type"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

create() {
  gcloud_tpu tpu-vm create "$name" "--accelerator-type=$type" "--version=$version" ${spot:+--spot}
}

# Makes the TPU READY; fails where it cannot be.
make_ready() {
  local state
  if [ -n "$dry_run" ]; then
    [ -z "$type" ] || create
    return
  fi
  state="$(state_of "$name")"
  case "$state" in
    READY) return ;;
    ABSENT) ;;
    *) [ -z "$type" ] || gcloud_tpu tpu-vm delete "$name" ;;
  esac
  if [ -z "$type" ]; then
    echo "error: TPU $name in $zone is $state, expected READY" >&2
    echo "  fix: start it, or give --type=TYPE to have it made" >&2
    exit 2
  fi
  create
}

attempt() {
  # Without capacity, or when preempted meanwhile, there is no error to mend: try again.
  status=75
  make_ready || return 0
  [ -n "$skip_install" ] || install_on "$name" || return 0
  [ -z "$data" ] || fetch_on "$name" || return 0
  run_on "$name" "$scratch/log" || true
  [ -z "$dry_run" ] || return 0
  status="$(outcome "$scratch/log")"
  # A host that is lost takes the others down with statuses of their own.
  case "$status" in
    0 | 2 | 75) ;;
    *) [ "$(state_of "$name")" = READY ] || status=75 ;;
  esac
}

with_retries
