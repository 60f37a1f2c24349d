#!/usr/bin/env bash
# A short profile, solve and validate on a CUDA device, broken off after five minutes: with the tests before it,
# `make gpu-check` stays under eight. Usage: scripts/gpu_check.sh BIN_FOLDER [OUTPUT_FOLDER]
set -euo pipefail
bin="$1"
out="${2:-gpu-check}"
limit=300
mkdir -p "$out"
"$bin/hsdopt" models fetch # not timed: a download the first time
SECONDS=0

run() {
    local left=$((limit - SECONDS))
    if [ "$left" -le 0 ] || ! timeout "$left" "$bin/hsdopt" "$@"; then
        echo "expected '$1' to succeed within $limit s of the first command; $SECONDS s have passed" >&2
        exit 1
    fi
}

run profile --target smollm2 --draft lookup --draft smollm2-skip3 --prompts mixed --max-prompts 6 \
    --max-new-tokens 48 --repeats 3 --device cuda --force -o "$out/profile.json"
run solve "$out/profile.json" -o "$out/plan.json"
run validate "$out/profile.json" --suite quick --no-baselines --max-prompts 4 --repeats 2 --device cuda \
    --force -o "$out/report"
echo "profile, solve and validate took $SECONDS s of at most $limit"
