#!/usr/bin/env bash
# The main job on the built-in collection: BM25, DPR and TASER trained, mined for, retrained and
# compared. With --pretrained the encoders start from a MiniLM that a package on PyPI brings, and
# that model without training is a row of the table. Other arguments are passed on to
# `taser quickstart`, for example --gin.OUTPUT_DIR=elsewhere.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment ""
if [ "${1:-}" = --pretrained ]; then
  shift
  weights="$(minilm_directory)"
  set -- --gin_file=runs/quickstart_pretrained.gin --gin.PRETRAINED="$weights" "$@"
fi
exec taser quickstart "$@"
