# Sourced by the launchers: packs the files of this checkout that other machines need.
# shellcheck shell=bash disable=SC2034,SC2154  # dry_run is set by parse_arguments, `scratch` used by the script

# Sets `scratch`, a directory that is deleted when the script ends.
use_scratch() {
  if [ -n "$dry_run" ]; then
    scratch="${TMPDIR:-/tmp}/taser_launch"
    step mkdir -p "$scratch"
    return
  fi
  scratch="$(mktemp -d)"
  trap 'rm -rf "$scratch"' EXIT
}

# archive_checkout FILE: archives this checkout without environments, history, data and outputs of runs.
# These are excluded only at the top level, since gin_configs/runs and taser_jax/data belong to the
# package; versions of tar disagree on how to anchor a pattern.
archive_checkout() {
  local root entry sent=()
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return
  for entry in "$root"/* "$root"/.[!.]*; do
    case "${entry##*/}" in
      .git | .venv | .*_cache | data | runs | workspace | quickstart_output | quickstart_scratch_output | build | dist | *.log) ;;
      *) [ ! -e "$entry" ] || [ -e "$entry/pyvenv.cfg" ] || sent+=("./${entry##*/}") ;;
    esac
  done
  step tar --exclude=__pycache__ --exclude='*.egg-info' -czf "$1" -C "$root" "${sent[@]}"
}
