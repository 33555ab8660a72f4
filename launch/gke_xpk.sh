#!/usr/bin/env bash
# Runs taser as a workload on a GKE cluster made by xpk. After a preemption the cluster restarts it, and
# taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/gke_xpk.sh --cluster=CLUSTER --workload=NAME --type=TYPE [options] -- COMMAND [FLAGS...]

  launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --cluster=CLUSTER    made by `xpk cluster create`
  --workload=NAME      lower-case letters, digits and dashes; a new one for each run
  --type=TYPE          TPU type of one slice: v5litepod-64
  --slices=N           slices (1)
  --zone=ZONE          the cluster's zone (xpk's own setting)
  --project=PROJECT    its project (gcloud's own setting)
  --image=IMAGE        base Docker image with Python 3.11 or 3.12 (python:3.11)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data
  --retries=N          restarts after a preemption (100); 0: none
  --dry_run            print the command, run nothing
  COMMAND              a taser command; the launcher adds --multihost and, to `train`,
                       --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
cluster='' workload='' type='' slices=1 zone='' project='' image=python:3.11 data='' retries=100 dry_run=''
parse_arguments "cluster workload type slices zone project image data retries" "" "$@"
require cluster workload type
require_number 1 slices
require_number 0 retries
[[ "$workload" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
  fail "--workload is '$workload', expected lower-case letters, digits and dashes"
require_taser_command
require_program xpk "install it: pip install xpk"
if ((slices > 1)) && [ "${rest[0]}" = train ] &&
  ! grep -qE 'MESH_REPLICA|across_slices' <<<"${rest[*]}"; then
  rest+=("--gin.MESH_REPLICA=$slices")
fi

# The image has this checkout as its working directory, as hosts of a pod do. 75 is taser's status for
# "preempted, run again".
use_scratch
archive_checkout "$scratch/taser_jax.tgz"
step mkdir -p "$scratch/taser_jax"
step tar -xzf "$scratch/taser_jax.tgz" -C "$scratch/taser_jax"
fetch=''
[ -z "$data" ] || fetch="python launch/_fetch.py $(quoted "$data" data)&& "
words="pip install --quiet '.[tpu]' && ${fetch}taser $(quoted "${rest[@]}" --multihost)"
step xpk workload create "--cluster=$cluster" "--workload=$workload" "--tpu-type=$type" \
  "--num-slices=$slices" ${zone:+"--zone=$zone"} ${project:+"--project=$project"} \
  "--base-docker-image=$image" "--script-dir=$scratch/taser_jax" \
  "--max-restarts=$retries" --restart-on-exit-codes=75 "--command=${words% }"
