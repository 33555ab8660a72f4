#!/usr/bin/env bash
# Runs taser on one TPU VM or on all hosts of a pod slice. Creates the TPU if --type is given, copies and installs this
# checkout, and runs. After a preemption it starts over, and taser resumes from MODEL_DIR. --help: options.
exec python3 -u "$(dirname "${BASH_SOURCE[0]}")/launch.py" tpu_vm "$@"
