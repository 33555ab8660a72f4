#!/usr/bin/env bash
# Lint, types and tests without those marked slow; with --all every test, and the documentation site.
#
# usage: launch/test.sh [--all] [ARGUMENTS OF PYTEST]     for example: launch/test.sh -k routing
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "[test]"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
selection=(-m "not slow")
arguments=()
for argument in "$@"; do
  case "$argument" in
    --all) selection=() ;;
    *) arguments+=("$argument") ;;
  esac
done
if [ "${#selection[@]}" = 0 ]; then ./docs/build.sh; fi
ruff check .
ruff format --check .
mypy
# A file stays in one process, which keeps its programs; tests/file_times.py starts with the longest.
exec pytest -q --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=15 -rs \
  "${selection[@]}" "${arguments[@]}"
