#!/usr/bin/env bash
# Seven tasks over one collection: per-task models, task-specific query encoders, one model for all
# with every multi-task optimiser, and TACO-DR. All of it, resumable, a row after the other:
#
#     benchmarks/kilt_mini/run.sh SOURCE_DIR OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SOURCE_DIR has kilt_mini's files, PRETRAINED is a BERT in Hugging Face's layout (MiniLM). Options go to
# every `taser pipeline ance` (runs/kilt_mini_ance.gin), for example --gin.TRAIN_STEPS=20.
# SEEDS ("0 1 2"): the first one runs every row; the others naive, prompts, T-SAGE and TACO-DR.
# ROWS (all): names of rows to run, such as "naive taco-dr"; the table has what is there.
# ONE_WARM_UP=1 starts the other seeds from the first one's warm-up: less work, and less of a spread.
# PASSAGE_LENGTH (64): tokens of a passage that encoders see.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
source_dir=$1 output_dir=$2 pretrained=$3
shift 3
options=("$@")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data
read -r -a seeds <<<"${SEEDS:-0 1 2}"
rows=${ROWS:-naive prompts t-sage t-sage-prompts taco-dr pcgrad cgd gradnorm marker qspec per-task}
repeated="naive prompts t-sage taco-dr"
tasks="squad nq_qed selqa fm2 climate_fever fewrel cmu_dog"
# shellcheck disable=SC2086  # one word a task
query_tasks=$(printf "'%s', " $tasks)
# Rows share their programs: what one has compiled the next one reads.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}

if [ ! -d "$data_dir" ]; then
  taser prepare kilt --gin_file=runs/kilt_mini_prepare.gin \
    --gin.DATA_DIR="$data_dir" --gin.SOURCE_DIR="$source_dir"
fi
for mixture in kilt_mini kilt_mini_name kilt_mini_marker; do
  if [ ! -d "$output_dir/tokens/$mixture" ]; then
    taser tokenize --gin.DATA_DIR="$data_dir" --gin.VOCABULARY="$pretrained" \
      --gin.MIXTURE_OR_TASK_NAME="$mixture" --gin.MIXTURE_OR_TASK_MODULE=taser_jax.tasks.kilt_mini \
      --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': ${PASSAGE_LENGTH:-64}}" \
      --gin.TOKEN_STORE="$output_dir/tokens/$mixture"
  fi
done

# ance SEED NAME MIXTURE [FLAGS...]: one run of the pipeline, in OUTPUT_DIR/seed-SEED/NAME.
ance() {
  local seed=$1 name=$2 mixture=$3
  shift 3
  echo "== $name, seed $seed"
  taser pipeline ance --gin_file=runs/kilt_mini_ance.gin "$@" \
    --gin.OUTPUT_DIR="$output_dir/seed-$seed/$name" --gin.NAME="$name" \
    --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$output_dir/tokens/$mixture" \
    --gin.PRETRAINED="$pretrained" --gin.RANDOM_SEED="$seed" "${options[@]}"
}

for seed in "${seeds[@]}"; do
  # One warm-up, without prompts, for all rows of a seed, as TACO-DR's code has it.
  warm_up_seed=${ONE_WARM_UP:+${seeds[0]}}
  warm_up_seed=${warm_up_seed:-$seed}
  warm_up=$output_dir/seed-$warm_up_seed/warm-up
  ance "$warm_up_seed" warm-up kilt_mini --gin.EPISODES=[]
  for row in $rows; do
    if [ "$seed" != "${seeds[0]}" ] && [[ " $repeated " != *" $row "* ]]; then continue; fi
    from=("--gin.WARM_UP_DIR=$warm_up")
    case $row in
      naive) ance "$seed" naive kilt_mini "${from[@]}" ;;
      marker) ance "$seed" marker kilt_mini_marker "${from[@]}" ;;
      prompts) ance "$seed" prompts kilt_mini_name "${from[@]}" ;;
      qspec)
        # Towers that no passage trains move apart from the passages' at the others' rate, 1e-4.
        ance "$seed" qspec kilt_mini --gin_file=models/query_specific.gin \
          --gin.QUERY_TASKS="($query_tasks)" --gin.LEARNING_RATE=2e-5 "${from[@]}" ;;
      pcgrad | cgd | gradnorm)
        ance "$seed" "$row" kilt_mini --gin_file="optim/$row.gin" "${from[@]}" ;;
      t-sage) ance "$seed" t-sage kilt_mini --gin_file=optim/tsage.gin \
        --gin_file=runs/kilt_mini_tsage.gin "${from[@]}" ;;
      t-sage-prompts) ance "$seed" t-sage-prompts kilt_mini_name --gin_file=optim/tsage.gin \
        --gin_file=runs/kilt_mini_tsage.gin "${from[@]}" ;;
      taco-dr) ance "$seed" taco-dr kilt_mini_name --gin_file=optim/tsage.gin \
        --gin_file=runs/kilt_mini_tsage.gin --gin_file=runs/kilt_mini_taco_dr.gin "${from[@]}" ;;
      per-task)
        # Each task's share of the other rows' queries; negatives and start are theirs, too.
        for task in $tasks; do
          ance "$seed" "per-task-$task" kilt_mini --gin.TASKS="['$task']" \
            --gin.TOTAL_BATCH_SIZE="${PER_TASK_BATCH_SIZE:-8}" "${from[@]}"
        done ;;
      *)
        echo "error: no row $row" >&2
        exit 2 ;;
    esac
    python "$here/table.py" "$output_dir"
  done
done
python "$here/table.py" "$output_dir"

# Which parameters serve which task, with and without T-SAGE: the paper's figures.
# analyze NAME MIXTURE MODELS: models of the first seed, as the queries of a mixture use them.
models=$output_dir/seed-${seeds[0]}
analyze() {
  taser analyze --gin.TOKEN_STORE="$output_dir/tokens/$2" --gin.OUTPUT_DIR="$output_dir/$1" \
    --gin.MODEL_DIRS="$3" --gin.NEGATIVES_DIRS="['$models/warm-up/warm-up/negatives']" \
    --gin.RANDOM_SEED="${seeds[0]}" --gin.TOTAL_BATCH_SIZE=56 --gin.NUM_NEGATIVES=1 \
    --gin.TEMPERATURE=0.05 --gin.MEDIAN_OVER=nonzero --gin.NUM_BATCHES="${ANALYZED_BATCHES:-8}" \
    --gin.TSAGE_BETAS="${TSAGE_BETAS:-[0.0, 0.9, 0.99]}"
}
if [ -d "$models/naive/episode-1" ] && [ -d "$models/t-sage/episode-1" ]; then
  analyze analysis kilt_mini \
    "{'naive': '$models/naive/episode-1/model', 'T-SAGE': '$models/t-sage/episode-1/model'}"
fi
if [ -d "$models/prompts/episode-1" ] && [ -d "$models/taco-dr/episode-2" ]; then
  analyze analysis_prompts kilt_mini_name \
    "{'prompts': '$models/prompts/episode-1/model', 'TACO-DR': '$models/taco-dr/episode-2/model'}"
fi
