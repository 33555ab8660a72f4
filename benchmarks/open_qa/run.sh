#!/usr/bin/env bash
# SQuAD and Natural Questions over one merged collection: BM25, DPR, TASER and Shared, trained from
# scratch, mined for, retrained, compared by answers. All of it, resumable:
#
#     benchmarks/open_qa/run.sh SOURCE_DIR OUTPUT_DIR [--gin.NAME=VALUE ...]
#
# SOURCE_DIR has squad/, nq_qed/ and kilt_mini/ (DPR's formats). Options go to
# `taser pipeline taser` (runs/open_qa.gin), for example --gin.TRAIN_STEPS=20.
# STAGES=data stops before training, after OUTPUT_DIR/token_store.
# PASSAGE_LENGTH (64): tokens of a passage that encoders see.
# COMPARISON (comparison): the folder in OUTPUT_DIR that the pipeline writes to.
# PRETRAINED=DIR starts from a Hugging Face model, with its vocabulary (runs/open_qa_pretrained.gin).
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
source_dir=$1 output_dir=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
questions=$output_dir/questions
data_dir=$output_dir/data

python "$here/split_questions.py" \
  "$source_dir/squad/squad_split_train.dpr.jsonl.gz" \
  "$source_dir/nq_qed/nq_qed_train.dpr.jsonl.gz" "$questions"

taser prepare --gin_file=runs/open_qa_prepare.gin --gin.DATA_DIR="$data_dir" \
  --gin.PASSAGES="{'squad': '$source_dir/squad/psgs_squad_dev.tsv.gz',
    'nq': '$source_dir/nq_qed/psgs_nq_qed.tsv.gz', 'kilt': '$source_dir/kilt_mini/passages.tsv.gz'}" \
  --gin.squad_train/QuestionFiles.questions="$questions/squad_split_train.train.jsonl" \
  --gin.squad_validation/QuestionFiles.questions="$questions/squad_split_train.validation.jsonl" \
  --gin.squad_test/QuestionFiles.questions="$source_dir/squad/squad_split_dev.dpr.jsonl.gz" \
  --gin.nq_train/QuestionFiles.questions="$questions/nq_qed_train.train.jsonl" \
  --gin.nq_validation/QuestionFiles.questions="$questions/nq_qed_train.validation.jsonl" \
  --gin.nq_test/QuestionFiles.questions="$source_dir/nq_qed/nq_qed_dev.dpr.jsonl.gz"

if [ -n "${PRETRAINED:-}" ]; then
  words=(--gin.VOCABULARY="$PRETRAINED")
  recipe=(--gin_file=runs/open_qa_pretrained.gin --gin.PRETRAINED="$PRETRAINED")
else
  words=(--gin.VOCABULARY="$output_dir/vocabulary" --gin.VOCAB_SIZE=16384)
  recipe=(--gin_file=runs/open_qa.gin)
fi

taser tokenize --gin.DATA_DIR="$data_dir" "${words[@]}" \
  --gin.MIXTURE_OR_TASK_NAME=open_qa --gin.MIXTURE_OR_TASK_MODULE=taser_jax.tasks.open_qa \
  --gin.TASK_FEATURE_LENGTHS="{'query': 32, 'passage': ${PASSAGE_LENGTH:-64}}" \
  --gin.TOKEN_STORE="$output_dir/token_store"

if [ "${STAGES:-all}" = data ]; then
  exit 0
fi
taser pipeline taser "${recipe[@]}" --gin.OUTPUT_DIR="$output_dir/${COMPARISON:-comparison}" \
  --gin.DATA_DIR="$data_dir" --gin.TOKEN_STORE="$output_dir/token_store" "$@"
