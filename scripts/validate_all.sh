#!/usr/bin/env bash
# The three built-in workloads: profiled on all their profiling prompts, validated on 6 held-out prompts each; greedy,
# or at the temperature that the variable TEMPERATURE says.
# Stopped in the middle, it continues where it was.
# Usage: scripts/validate_all.sh BIN_FOLDER OUTPUT_FOLDER [WORKLOAD ...]
set -euo pipefail
bin="$1"
out="$2"
shift 2
pairs=()
workloads=("$@")
if [ "${#workloads[@]}" -eq 0 ]; then
    workloads=(mixed copy chat)
fi

for workload in "${workloads[@]}"; do
    mkdir -p "$out/$workload"
    "$bin/hsdopt" profile --target smollm2 --draft lookup --draft smollm2-int8 --draft smollm2-int4 \
        --draft smollm2-skip3 --prompts "$workload" --temperature "${TEMPERATURE:-0}" --max-new-tokens 48 --repeats 6 --resume \
        -o "$out/$workload/profile.json"
    "$bin/hsdopt" solve "$out/$workload/profile.json" -o "$out/$workload/plan.json"
    if [ ! -e "$out/$workload/report.json" ]; then
        "$bin/hsdopt" validate "$out/$workload/profile.json" --suite standard --max-prompts 6 --repeats 2 \
            --seed 0 --resume -o "$out/$workload"
    fi
done
for workload in "${workloads[@]}"; do
    pairs+=("$workload=$out/$workload")
done
"$bin/python" scripts/summarise.py "${pairs[@]}"
