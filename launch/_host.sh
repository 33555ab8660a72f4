#!/usr/bin/env bash
# Runs on each host of a pod, in the checkout: starts taser so that it goes on when the connection is lost, and follows
# its log, whose last line is its exit status, for the launcher, which reads the output of all hosts.
#
# usage: _host.sh COMMAND [FLAGS...]   first ends the process of an earlier attempt, which would hold the chips
#        _host.sh --attach             follows what runs
#        _host.sh --end                ends what runs
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

report() {
  echo "taser-status $1 on $(hostname)"
  exit "$1"
}

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
    # With all that it has started: they are a process group.
    kill -KILL -- "-$former" 2>/dev/null
  fi
}

# In a session of its own, which the end of a connection does not reach.
start() {
  [ ! -e taser.log ] || mv taser.log taser.log.1
  : >taser.log
  setsid bash launch/_task.sh "${TASER:-.venv/bin/taser}" "$@" --multihost </dev/null >>taser.log 2>&1 &
  if ! { echo "$!" >.taser.pid.new && mv .taser.pid.new .taser.pid; }; then
    kill "$!"
    echo "error: $PWD: no file can be written; free some space on this disk, or allow writing"
    report 2
  fi
}

first=+1
case "${1:-}" in
  --attach) first=20 ;;
  --end) end_former; exit 0 ;;
  *) end_former; start "$@" ;;
esac
pid="$(cat .taser.pid 2>/dev/null || true)"
[ -n "$pid" ] || {
  echo "no command was started on $(hostname)"
  report 75
}
trap 'kill -TERM "$pid" 2>/dev/null' TERM INT
tail --pid="$pid" --sleep-interval=0.2 -n "$first" -f taser.log &
while kill -0 $! 2>/dev/null; do wait $!; done
status="$(grep -o 'taser-status [0-9]*' taser.log | tail -n 1)"
# It has none if the host was started anew meanwhile.
[ -n "$status" ] || report 75
exit "${status#* }"
