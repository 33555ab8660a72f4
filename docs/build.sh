#!/usr/bin/env bash
# Builds the pages and the API reference as a site; a broken link or a malformed docstring fails.
# usage: docs/build.sh [OUTPUT_DIR]   (build/site by default)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export JAX_PLATFORMS=cpu
python docs/generate_commands.py
exec python -m sphinx --quiet --fail-on-warning --builder html docs "${1:-build/site}"
