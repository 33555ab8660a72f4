#!/usr/bin/env bash
# Runs on each host of a pod, in the checkout: makes .venv with Python 3.12 and the locked versions, the same on every
# host and after every restart. Installs again only if a file that determines the versions has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv="$HOME/.local/bin/uv"
[ -x "$uv" ] || python3 -m pip install --quiet --user uv==0.13.9
wanted="$(cat launch/requirements-tpu.txt setup.py pyproject.toml | sha256sum)"
[ "$(cat .venv/locked 2>/dev/null || true)" != "$wanted" ] || exit 0
echo "installing taser_jax into .venv on $(hostname) ..."
"$uv" venv --quiet --clear --python 3.12 .venv
"$uv" pip install --quiet --python .venv/bin/python --require-hashes -r launch/requirements-tpu.txt
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
printf '%s' "$wanted" >.venv/locked
