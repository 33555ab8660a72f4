#!/usr/bin/env bash
# TACO-DR's claims on seven tasks over one collection: T-SAGE beside the plain sum, PCGrad, CGD, GradNorm,
# per-task models and task-specific query encoders; prompts; episodes. All of it, resumable row by row:
#
#     benchmarks/kilt_mini/run.sh SOURCE_DIR OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SOURCE_DIR has kilt_mini's files, PRETRAINED is a BERT in Hugging Face's layout (MiniLM). Options go to
# every `taser pipeline ance` (runs/kilt_mini_ance.gin), for example --gin.TRAIN_STEPS=20. Every seed runs
# a warm-up and two episodes of the plain sum; other optimisers, and per-task models, replace the second
# episode: same checkpoint, same negatives, same batches. T-SAGE's temperature is chosen on the validation
# queries of the first seed.
# SEEDS ("0 1 2"): the first one runs every row; the others those of the claims.
# ROWS (all): names of rows to run beside naive, such as "t-sage-0.5 per-task"; the table has what is there.
# PASSAGE_LENGTH (256): tokens of a passage that encoders see.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
source_dir=$1 output_dir=$2 pretrained=$3
shift 3
options=("$@")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data
read -r -a seeds <<<"${SEEDS:-0 1 2}"
rows=${ROWS:-no-prompts t-sage-2.0 t-sage-0.5 t-sage-0.25 per-task pcgrad cgd gradnorm qspec marker}
tasks="squad nq_qed selqa fm2 climate_fever fewrel cmu_dog"
# shellcheck disable=SC2086  # one word a task
query_tasks=$(printf "'%s', " $tasks)
# Rows share their programs: what one has compiled the next one reads.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}

if [ ! -d "$data_dir" ]; then
  taser prepare --gin_file=runs/kilt_mini_prepare.gin \
    --gin.DATA_DIR="$data_dir" --gin.SOURCE_DIR="$source_dir"
fi
for mixture in kilt_mini_name kilt_mini kilt_mini_marker; do
  if [ ! -d "$output_dir/tokens/$mixture" ]; then
    taser tokenize --gin.DATA_DIR="$data_dir" --gin.VOCABULARY="$pretrained" \
      --gin.MIXTURE_OR_TASK_NAME="$mixture" --gin.MIXTURE_OR_TASK_MODULE=taser_jax.tasks.kilt_mini \
      --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': ${PASSAGE_LENGTH:-256}}" \
      --gin.TOKEN_STORE="$output_dir/tokens/$mixture"
  fi
done

# ance NAME MIXTURE [FLAGS...]: one run of the pipeline, in OUTPUT_DIR/seed-$seed/NAME.
ance() {
  local name=$1 mixture=$2
  shift 2
  echo "== $name, seed $seed"
  taser pipeline ance --gin_file=runs/kilt_mini_ance.gin "$@" \
    --gin.OUTPUT_DIR="$output_dir/seed-$seed/$name" --gin.pipeline_ance.name="$name" \
    --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$output_dir/tokens/$mixture" \
    --gin.PRETRAINED="$pretrained" --gin.STATES_DIR="$output_dir/states/$mixture" \
    --gin.RANDOM_SEED="$seed" "${options[@]}"
}
# branch NAME [FLAGS...]: the naive run's second episode in another way.
branch() {
  local name=$1
  shift
  ance "$name" kilt_mini_name "$@" --gin.pipeline_ance.warm_up_dir="$output_dir/seed-$seed/naive" \
    --gin.pipeline_ance.branch_after=1 --gin.Episodes.count=1
}
# validate NAME: the row's PageRprec on the validation queries, in OUTPUT_DIR/validation.
validate() {
  local episode=$output_dir/seed-$seed/$1/episode-2
  taser search --gin.EMBEDDINGS_DIR="$episode/embeddings" --gin.INDEX_DIR="$episode/exact" \
    --gin.DATA_DIR="$data_dir" --gin.COLLECTION=kilt_mini --gin.SPLIT=validation \
    --gin.RUNS_DIR="$episode/runs"
  taser evaluate --gin.RUNS_DIR="$episode/runs" --gin.DATA_DIR="$data_dir" --gin.COLLECTION=kilt_mini \
    --gin.SPLIT=validation --gin.SYSTEM="$1" --gin.EVAL_OUTPUT_DIR="$output_dir/validation" \
    --gin.EvaluationConfig.judge=kilt --gin.EvaluationConfig.measures="['PageRprec']"
}

for seed in "${seeds[@]}"; do
  ance naive kilt_mini_name
  if [ "$seed" != "${seeds[0]}" ]; then
    best=$(python "$here/table.py" --best-temperature "$output_dir")
    rows=$(for row in $rows; do [[ " no-prompts per-task t-sage-$best " != *" $row "* ]] || echo "$row"; done)
  fi
  for row in $rows; do
    case $row in
      no-prompts) ance no-prompts kilt_mini ;;
      marker) ance marker kilt_mini_marker ;;
      qspec)
        # Towers that no passage trains move apart from the passages' at the others' rate.
        branch qspec --gin.DualEncoderConfig.towers=separate --gin.LEARNING_RATE=2e-5 \
          --gin.DualEncoderConfig.query_tasks="($query_tasks)" ;;
      pcgrad | cgd | gradnorm) branch "$row" --gin_file="optim/$row.gin" ;;
      t-sage-*)
        branch "$row" --gin_file=optim/tsage.gin --gin_file=runs/kilt_mini_tsage.gin \
          --gin.TSageConfig.temperature="${row#t-sage-}"
        if [ "$seed" = "${seeds[0]}" ]; then validate "$row"; fi ;;
      per-task)
        # As many queries per step as the task has in the other rows.
        for task in $tasks; do
          queries=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["batch_sizes"][sys.argv[2]])' \
            "$output_dir/seed-$seed/naive/episode-2/model/run.json" "$task")
          branch "per-task-$task" --gin.TASKS="['$task']" --gin.TaskBatchingConfig.total="$queries"
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
models=$output_dir/seed-${seeds[0]} last=episode-2/model
best=$(python "$here/table.py" --best-temperature "$output_dir")
if [ -n "$best" ]; then
  taser analyze --gin.TOKEN_STORE="$output_dir/tokens/kilt_mini_name" \
    --gin.OUTPUT_DIR="$output_dir/analysis" --gin.NEGATIVES_DIRS="['$models/naive/episode-1/negatives']" \
    --gin.analyze.model_dirs="{'naive': '$models/naive/$last', 'T-SAGE': '$models/t-sage-$best/$last'}" \
    --gin.RANDOM_SEED="${seeds[0]}" --gin.TaskBatchingConfig.total=448 \
    --gin.TaskBatchingConfig.temperature=1e9 --gin.TaskBatchingConfig.num_negatives=1 \
    --gin.TaskBatchingConfig.false_negatives=keep --gin.TaskBatchingConfig.positives=first \
    --gin.ObjectiveConfig.temperature=0.05 --gin.AnalysisConfig.median_over=nonzero \
    --gin.AnalysisConfig.num_batches="${ANALYZED_BATCHES:-8}"
fi
