#!/usr/bin/env bash
# What notebooks/big_little_decoder.ipynb reads about the built-in models. OUTPUT_FOLDER is the one that align_builtin.sh
# filled; into it go a profile of the target with its int4 copy and every drafter, trained and untrained, the quality of
# Big Little Decoder over a grid of thresholds and without either of its policies, and a copy of the target trained
# jointly with its exits for MINUTES (0, the default: none, and the exits are the target's own).
# Stopped in the middle, it continues where it was. Then: HSDOPT_LADDER=OUTPUT_FOLDER jupyter lab notebooks
# Usage: scripts/bild_paper.sh BIN_FOLDER OUTPUT_FOLDER [PROMPTS [TOKENS [MINUTES [DEVICE]]]]
set -euo pipefail
bin="$1"
out="$(realpath "$2")"
prompts="${3:-8}"
tokens="${4:-48}"
minutes="${5:-0}"
device="${6:-cpu}"
target="${TARGET:-smollm2}"
read -ra drafters <<<"${DRAFTERS:-layers-10 layers-4 layers-2}"
mkdir -p "$out/bild"

# the layers of the target that a drafter lacks
skipped() {
    "$bin/python" - "$out/$1/alignment.json" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    without = json.load(file)["without"]
if without is None:
    sys.exit(f"expected a drafter that was cut from the target; got {sys.argv[1]}")
print(",".join(str(layer) for layer in without))
PYTHON
}

quality=()
drafts=(--draft "int4=int4@$target")
for name in "${drafters[@]}"; do
    without="$(skipped "$name")"
    drafts+=(--draft "$name=$out/$name" --draft "$name-unaligned=skip:$without@$target")
    for small in "$name" "$name-unaligned"; do
        quality+=(--small "$small")
        for stride in 2 5; do
            quality+=(--plan "bild(\"$target\", $small, rollback=3, stride=$stride)")
        done
    done
done

if [ "$minutes" != 0 ] && [ ! -e "$out/joint" ]; then
    "$bin/hsdopt" align --target "$target" --exits "${EXITS:-3,7,15}" --prompts "${TRAINING:-training}" \
        --calibration "$out/calibration-joint.jsonl" --minutes "$minutes" --patience 1000 --device "$device" --resume \
        -o "$out/joint"
fi
if [ ! -e "$out/bild/profile.json" ]; then
    "$bin/hsdopt" profile --target "$target" "${drafts[@]}" --prompts "${WORKLOAD:-mixed}" --max-new-tokens "$tokens" \
        --max-prompts "${PROFILED:-16}" --repeats 3 --device "$device" --resume -o "$out/bild/profile.json"
fi
"$bin/hsdopt" quality "$out/bild/profile.json" --small int4 "${quality[@]}" --fallback "${FALLBACKS:-0.3,0.5,0.7,0.9}" \
    --rollback "${ROLLBACKS:-1.5,3,6,inf}" --max-prompts "$prompts" --resume -o "$out/bild"
