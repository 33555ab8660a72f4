#!/usr/bin/env bash
# Runs taser on a Slurm cluster, one process per node, from this checkout on a shared file system. JAX finds its
# coordinator in Slurm's variables. After a preemption it requests nodes again, and taser resumes from MODEL_DIR. --help: options.
exec python3 -u "$(dirname "${BASH_SOURCE[0]}")/launch.py" slurm "$@"
