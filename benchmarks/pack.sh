#!/usr/bin/env bash
# What a benchmark's tables are made of, in one small file: the finished rows of all seeds, with their values by
# query, tables and configurations. So a seed outlives its machine, and tables join the seeds of several machines:
#
#     benchmarks/pack.sh OUTPUT_DIR FILE.tar.xz
#     tar -xJf FILE.tar.xz --skip-old-files -C OUTPUT_DIR
#
# The second line unpacks it on another machine, beside the seeds that are there; the benchmark's table.py or claims.py
# then reads both. Seeds whose queries differ are refused there.
set -euo pipefail
if [ $# -ne 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
packed=$(realpath -m "$2")
cd "$1"
mapfile -t folders < <(find . -type d -name per_query -prune -printf '%h\n')
if [ ${#folders[@]} -eq 0 ]; then
  echo "error: no row in $1 has finished" >&2
  exit 1
fi
for folder in "${folders[@]}"; do
  find "$folder"/{results,per_query} -type f ! -name '.*'
  find "$folder" -maxdepth 1 \( -name config.gin -o -name '*.csv' \)
  # MoMA's shares of attention.
  find "$folder" -maxdepth 2 -path '*/stages/*-distil.json'
done | LC_ALL=C sort |
  XZ_OPT=-9 tar -cJf "$packed.partial" --mtime=@0 --owner=0 --group=0 --numeric-owner -T -
mv "$packed.partial" "$packed"
