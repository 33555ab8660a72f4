#!/usr/bin/env bash
# The yardstick's models on SciFact and MedQuAD, as they are and trained on each set, beside BM25 and the
# untrained model: nDCG@10. After run.sh, in the same folder; resumable stage by stage:
#
#     benchmarks/yardstick/beir.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SHARED_DATA holds beir/{scifact,medquad}. Options go to `taser pipeline taser` (runs/yardstick.gin), which
# trains from PRETRAINED on a set's own queries, a tenth of which, by hash, is its validation split. Tables
# are OUTPUT_DIR/beir/*/comparison/table.md.
# SETS ("scifact medquad").
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
shared_data=$1 output_dir=$2 pretrained=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Where --gin.MIXTURE_OR_TASK_MODULE is looked for.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

for set in ${SETS:-scifact medquad}; do
  root=$output_dir/beir/$set
  common=(--gin.DATA_DIR="$root/data" --gin.TOKEN_STORE="$root/tokens")
  python "$here/beir_splits.py" "$shared_data/beir/$set" "$root/source"
  taser prepare --gin.DATA_DIR="$root/data" --gin.COLLECTION="$set" \
    --gin.DIRECTORIES="{'$set': '$root/source'}"
  taser tokenize "${common[@]}" --gin.VOCABULARY="$pretrained" \
    --gin.MIXTURE_OR_TASK_NAME="$set" --gin.MIXTURE_OR_TASK_MODULE=beir_tasks \
    --gin.TASK_FEATURE_LENGTHS="{'query': 64, 'passage': 256}"
  taser pipeline taser --gin_file=runs/yardstick.gin "${common[@]}" --gin.PRETRAINED="$pretrained" \
    --gin.OUTPUT_DIR="$root/comparison" --gin.TrainingConfig.states_dir="'$root/states'" --gin.BatchingConfig.rates="{}" --gin.TRAIN_STEPS=200 \
    --gin.WARMUP_STEPS=20 "$@"
  for system in Shared TASER; do
    zero_shot=$root/zero-shot-${system,,}
    taser encode --gin.MODEL_DIR="$output_dir/comparison/${system,,}-1/model" \
      --gin.TOKEN_STORE="$root/tokens" --gin.EMBEDDINGS_DIR="$zero_shot/embeddings"
    taser search --gin.EMBEDDINGS_DIR="$zero_shot/embeddings" --gin.INDEX_DIR="$zero_shot/index" \
      --gin.DATA_DIR="$root/data" --gin.COLLECTION="$set" --gin.RUNS_DIR="$zero_shot/runs"
    taser evaluate --gin.RUNS_DIR="$zero_shot/runs" --gin.DATA_DIR="$root/data" --gin.COLLECTION="$set" \
      --gin.SYSTEM="$system, zero-shot" --gin.EVAL_OUTPUT_DIR="$root/comparison"
  done
  cat "$root/comparison/table.md"
done
