#!/usr/bin/env bash
# The drafters that align_builtin.sh trained, beside lookup and an int4 copy of the target: profiled on the profiling
# prompts of a workload (WORKLOAD, `mixed` if not set), solved, and validated on 6 held-out prompts. They are there as
# int8 copies too, and the middle one as an int4 copy: rounded to int4, the largest loses half of its acceptance.
# Stopped in the middle, it continues where it was.
# Usage: scripts/validate_ladder.sh BIN_FOLDER DRAFTERS_FOLDER OUTPUT_FOLDER
set -euo pipefail
bin="$1"
ladder="$(realpath "$2")"
out="$3"
workload="${WORKLOAD:-mixed}"
drafts=(--draft lookup --draft smollm2-int4)
for layers in 10 4 2; do
    drafts+=(--draft "layers-$layers=$ladder/layers-$layers")
done
for layers in 10 4 2; do
    drafts+=(--draft "layers-$layers-int8=int8@$ladder/layers-$layers")
done
drafts+=(--draft "layers-4-int4=int4@$ladder/layers-4")

mkdir -p "$out"
"$bin/hsdopt" profile --target smollm2 "${drafts[@]}" --prompts "$workload" --max-new-tokens 48 --repeats 6 --resume \
    -o "$out/profile.json"
"$bin/hsdopt" solve "$out/profile.json" -o "$out/plan.json"
if [ ! -e "$out/report.json" ]; then
    "$bin/hsdopt" validate "$out/profile.json" --suite standard --max-prompts 6 --repeats 2 --seed 0 --resume -o "$out"
fi
"$bin/python" scripts/summarise.py "$workload, trained drafters=$out"
