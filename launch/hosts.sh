#!/usr/bin/env bash
# Copies and installs this checkout on a list of machines that ssh reaches, and runs taser there. When a machine is lost
# or stopped it starts over, and taser resumes from MODEL_DIR.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/hosts.sh --hosts=HOST,HOST,... [options] -- COMMAND [FLAGS...]

  launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda --data=gs://BUCKET/tokens -- \
    train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser --gin.TOKEN_STORE=data

  --hosts=HOST,...     names for ssh; the first is host 0, which the others must reach
  --port=N             port of host 0 for JAX's coordinator (8476)
  --extra=EXTRA        the package's extra to install: cuda or tpu (none)
  --data=PLACE         a directory or gs://PLACE that each host copies to the folder `data` before the first step
  --setup=COMMAND      shell command for each host before the run
  --skip_install       use the checkout that the hosts have already, in ~/taser_jax
  --retries=N          new attempts after a host was lost (100)
  --retry_seconds=N    pause before each (60)
  --dry_run            print the plan and the commands, run nothing
  COMMAND              a taser command; the launcher adds --multihost

ssh must not ask for a password. Exit statuses are those of launch/tpu_vm.sh.
USAGE
}

here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/_arguments.sh"
. "$here/_checkout.sh"
. "$here/_attempts.sh"
hosts='' port=8476 extra='' data='' setup='' skip_install='' dry_run='' retries=100 retry_seconds=60
parse_arguments "hosts port extra data setup retries retry_seconds" "skip_install" "$@"
require hosts
require_number 1 port retry_seconds
require_number 0 retries
[[ "$extra" =~ ^(|cuda|tpu)$ ]] || fail "--extra is '$extra', expected cuda or tpu"
[[ "$hosts" =~ ^[^,[:space:]]+(,[^,[:space:]]+)*$ ]] || fail "--hosts is '$hosts', expected names with commas between them"
require_taser_command
require_program ssh "install OpenSSH"
IFS=, read -ra nodes <<<"$hosts"
install="mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && cd taser_jax && \
. launch/_environment.sh && use_environment '${extra:+[$extra]}'"

remote() {
  step ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30 "$@"
}

send_to() {
  step scp -o BatchMode=yes -o ConnectTimeout=20 -q "$2" "$1:$3"
}

connect() {
  remote "$1" "$2"
}

# JAX reads the coordinator and the number of this host from these.
variables_of() {
  local number
  for ((number = 0; number < ${#nodes[@]}; number++)); do
    [ "${nodes[number]}" != "$1" ] || break
  done
  printf 'JAX_COORDINATOR_ADDRESS=%s JAX_NUM_PROCESSES=%s JAX_PROCESS_ID=%s ' \
    "${nodes[0]#*@}:$port" "${#nodes[@]}" "$number"
}

is_there() {
  local node
  for node in "${nodes[@]}"; do remote "$node" true || return; done
}

attempt() {
  local node
  for node in "${nodes[@]}"; do prepare "$node" || return; done
  run_all "${nodes[@]}"
}

echo "# ${#nodes[@]} hosts, ${nodes[0]} first; nothing is created, so nothing is deleted"
echo "# retries: $retries, after a host was lost, $retry_seconds s apart"
use_scratch
trap 'end_connections; exit 130' INT
trap 'end_connections; exit 143' TERM HUP
with_retries
