#!/usr/bin/env bash
# Claim 9's gate, before any run that costs hours: none, a fixed and a learned lookup on validation questions of the
# source, with documents as token states of the frozen MiniLM, five of 64 tokens, and gold passages left out:
#
#     benchmarks/moma_mini/gate.sh SHARED_DATA OUTPUT_DIR PRETRAINED [--gin.NAME=VALUE ...]
#
# The gate opens where MoMA is ahead of no memory by 0.3 nDCG@10 or more (docs/claims.md). No test question is read.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
export SPLIT=validation QUERIES="${QUERIES:-0.4}" DISTRACTORS="${DISTRACTORS:-0.05}" PASSAGE_LENGTH=64 TARGETS=""
export RECIPE=runs/moma_gate.gin GATE=1
exec "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@" --gin.STATES_DIR="'$2/states'"
