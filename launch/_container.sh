#!/usr/bin/env bash
# Runs in each pod of a GKE workload: copies the data, then replaces itself by taser, which receives SIGTERM.
#
# usage: _container.sh gs://PLACE COMMAND [FLAGS...]      with an empty first argument, copies nothing
#
# xpk restarts a workload that ends with 75 (which the launcher adds), 42, or 127 to 255: a lost coordinator (134),
# too little memory (137) and SIGTERM while copying (143). It fails the workload for others, such as errors (1, 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v taser >/dev/null || {
  echo "error: the image has no taser; build it with launch/Dockerfile" >&2
  exit 2
}
[ -z "$1" ] || python launch/_fetch.py "$1" data
shift
exec taser "$@"
