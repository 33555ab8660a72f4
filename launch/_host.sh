#!/usr/bin/env bash
# Runs on each host of a pod, in the checkout: starts taser so that it goes on when the connection is lost, follows its
# log, and prints its exit status for the launcher, which reads the output of all hosts.
#
# usage: _host.sh COMMAND [FLAGS...]   first ends the process of an earlier attempt, which would hold the chips
#        _host.sh --attach             follows what runs
#        _host.sh --end                ends what runs
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

end_former() {
  local former
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
}

# In a session of its own, which the end of a connection does not reach. The status goes to a file of the process's
# name, so that a former attempt's is not mistaken for it.
start() {
  rm -f .taser.pid .taser.status.*
  [ ! -e taser.log ] || mv taser.log taser.log.1
  : >taser.log
  # shellcheck disable=SC2016  # for the shell that it starts
  setsid bash -c '
    "$@" </dev/null >>taser.log 2>&1 &
    taser=$!
    echo "$taser" >.taser.pid.new && mv .taser.pid.new .taser.pid || { kill "$taser"; exit; }
    trap : TERM INT HUP
    wait "$taser"
    status=$?
    # A signal to the whole machine ends the first `wait`, but not taser, which is saving.
    while kill -0 "$taser" 2>/dev/null; do
      wait "$taser"
      status=$?
    done
    echo "$status" >".taser.status.$taser"
  ' taser "${TASER:-.venv/bin/taser}" "$@" --multihost </dev/null >/dev/null 2>&1 &
  while [ ! -s .taser.pid ]; do
    kill -0 $! 2>/dev/null || [ -s .taser.pid ] || {
      echo "error: $PWD: no file can be written; free some space on this disk, or allow writing"
      echo "taser-status 2 on $(hostname)"
      exit 2
    }
    sleep 0.05
  done
}

first=+1
case "${1:-}" in
  --attach) first=20 ;;
  --end) end_former; exit 0 ;;
  *) end_former; start "$@" ;;
esac
pid="$(cat .taser.pid 2>/dev/null || true)"
status=75
if [ -z "$pid" ]; then
  echo "no command was started on $(hostname)"
else
  trap 'kill -TERM "$pid" 2>/dev/null' TERM INT
  tail --pid="$pid" --sleep-interval=0.2 -n "$first" -f taser.log &
  while kill -0 $! 2>/dev/null; do wait $!; done
  # Written after the process has ended; never, if the host was started anew meanwhile.
  for _ in $(seq 50); do
    [ ! -e ".taser.status.$pid" ] || break
    sleep 0.1
  done
  status="$(cat ".taser.status.$pid" 2>/dev/null || echo 75)"
fi
echo "taser-status $status on $(hostname)"
exit "$status"
