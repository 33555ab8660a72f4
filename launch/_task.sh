#!/usr/bin/env bash
# Runs a command on a host, passes SIGTERM on to it, and prints its exit status for the launcher.
#
# usage: _task.sh COMMAND [FLAGS...]
# Before the command, which may be told to end at once.
trap 'preempted=yes; kill -TERM "$!" 2>/dev/null' TERM
trap : INT HUP
"$@" </dev/null &
command=$!
[ -z "${preempted:-}" ] || kill -TERM "$command"
wait "$command"
status=$?
# A signal ends the first `wait`, but not taser, which is saving.
while kill -0 "$command" 2>/dev/null; do
  wait "$command"
  status=$?
done
echo "taser-status $status on $(hostname)"
exit "$status"
