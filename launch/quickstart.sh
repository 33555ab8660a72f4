#!/usr/bin/env bash
# The main job on the built-in collection: BM25, DPR and TASER trained, mined for, retrained and
# compared. Arguments are passed on to `taser quickstart`, for example --gin.OUTPUT_DIR=elsewhere.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"
use_environment ""
exec taser quickstart "$@"
