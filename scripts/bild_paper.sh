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

# the layers of the target that a drafter lacks, from the cards of the drafter and of those that it was cut from
skipped() {
    "$bin/python" - "$out/$1" "$target" <<'PYTHON'
import re
import sys
from pathlib import Path

folder, target = Path(sys.argv[1]), sys.argv[2]


def layers(folder):
    card = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"\d+ of the (\d+) layers of (.+?): ([\d, ]+), left by", card)
    if found is None:
        sys.exit(f"expected the layers of {folder.name} in its README.md: align it with --layers")
    count, base, kept = int(found[1]), found[2], [int(layer) for layer in found[3].split(",")]
    if base == target or Path(base) == Path(target):
        return count, kept
    count, below = layers(folder.parent / Path(base).name)
    return count, [below[layer] for layer in kept]


count, kept = layers(folder)
print(",".join(str(layer) for layer in range(count) if layer not in kept))
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
