#!/usr/bin/env bash
# Profiles the built-in models twice, one after the other, and compares the two.
# Usage: scripts/reproducible.sh BIN_FOLDER OUTPUT_FOLDER
set -euo pipefail
bin="$1"
out="$2"
mkdir -p "$out"
for turn in first second; do
    if [ ! -e "$out/$turn.json" ]; then
        "$bin/hsdopt" profile --target smollm2 --draft lookup --draft smollm2-int8 --draft smollm2-int4 \
            --draft smollm2-skip3 --prompts mixed --max-new-tokens 48 --repeats 6 --resume -o "$out/$turn.json"
    fi
done
"$bin/python" scripts/reproducible.py "$out/first.json" "$out/second.json"
