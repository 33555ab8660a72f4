#!/usr/bin/env bash
# TASER's claims on SQuAD and Natural Questions, under several seeds: TASER over DPR with about 0.6 of its
# parameters, routing by role over learned routing and over one shared encoder, mined negatives over BM25's,
# hybrids over both of their parts. One command, resumable stage by stage:
#
#     benchmarks/open_qa/claims.sh SOURCE_DIR OUTPUT_DIR [PRETRAINED] [--gin.NAME=VALUE ...]
#
# SOURCE_DIR is run.sh's. Encoders start from random weights (runs/open_qa.gin), or from three blocks of PRETRAINED, a
# BERT in Hugging Face's layout (MiniLM). OUTPUT_DIR/claims.md has every claim with its effect and intervals,
# OUTPUT_DIR/claims.json the headline measure; they grow with every seed.
# SEEDS ("0 1 2"), PASSAGE_LENGTH (64 from random weights, 128 from pretrained ones).
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
source_dir=$1 output_dir=$2
shift 2
recipe=()
case "${1:---}" in
  --*) unset PRETRAINED; default_length=64 ;;
  *)
    export PRETRAINED=$1
    default_length=128
    recipe=(--gin_file=runs/taser_claims.gin --gin.PRETRAINED_LAYERS=3)
    shift
    ;;
esac
export PASSAGE_LENGTH=${PASSAGE_LENGTH:-$default_length}
# Seeds share their programs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

for seed in ${SEEDS:-0 1 2}; do
  COMPARISON=seed-$seed "$here/run.sh" "$source_dir" "$output_dir" \
    ${recipe[@]+"${recipe[@]}"} --gin.RANDOM_SEED="$seed" "$@"
  python "$here/claims.py" "$output_dir"
done
