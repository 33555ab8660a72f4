#!/usr/bin/env bash
# DPR-MUF on five domains: specialists of SQuAD, NQ, MedQuAD, FewRel and CMU DoG from a pretrained MiniLM, weighted
# by their confidence, beside one joint model, five that have not seen a domain, BM25 and the untrained model,
# under several seeds. One command, resumable stage by stage:
#
#     benchmarks/muf/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SHARED_DATA holds kilt_mini/ and beir/medquad, PRETRAINED is a BERT in Hugging Face's layout. Options go to
# `taser pipeline muf` (runs/muf_mini.gin). OUTPUT_DIR/muf.md has every row with its spread over seeds, and claims
# 5 and 6 of docs/claims.md and the paper's with intervals; it grows with every seed.
# SEEDS ("0 1"), STEPS (50, of each specialist; joint models have the sum), PASSAGE_LENGTH (32 tokens),
# DISTRACTORS (0.1): share of the passages that answer no query.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
shared_data=$1 output_dir=$2 pretrained=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data tokens=$output_dir/tokens
steps=${STEPS:-50}
# Where --gin.MIXTURE_OR_TASK_MODULE is looked for.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
# Seeds share their programs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}

taser prepare --gin_file=runs/muf_mini_prepare.gin --gin.DATA_DIR="$data_dir" \
  --gin.SOURCE_DIR="$shared_data" --gin.PrepareOptions.distractors="${DISTRACTORS:-0.1}"
taser tokenize --gin.DATA_DIR="$data_dir" --gin.VOCABULARY="$pretrained" \
  --gin.MIXTURE_OR_TASK_NAME=muf_mini --gin.MIXTURE_OR_TASK_MODULE=muf_tasks \
  --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': ${PASSAGE_LENGTH:-32}}" --gin.TOKEN_STORE="$tokens"
for seed in ${SEEDS:-0 1}; do
  echo "== seed $seed"
  taser pipeline muf --gin_file=runs/muf_mini.gin --gin.OUTPUT_DIR="$output_dir/seed-$seed" \
    --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$tokens" --gin.PRETRAINED="$pretrained" \
    --gin.STATES_DIR="$output_dir/states" --gin.RANDOM_SEED="$seed" \
    --gin.TRAIN_STEPS="$steps" --gin.JOINT_STEPS=$((5 * steps)) "$@"
  for script in uncertainty costs figures; do
    python "$here/$script.py" "$output_dir/seed-$seed"
  done
  python "$here/table.py" "$output_dir"
done
