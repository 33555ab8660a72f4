#!/usr/bin/env bash
# Runs taser on several TPU slices: requests them as one queued resource, waits for them, installs this checkout on
# every host of every slice, and runs. After a preemption it requests them again. --help: options.
exec python3 -u "$(dirname "${BASH_SOURCE[0]}")/launch.py" tpu_multislice "$@"
