#!/usr/bin/env bash
# The yardstick: one Shared and one TASER from a whole MiniLM, trained on kilt_mini's seven tasks together,
# dense and with BM25, over all passages. One command, resumable stage by stage:
#
#     benchmarks/yardstick/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SHARED_DATA holds kilt_mini/, PRETRAINED is a BERT in Hugging Face's layout (MiniLM). Options go to
# `taser pipeline taser` (runs/yardstick.gin), for example --gin.TRAIN_STEPS=20. The table is
# OUTPUT_DIR/yardstick.md; the models are left in OUTPUT_DIR/comparison/{shared,taser}-1/model.
# SPLIT=validation scores the finished models on the validation queries, for choosing a recipe.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
shared_data=$1 output_dir=$2 pretrained=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data tokens=$output_dir/tokens comparison=$output_dir/comparison
split=${SPLIT:-test}

taser prepare --gin_file=runs/kilt_mini_prepare.gin \
  --gin.DATA_DIR="$data_dir" --gin.SOURCE_DIR="$shared_data/kilt_mini"
taser tokenize --gin.DATA_DIR="$data_dir" --gin.VOCABULARY="$pretrained" \
  --gin.MIXTURE_OR_TASK_NAME=kilt_mini --gin.MIXTURE_OR_TASK_MODULE=taser_jax.tasks.kilt_mini \
  --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': 256}" --gin.TOKEN_STORE="$tokens"
taser pipeline taser --gin_file=runs/yardstick.gin --gin.OUTPUT_DIR="$comparison" \
  --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$tokens" --gin.PRETRAINED="$pretrained" \
  --gin.TrainingConfig.states_dir="'$output_dir/states'" "$@"

results=$comparison/results
if [ "$split" != test ]; then
  results=$output_dir/$split/results
  # What the pipeline has searched already; its table is of the test queries.
  evaluate() {
    taser evaluate --gin.RUNS_DIR="$comparison/$2/runs" --gin.SYSTEM="$1" --gin.SPLIT="$split" \
      --gin.DATA_DIR="$data_dir" --gin.COLLECTION=kilt_mini --gin.EVAL_OUTPUT_DIR="$output_dir/$split"
  }
  evaluate BM25 bm25
  evaluate 'MiniLM, untrained' minilm-untrained
  for system in Shared TASER; do
    evaluate "$system (negatives of BM25 and MiniLM, untrained)" "${system,,}-1"
  done
fi
python "$here/table.py" "$results" "$output_dir/yardstick${SPLIT:+-$SPLIT}.md" "$@"
for model in "$comparison"/{shared,taser}-1/model; do
  echo "model: $model"
done
