#!/usr/bin/env bash
# Lint, types and all tests. Arguments are passed on to pytest, for example -k routing.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment "[test]"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
ruff check .
ruff format --check .
mypy
exec pytest -q --numprocesses=2 --dist=loadfile --durations=15 -rs "$@"
