#!/usr/bin/env bash
# The built-in ladder: drafters of SmolLM2-135M-Instruct with 10, 4 and 2 of its 30 layers (or what LAYERS says), each cut
# from the one before and trained on what the target writes after the built-in training prompts, which no evaluation
# workload contains, and after 2,000 prompts of its own.
# Stopped in the middle, it continues where it was. MINUTES is the training time of each drafter; the target's outputs
# and the choice of layers come on top: on one CPU thread some 25 minutes with the sizes below, and 15 for the layers.
# Usage: scripts/align_builtin.sh BIN_FOLDER OUTPUT_FOLDER [MINUTES] [DEVICE] [MORE OPTIONS OF hsdopt align ...]
set -euo pipefail
bin="$1"
out="$2"
minutes="${3:-60}"
device="${4:-cpu}"
shift "$(($# < 4 ? $# : 4))"
mkdir -p "$out"

# the same calibration for all three: a greedy output, sampled ones, and spans continued, for every training prompt, and
# a greedy output for every prompt of the target's own
data=(--prompts training --samples "${SAMPLES:-8}" --temperature 0.8 --spans "${SPANS:-4}"
    --own-prompts "${OWN_PROMPTS:-2000}" --max-new-tokens "${NEW_TOKENS:-96}" --soft 1 --calibration "$out/calibration.jsonl")
previous=()
for layers in ${LAYERS:-10 4 2}; do
    name="layers-$layers"
    if [ ! -e "$out/$name" ]; then
        head=()
        if [ "$layers" -le 12 ]; then
            head=(--head-tokens 16384) # of a short stack the whole head would be most of a pass
        fi
        "$bin/hsdopt" align --target smollm2 "${previous[@]}" --layers "$layers" --drop-group 2 --choice-tokens 512 \
            "${data[@]}" "${head[@]}" --minutes "$minutes" --patience 1000 --evaluate-every 50 --device "$device" \
            --resume "$@" -o "$out/$name"
    fi
    previous=(--small "$out/$name")
done
