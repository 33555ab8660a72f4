#!/usr/bin/env bash
# Runs lint, type checks and all tests but those marked slow. --all adds the slow ones and builds the
# documentation site; --release also runs the benchmarks' recipes, from pretrained weights to their tables.
#
# usage: launch/test.sh [--all | --release] [ARGUMENTS OF PYTEST]     for example: launch/test.sh -k routing
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "[test]"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
selection=(-m "not slow and not release")
site=false
arguments=()
for argument in "$@"; do
  case "$argument" in
    --all) selection=(-m "not release") site=true ;;
    --release) selection=() site=true ;;
    *) arguments+=("$argument") ;;
  esac
done
if "$site"; then ./docs/build.sh; fi
ruff check .
ruff format --check .
mypy
# Each file stays in one process, which keeps its compiled programs; tests/file_times.py orders files, longest first.
exec pytest -q --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15 -rs \
  "${selection[@]}" "${arguments[@]}"
