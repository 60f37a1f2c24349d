#!/usr/bin/env bash
# Quality against latency of Big Little Decoder on the built-in models: 12 settings with each of two small models,
# beside rejection sampling and the target alone. Stopped in the middle, it continues where it was.
# Usage: scripts/bild_frontier.sh BIN_FOLDER OUTPUT_FOLDER [PROMPTS [TOKENS [FALLBACKS [ROLLBACKS]]]]
set -euo pipefail
bin="$1"
out="$2"
prompts="${3:-4}"
tokens="${4:-48}"
fallbacks="${5:-0.3,0.5,0.7,0.9}"
rollbacks="${6:-1.5,3,6}"
mkdir -p "$out"

"$bin/hsdopt" models fetch
if [ ! -e "$out/profile.json" ]; then
    "$bin/hsdopt" profile --target smollm2 --draft smollm2-int4 --draft smollm2-skip3 --prompts mixed \
        --max-prompts "$prompts" --max-new-tokens "$tokens" --repeats 2 --resume -o "$out/profile.json"
fi
"$bin/hsdopt" quality "$out/profile.json" --small smollm2-skip3 --small smollm2-int4 \
    --fallback "$fallbacks" --rollback "$rollbacks" --max-prompts "$prompts" --predicted --resume -o "$out"
