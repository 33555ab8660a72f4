#!/usr/bin/env bash
# Runs in each pod of a GKE workload: copies the data, then becomes taser, so that it receives SIGTERM.
#
# usage: _container.sh gs://PLACE COMMAND [FLAGS...]      an empty first argument: no data
#
# xpk restarts a workload that ends with 75 (which the launcher adds), 42, or 127 to 255, and fails it otherwise: a
# lost coordinator (134), too little memory (137) and SIGTERM while copying (143) are tried again, errors (1, 2) not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v taser >/dev/null || {
  echo "error: the image has no taser; build it with launch/Dockerfile" >&2
  exit 2
}
[ -z "$1" ] || python launch/_fetch.py "$1" data
shift
exec taser "$@"
