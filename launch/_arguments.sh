# Sourced by the launch scripts: parses and checks --name=value arguments; runs commands or, with --dry_run, prints
# them. The script that sources it defines `usage`.
# shellcheck shell=bash disable=SC2154  # slices is set by the script

fail() {
  echo "error: $1" >&2
  echo >&2
  usage >&2
  exit 2
}

# parse_arguments "options with a value" "switches" "$@": sets a variable for each, and the array
# `rest` to the words after `--`. A value must follow `=`. Values of --data_disk, which may be repeated, go to
# the array `data_disks`; words between --gcloud, --xpk or --slurm and `--` go to `passed`.
parse_arguments() {
  # Underscores: a plain name would hide the script's variable of that name.
  local _options=" $1 " _switches=" $2 dry_run " _word _key
  shift 2
  rest=() passed=() data_disks=()
  while [ $# -gt 0 ]; do
    _word="$1"
    shift
    _key="${_word#--}"
    _key="${_key%%=*}"
    case "$_word" in
      -h | --help) usage; exit 0 ;;
      --) rest=("$@"); return ;;
      --gcloud | --xpk | --slurm)
        [[ "$_switches" == *" $_key "* ]] || fail "unknown option $_word"
        while [ $# -gt 0 ] && [ "$1" != -- ]; do
          passed+=("$1")
          shift
        done
        ;;
      --*=*)
        [[ "$_options" == *" $_key "* ]] || fail "unknown option $_word"
        [ -n "${_word#*=}" ] || fail "--$_key has no value"
        if [ "$_key" = data_disk ]; then data_disks+=("${_word#*=}"); fi
        printf -v "$_key" '%s' "${_word#*=}"
        ;;
      --*)
        [[ "$_options" != *" $_key "* ]] || fail "--$_key needs a value: --$_key=..."
        [[ "$_switches" == *" $_key "* ]] || fail "unknown option $_word"
        printf -v "$_key" '%s' yes
        ;;
      *) fail "unexpected argument '$_word'; put the command to run after --" ;;
    esac
  done
}

require() {
  local _key
  for _key in "$@"; do
    [ -n "${!_key}" ] || fail "--$_key is missing"
  done
}

# require_number LEAST OPTION...
require_number() {
  local _least="$1" _key
  shift
  for _key in "$@"; do
    if ! [[ "${!_key}" =~ ^(0|[1-9][0-9]*)$ ]] || ((${!_key} < _least)); then
      fail "--$_key is '${!_key}', expected a number of at least $_least"
    fi
  done
}

require_program() {
  [ -n "$dry_run" ] || command -v "$1" >/dev/null || {
    echo "error: $1 is not on the PATH" >&2
    echo "  fix: $2" >&2
    exit 2
  }
}

# Runs a command, or prints it quoted so that a shell can read it back.
step() {
  if [ -n "$dry_run" ]; then
    local word line=
    for word in "$@"; do line+="$(printf '%q ' "$word")"; done
    printf '%s\n' "${line% }"
  else
    "$@"
  fi
}

# Requires a `taser` command line without --multihost, which the launchers add.
require_taser_command() {
  [ ${#rest[@]} -gt 0 ] || fail "no command; for example: -- train --gin_file=runs/taser_base.gin"
  [[ " ${rest[*]} " != *" --multihost "* ]] || fail "leave out --multihost; it is added"
}

# For launchers whose hosts share nothing but a bucket.
warn_of_lost_results() {
  local word
  for word in "${rest[@]}"; do
    case "$word" in
      --gin.MODEL_DIR=gs://*) ;;
      --gin.MODEL_DIR=*)
        echo "warning: $word is on each host's own disk and is lost with the host; use gs://" >&2
        ;;
    esac
  done
}

# Makes several slices replicas of the mesh, unless the command sets another axis.
add_mesh_replica() {
  if ((slices > 1)) && [ "${rest[0]}" = train ] && ! grep -qE 'MESH_REPLICA|across_slices' <<<"${rest[*]}"; then
    rest+=("--gin.MESH_REPLICA=$slices")
  fi
}

# Prints words as one string that a remote shell splits into the same words.
quoted() {
  printf '%q ' "$@"
}
