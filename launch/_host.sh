#!/usr/bin/env bash
# Runs on each host of a pod, in the checkout: kills the process of an earlier attempt, which would hold the
# chips, runs taser, and prints its exit status for the launcher, which reads the output of all hosts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

former="$(cat .taser.pid 2>/dev/null || true)"
if [ -n "$former" ] && grep -qs taser "/proc/$former/cmdline"; then
  echo "ending process $former of an earlier attempt"
  kill -TERM "$former"
  for _ in $(seq 60); do
    kill -0 "$former" 2>/dev/null || break
    sleep 1
  done
  kill -KILL "$former" 2>/dev/null
fi
"${TASER:-.venv/bin/taser}" "$@" --multihost &
echo $! >.taser.pid
trap 'kill -TERM "$(cat .taser.pid)"' TERM INT HUP
wait $!
status=$?
# A signal ends the first `wait`, but not taser, which is saving.
while kill -0 "$(cat .taser.pid)" 2>/dev/null; do
  wait "$(cat .taser.pid)"
  status=$?
done
rm -f .taser.pid
echo "taser-status $status on $(hostname)"
exit "$status"
