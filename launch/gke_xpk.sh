#!/usr/bin/env bash
# Runs taser as a workload on a GKE cluster made by xpk. Builds one image, which all hosts and all restarts use.
# After a preemption the cluster restarts the workload, and taser resumes from MODEL_DIR. --help: options.
exec python3 -u "$(dirname "${BASH_SOURCE[0]}")/launch.py" gke_xpk "$@"
