#!/usr/bin/env bash
# Runs taser as a workload on a GKE cluster made by xpk. Builds one image, which all hosts and all restarts use.
# After a preemption the cluster restarts the workload, and taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/gke_xpk.sh --cluster=CLUSTER --workload=NAME --type=TYPE --image=IMAGE [options] -- COMMAND [FLAGS...]

  launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 --data=gs://BUCKET/tokens \
    --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data

  --cluster=CLUSTER    made by `xpk cluster create`
  --workload=NAME      up to 40 lower-case letters, digits and dashes; a new one for each run
  --type=TYPE          TPU type of one slice: v5litepod-64, tpu7x-8
  --image=IMAGE        image to build from this checkout (launch/Dockerfile) and push
  --skip_build         use the image that is in the registry already
  --slices=N           number of slices (1)
  --zone=ZONE          the cluster's zone (xpk's own setting)
  --project=PROJECT    its project (gcloud's own setting)
  --data=gs://PLACE    copied to the folder `data` of each host before the first step, for example a
                       token store: --gin.TOKEN_STORE=data. Each restart copies it again, since its pods are new
  --retries=N          restarts after a preemption (100)
  --grace_seconds=N    time between SIGTERM and the end of a pod, for taser to finish a step and save (300); training
                       warns after its first save if it needs longer
  --dry_run            print the plan and the commands, run nothing
  --xpk FLAGS...       flags for `xpk workload create`, up to --: --xpk --spot --storage=tokens --
  COMMAND              a taser command; the launcher adds --multihost and, to `train`,
                       --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
cluster='' workload='' type='' image='' slices=1 zone='' project='' data='' retries=100 grace_seconds=300
skip_build='' dry_run=''
parse_arguments "cluster workload type image slices zone project data retries grace_seconds" "skip_build xpk" "$@"
require cluster workload type image
require_number 1 slices grace_seconds
require_number 0 retries
# xpk refuses longer names, but only after the image has been built.
if ! [[ "$workload" =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || ((${#workload} > 40)); then
  fail "--workload is '$workload', expected up to 40 lower-case letters, digits and dashes"
fi
require_taser_command
warn_of_lost_results
require_program xpk "install it: pip install xpk"
[ -n "$skip_build" ] || require_program docker "install Docker, or build the image elsewhere and give --skip_build"
add_mesh_replica

what="$slices slice"
((slices == 1)) || what+=s
echo "# workload $workload on cluster $cluster: $what of $type, image $image"
echo "# price: that of the cluster's nodes, or what --xpk asks for (--spot, --reservation=NAME, --flex)"
echo "# retries: $retries, by the cluster; $grace_seconds s to save before a pod ends"
echo "# deletion: nodes are billed while the cluster has them. The workload's:" \
  "xpk workload delete --workload=$workload --cluster=$cluster"
use_scratch
if [ -z "$skip_build" ]; then
  archive_checkout "$scratch/taser_jax.tgz"
  step mkdir -p "$scratch/taser_jax"
  step tar -xzf "$scratch/taser_jax.tgz" -C "$scratch/taser_jax"
  step docker build --platform=linux/amd64 "--file=$scratch/taser_jax/launch/Dockerfile" "--tag=$image" "$scratch/taser_jax"
  step docker push "$image"
fi
# A missing program would end the shell with 127, for which xpk would restart it: checks for it first.
container=/taser_jax/launch/_container.sh
words="test -e $container || exit 2; exec env TASER_GRACE_SECONDS=$grace_seconds bash $container $(quoted "$data" "${rest[@]}" --multihost)"
# taser compares the grace period with the time that its first save takes.
# 75 is taser's status for "preempted, run again".
step xpk workload create "--cluster=$cluster" "--workload=$workload" "--tpu-type=$type" \
  "--num-slices=$slices" ${zone:+"--zone=$zone"} ${project:+"--project=$project"} "--docker-image=$image" \
  "--max-restarts=$retries" --restart-on-exit-codes=75 "--termination-grace-period-seconds=$grace_seconds" \
  ${passed[@]+"${passed[@]}"} "--command=${words% }"
