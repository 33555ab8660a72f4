#!/usr/bin/env bash
# Trains a small TASER on the built-in collection and eight fake devices of this machine, to try out meshes and
# configurations for a pod. The first run prepares the data.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/local.sh [--directory=DIR] [--devices=N] [--steps=N] [--dry_run] [-- FLAGS...]

  --directory=DIR  folder for collection, tokens and model, relative to the checkout (runs/local)
  --devices=N      fake devices (8)
  --steps=N        training steps (20)
  --dry_run        print the commands, run nothing
  FLAGS            for `taser train`, for example --gin.MESH_FSDP=2 --gin.NUM_MODEL_PARTITIONS=2
USAGE
}

fail() {
  echo "error: $1" >&2
  echo >&2
  usage >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory=runs/local devices=8 steps=20 dry_run=
while [ $# -gt 0 ]; do
  value="${1#*=}"
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    --dry_run) dry_run=yes ;;
    --directory=?*) directory="$value" ;;
    --devices=* | --steps=*)
      [[ "$value" =~ ^[1-9][0-9]*$ ]] || fail "${1%%=*} is '$value', expected a number of at least 1"
      case "$1" in --devices=*) devices="$value" ;; *) steps="$value" ;; esac
      ;;
    *) fail "unknown option $1; flags for taser train go after --" ;;
  esac
  shift
done

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

# In a dry run too, so that it finds the same finished steps as a real run.
cd "$root"
step cd "$root"
step . launch/_environment.sh
step use_environment ""
# Each of these skips what is finished.
if [ ! -e "$directory/tokens/metadata.json" ]; then
  step taser prepare pydocs "--gin.DATA_DIR=$directory/data"
  step taser tokenize "--gin.DATA_DIR=$directory/data" \
    "--gin.VOCABULARY=$directory/vocabulary" --gin.VOCAB_SIZE=4096 \
    --gin.MIXTURE_OR_TASK_NAME=pydocs --gin.MIXTURE_OR_TASK_MODULE=taser_jax.tasks.pydocs \
    "--gin.TASK_FEATURE_LENGTHS={'query': 32, 'passage': 64}" "--gin.TOKEN_STORE=$directory/tokens"
fi
step env JAX_PLATFORMS=cpu "JAX_NUM_CPU_DEVICES=$devices" taser train \
  --gin_file=runs/train.gin --gin_file=models/bert_tiny.gin --gin_file=models/taser.gin \
  "--gin.MODEL_DIR=$directory/model" \
  "--gin.TOKEN_STORE=$directory/tokens" "--gin.TRAIN_STEPS=$steps" --gin.BATCH_SIZE=32 \
  "--gin.WARMUP_STEPS=$((steps / 10))" --gin.LoopConfig.log_period=5 \
  --gin.ValidationConfig.num_batches=2 "$@"
