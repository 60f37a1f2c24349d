#!/usr/bin/env bash
# A short profile, solve and validate on a CUDA device. Usage: scripts/gpu_check.sh BIN_FOLDER [OUTPUT_FOLDER]
set -euo pipefail
bin="$1"
out="${2:-gpu-check}"
mkdir -p "$out"
"$bin/hsdopt" models fetch
"$bin/hsdopt" profile --target smollm2 --draft lookup --draft smollm2-skip3 --prompts mixed --max-prompts 6 \
    --max-new-tokens 48 --repeats 3 --device cuda --resume -o "$out/profile.json"
"$bin/hsdopt" solve "$out/profile.json" -o "$out/plan.json"
"$bin/hsdopt" validate "$out/profile.json" --suite quick --max-prompts 4 --repeats 2 --device cuda --resume -o "$out/report"
