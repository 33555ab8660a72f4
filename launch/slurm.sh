#!/usr/bin/env bash
# Runs taser on a Slurm cluster, one process per node, from this checkout on a shared file system. JAX finds its
# coordinator in Slurm's variables. After a preemption it requests nodes again, and taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/slurm.sh --nodes=N [options] -- COMMAND [FLAGS...]

  launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser --gin.TOKEN_STORE=/shared/tokens

  --nodes=N            number of nodes; inside an allocation (sbatch, salloc) those of this step
  --retries=N          new attempts after a preemption or a lost node (100)
  --retry_seconds=N    pause before each (60)
  --dry_run            print the plan and the command, run nothing
  --slurm FLAGS...     flags for srun, up to --: --slurm --partition=gpu --gpus-per-node=8 --
  COMMAND              a taser command; the launcher adds --multihost

The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
Exit statuses are those of launch/tpu_vm.sh.
USAGE
}

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_attempts.sh"
nodes='' dry_run='' retries=100 retry_seconds=60
parse_arguments "nodes retries retry_seconds" "slurm" "$@"
require nodes
require_number 1 nodes retry_seconds
require_number 0 retries
require_taser_command
require_program srun "run this on a node of the Slurm cluster"

# Slurm reports the nodes that it has lost or taken back.
is_there() {
  ! grep -qiE 'node[ _]fail|preempt|CANCELLED|allocation .*revoked' "$scratch/log"
}

# A process that fails ends the others, so that none waits for it. Each prints its status for `outcome`.
attempt() {
  local code=0 words
  # shellcheck disable=SC2016  # for the shell of each node
  words=(srun "--nodes=$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 ${passed[@]+"${passed[@]}"}
    bash -c '"$@"; status=$?; echo "taser-status $status on $(hostname)"; exit $status' taser
    "${TASER:-$here/../.venv/bin/taser}" "${rest[@]}" --multihost)
  if [ -n "$dry_run" ]; then
    step "${words[@]}"
    return
  fi
  {
    "${words[@]}" 2>&1 || code=$?
    printf '\nconnection-status %s\n' "$code"
  } | tee "$scratch/log"
  after_failure "$(outcome "$scratch/log")"
}

echo "# $nodes nodes of a Slurm cluster, one process each; Slurm frees them when the command ends"
echo "# retries: $retries, after a preemption or a lost node, $retry_seconds s apart"
use_scratch
with_retries
