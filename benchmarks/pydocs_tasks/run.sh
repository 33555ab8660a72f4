#!/usr/bin/env bash
# Claims 7, 8 and 10 of docs/claims.md on the built-in collection: prompts, T-SAGE beside other multi-task
# optimisers, and experts beside one shared encoder (there with cmu_dog, too). Resumable row by row:
#
#     benchmarks/pydocs_tasks/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SHARED_DATA holds kilt_mini/ and beir/medquad, PRETRAINED is a BERT in Hugging Face's layout (MiniLM), whose
# vocabulary all rows have, and no row its weights. Options go to every `taser pipeline ance`.
# PARTS ("prompts tsage gate experts"), SEEDS (prompts "0 1 2", gate "0", the others "0 1 2 3 4"). The first seed
# runs every row and, on validation queries, chooses T-SAGE's temperature and the experts' learning rate; the others
# run the claims' rows. ROWS ("shared taser wide"): those of the part experts; claim 10 compares the first two.
# OUTPUT_DIR/PART/claims.md and claims.json grow with every row.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
shared_data=$1 output_dir=$2 pretrained=$3
shift 3
options=("$@")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data
tasks="summary parameter example code see_also lookup"
# Where --gin.MIXTURE_OR_TASK_MODULE is looked for.
export PYTHONPATH=$here:$here/../muf${PYTHONPATH:+:$PYTHONPATH}
# Rows share their programs: what one has compiled the next one reads.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}

# tokenize MIXTURE MODULE: its token store, in OUTPUT_DIR/tokens.
tokenize() {
  if [ ! -d "$output_dir/tokens/$1" ]; then
    taser tokenize --gin.DATA_DIR="$data_dir" --gin.VOCABULARY="$pretrained" \
      --gin.MIXTURE_OR_TASK_NAME="$1" --gin.MIXTURE_OR_TASK_MODULE="$2" \
      --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': ${PASSAGE_LENGTH:-48}}" \
      --gin.TOKEN_STORE="$output_dir/tokens/$1"
  fi
}
# ance NAME MIXTURE RECIPE [FLAGS...]: one run of the pipeline, in OUTPUT_DIR/PART/seed-$seed/NAME.
ance() {
  local name=$1 mixture=$2 recipe=$3
  shift 3
  echo "== $part: $name, seed $seed"
  taser pipeline ance --gin_file="$recipe" "$@" \
    --gin.OUTPUT_DIR="$output_dir/$part/seed-$seed/$name" --gin.pipeline_ance.name="$name" \
    --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$output_dir/tokens/$mixture" \
    --gin.RANDOM_SEED="$seed" ${options[@]+"${options[@]}"}
  python "$here/table.py" "$part" "$output_dir/$part"
}
# validate NAME MODEL COLLECTION TASKS MEASURE: the row's value on the validation queries of its tasks (None: of
# all), in OUTPUT_DIR/PART/validation.
validate() {
  local root=$output_dir/$part/seed-$seed/$1/$2
  taser search --gin.EMBEDDINGS_DIR="$root/embeddings" --gin.INDEX_DIR="$root/exact" \
    --gin.DATA_DIR="$data_dir" --gin.COLLECTION="$3" --gin.SPLIT=validation --gin.TASKS="$4" \
    --gin.RUNS_DIR="$root/runs"
  taser evaluate --gin.RUNS_DIR="$root/runs" --gin.DATA_DIR="$data_dir" --gin.COLLECTION="$3" \
    --gin.SPLIT=validation --gin.TASKS="$4" --gin.SYSTEM="$1" \
    --gin.EVAL_OUTPUT_DIR="$output_dir/$part/validation" --gin.EvaluationConfig.measures="['$5']"
}

prompts() {
  for kind in none marker name sentence; do
    tokenize "pydocs_$kind" prompts
    ance "$kind" "pydocs_$kind" runs/pydocs_ance.gin --gin.pipeline_ance.episodes="[]" \
      --gin.WARM_UP_STEPS=600 --gin.TaskBatchingConfig.total=96
  done
}

tsage() {
  tokenize pydocs taser_jax.tasks.pydocs
  ance naive pydocs runs/pydocs_ance.gin
  local rows="t-sage-2.0 t-sage-0.5 t-sage-0.25 per-task beta-0.999 pcgrad cgd gradnorm"
  if [ "$seed" != "$first_seed" ]; then
    rows="t-sage-$(python "$here/table.py" --best "$output_dir/tsage" t-sage- nDCG@10) gradnorm per-task"
  fi
  local branch=(--gin.pipeline_ance.warm_up_dir="$output_dir/tsage/seed-$seed/naive"
    --gin.pipeline_ance.branch_after=1 --gin.pipeline_ance.episodes="[@Episodes()]")
  for row in $rows; do
    case $row in
      pcgrad | cgd | gradnorm) ance "$row" pydocs runs/pydocs_ance.gin --gin_file="optim/$row.gin" "${branch[@]}" ;;
      t-sage-*)
        ance "$row" pydocs runs/pydocs_ance.gin --gin_file=optim/tsage.gin "${branch[@]}" \
          --gin.TSageConfig.temperature="${row#t-sage-}"
        if [ "$seed" = "$first_seed" ]; then validate "$row" episode-2 pydocs None nDCG@10; fi ;;
      # The cause that docs/claims.md names: sensitivities averaged over more steps.
      beta-*)
        ance "$row" pydocs runs/pydocs_ance.gin --gin_file=optim/tsage.gin "${branch[@]}" \
          --gin.TSageConfig.temperature="$(python "$here/table.py" --best "$output_dir/tsage" t-sage- nDCG@10)" \
          --gin.TSageConfig.beta="${row#beta-}" ;;
      per-task)
        for task in $tasks; do
          ance "per-task-$task" pydocs runs/pydocs_ance.gin "${branch[@]}" --gin.TASKS="['$task']" \
            --gin.TaskBatchingConfig.total=64
        done ;;
    esac
  done
}

# Where sharing hurts: gradients of the naive runs that `tsage` has finished.
gate() {
  local naive=$output_dir/tsage/seed-$seed/naive
  python "$here/gate.py" "$output_dir/tokens/pydocs" "$naive" --seed "$seed" | tee "$naive/gate.md"
}

# experts_on COLLECTION MIXTURE TASKS TOTAL: Shared and TASER on these tasks.
experts_on() {
  local equal=(--gin.pipeline_ance.episodes="[]" --gin.WARM_UP_STEPS="${STEPS:-1000}" --gin.TASKS="[$3]"
    --gin.TaskBatchingConfig.total="$4")
  local taser=(--gin_file=models/taser.gin --gin.ExpertConfig.blocks="(1, 2, 3)")
  local factors="1 3"
  if [ "$seed" != "$first_seed" ]; then
    factors=$(python "$here/table.py" --best "$output_dir/experts" taser- R@20)
  fi
  for row in ${ROWS:-shared taser wide}; do
    case $row in
      shared) ance "shared-$1" "$2" runs/pydocs_ance.gin "${equal[@]}" ;;
      # As many parameters as TASER, which has two feed-forward networks in every block.
      wide) ance "wide-$1" "$2" runs/pydocs_ance.gin "${equal[@]}" --gin.BertConfig.mlp_dim=512 ;;
      taser)
        for factor in $factors; do
          ance "taser-$factor-$1" "$2" runs/pydocs_ance.gin "${taser[@]}" "${equal[@]}" \
            --gin.OptimizerConfig.expert_learning_rate_factor="$factor"
          if [ "$seed" = "$first_seed" ]; then validate "taser-$factor-$1" warm-up "$1" "[$3]" R@20; fi
        done ;;
      *)
        echo "error: no row $row" >&2
        exit 2 ;;
    esac
  done
}

experts() {
  if [ ! -d "$data_dir/muf_mini" ]; then
    taser prepare --gin_file=runs/muf_mini_prepare.gin --gin.DATA_DIR="$data_dir" \
      --gin.SOURCE_DIR="$shared_data" --gin.PrepareOptions.distractors=0.1
  fi
  tokenize pydocs taser_jax.tasks.pydocs
  tokenize muf_mini muf_tasks
  experts_on pydocs pydocs "'code', 'example', 'see_also'" 192
  experts_on muf_mini muf_mini "'cmu_dog'" 64
}

if [ ! -d "$data_dir/pydocs" ]; then
  taser prepare pydocs --gin.DATA_DIR="$data_dir"
fi
for part in ${PARTS:-prompts tsage gate experts}; do
  case $part in
    prompts) seeds=${SEEDS:-0 1 2} ;;
    gate) seeds=${SEEDS:-0} ;;
    tsage | experts) seeds=${SEEDS:-0 1 2 3 4} ;;
    *)
      echo "error: no part $part" >&2
      exit 2 ;;
  esac
  first_seed=${seeds%% *}
  for seed in $seeds; do
    "$part"
  done
done
