#!/usr/bin/env bash
# Writes launch/requirements-tpu.txt, which pod hosts and images install: the versions of the tests' .venv, for
# Python 3.12 on Linux, with hashes. Run it after setup.py or .venv has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v uv >/dev/null || {
  echo "error: uv is not on the PATH" >&2
  echo "  fix: pip install uv" >&2
  exit 2
}
tested="$(mktemp)"
trap 'rm -f "$tested"' EXIT
# PyTorch's local versions (+cpu) are not in the index.
.venv/bin/python -m pip freeze --exclude-editable | sed 's/+.*//' >"$tested"
# setuptools and wheel build the checkout itself.
printf '%s\n' setuptools wheel | uv pip compile --quiet --python-version 3.12 \
  --python-platform x86_64-manylinux_2_35 --generate-hashes --no-annotate --custom-compile-command launch/lock.sh \
  --constraint "$tested" --extra tpu --extra tensorflow --extra scann --output-file launch/requirements-tpu.txt setup.py -
