#!/usr/bin/env bash
# The main path on the built-in models: fetch, profile, solve, validate on `mixed`. Each command is shown.
# Usage: scripts/demo.sh BIN_FOLDER OUTPUT_FOLDER
set -euo pipefail
bin="$1"
out="$2"
mkdir -p "$out"

show() {
    printf '\n$ hsdopt %s\n' "$*"
    "$bin/hsdopt" "$@"
}

show models fetch
show profile --target smollm2 --draft lookup --draft smollm2-int8 --draft smollm2-int4 --draft smollm2-skip3 \
    --prompts mixed --max-prompts 12 --max-new-tokens 48 --repeats 4 --resume -o "$out/profile.json"
show solve "$out/profile.json" -o "$out/plan.json"
show validate "$out/profile.json" --suite standard --no-baselines --max-prompts 6 --repeats 2 --budget 6m --resume -o "$out/report"

printf '\nreport: %s\nplots:  %s\n' "$out/report/report.html" "$(ls "$out"/report/*.png | tr '\n' ' ')"
