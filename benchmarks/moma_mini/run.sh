#!/usr/bin/env bash
# MoMA's claim on two CPU cores: trained on squad and nq_qed with memories, searched on SciFact, MedQuAD,
# fm2 and climate_fever, which no training sees. Rows: BM25, MiniLM untrained, no memory, without learning, without
# the target as a memory, MoMA. One command, resumable stage by stage:
#
#     benchmarks/moma_mini/run.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# SHARED_DATA holds kilt_mini/, thesaurus/ and beir/{scifact,medquad}, PRETRAINED is a BERT in Hugging
# Face's layout (MiniLM). Options go to `taser pipeline moma` (runs/moma_mini.gin). OUTPUT_DIR/moma.md has every
# row, with its spread over seeds, and intervals against no memory; it grows with every seed.
# SEEDS ("0"), ROWS ("none fixed learned": no memory, without learning, MoMA), PASSAGE_LENGTH (256 tokens), TARGETS;
# split_data.py says what QUERIES, DISTRACTORS and TARGET_DISTRACTORS leave out, and what SPLIT tests on. gate.sh is
# the gate of claim 9 (GATE=1).
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
shared_data=$1 output_dir=$2 pretrained=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
data_dir=$output_dir/data tokens=$output_dir/tokens
targets=${TARGETS-scifact medquad fm2 climate_fever}
# Rows and seeds share their programs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(realpath -m "$output_dir")/compiled}

if [ ! -e "$output_dir/source/sizes.txt" ]; then
  mkdir -p "$output_dir/source"
  python "$here/split_data.py" "$shared_data" "$output_dir/source" >"$output_dir/sizes.txt"
  mv "$output_dir/sizes.txt" "$output_dir/source/sizes.txt"
fi
cat "$output_dir/source/sizes.txt"

common=(--gin.DATA_DIR="$data_dir")
taser prepare "${common[@]}" --gin.COLLECTION=source --gin.SOURCE_DIR="$output_dir/source" \
  --gin.PASSAGES=source.tsv --gin.VALIDATION_SHARE=0.1 --gin.QUERIES="{
      'squad': {'train': 'squad-train.jsonl', 'test': 'squad-dev.jsonl'},
      'nq_qed': {'train': 'nq_qed-train.jsonl', 'test': 'nq_qed-dev.jsonl'}}"
taser prepare "${common[@]}" --gin.COLLECTION=wiki --gin.PASSAGES="$output_dir/source/wiki.tsv"
taser prepare "${common[@]}" --gin.COLLECTION=ontology --gin.PASSAGES="[
      '$shared_data/thesaurus/disease_ontology.jsonl.gz',
      '$shared_data/thesaurus/symptom_ontology.jsonl.gz']"
for target in $targets; do
  taser prepare "${common[@]}" --gin.COLLECTION="$target" \
    --gin.DIRECTORIES="{'$target': '$output_dir/source/$target'}"
done
tokenize() {
  taser tokenize "${common[@]}" --gin.VOCABULARY="$pretrained" --gin.TOKEN_STORE="$tokens/$1" \
    --gin.TASK_FEATURE_LENGTHS="{'query': 64, 'passage': ${PASSAGE_LENGTH:-256}}" "$2=$1"
}
for collection in source $targets; do
  tokenize "$collection" --gin.MIXTURE_OR_TASK_NAME
done
for collection in wiki ontology; do
  tokenize "$collection" --gin.COLLECTION
done

# shellcheck disable=SC2086  # one word a row
rows=$(printf "'%s', " ${ROWS:-none fixed learned})
target_tokens=$(for target in $targets; do printf "'%s': '%s', " "$target" "$tokens/$target"; done)
for seed in ${SEEDS:-0}; do
  echo "== seed $seed"
  taser pipeline moma --gin_file="${RECIPE:-runs/moma_mini.gin}" --gin.OUTPUT_DIR="$output_dir/seed-$seed" \
    "${common[@]}" --gin.TOKEN_STORE="$tokens/source" --gin.PRETRAINED="$pretrained" \
    --gin.EMBEDDINGS_DIR="'$output_dir/embeddings'" --gin.MomaConfig.compared="[$rows]" \
    --gin.MEMORIES="{'source': '$tokens/source', 'wiki': '$tokens/wiki', 'ontology': '$tokens/ontology'}" \
    --gin.TARGETS="{$target_tokens}" \
    --gin.RANDOM_SEED="$seed" "$@"
  python "$here/table.py" "$output_dir" ${GATE:+--gate}
done
