#!/usr/bin/env bash
# Train, calibrate and evaluate a drafter in one go, within a time budget and without network.
#
#   scripts/gpu_train.sh --model-parts DIR --prompts FILE --eval-prompts FILE --out DIR [options]
#                        [-- arguments of `dspark train` that go last]
#
#   --model-parts DIR    what split_model.sh wrote: model.part-* and SHA256SUMS
#   --model DIR          instead: a Hugging Face folder as it is
#   --prompts FILE       JSONL; every twentieth is kept for calibration, the target answers the rest
#   --eval-prompts FILE  JSONL; none of them may be among the prompts
#   --out DIR            artefacts, every file at most 15 MB; default $OUT
#   --work DIR           model, responses, features, checkpoints; default a temporary folder
#   --budget-s N         for everything together; default 570
#   --device NAME        default cuda
#   --samples N          responses per prompt and temperature above 0; default 3
#   --requests N         responses at once; default 384
#   --max-new-tokens N   per response; default 320
#   --python FILE        default $PYTHON, else python3
#
# Every phase has a share of the budget and ends with what it has: responses stop being begun, the
# learning rate falls by the clock, a calibration or evaluation that is late is left out. The
# drafter so far is always written. Afterwards: cd OUT && ./join.sh. Exit status 0 if there is a
# drafter, 1 if there is none, 2 for a wrong argument.
set -euo pipefail

usage() {
    sed -n '2,25s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

parts='' model='' prompts='' eval_prompts='' out=${OUT:-} work='' budget_s=570 device=cuda
samples=3 requests=384 max_new_tokens=320 python=${PYTHON:-python3}
while [ $# -gt 0 ]; do
    [ "$1" = -- ] && { shift; break; }
    [ $# -ge 2 ] || usage
    case $1 in
    --model-parts) parts=$2 ;;
    --model) model=$2 ;;
    --prompts) prompts=$2 ;;
    --eval-prompts) eval_prompts=$2 ;;
    --out) out=$2 ;;
    --work) work=$2 ;;
    --budget-s) budget_s=$2 ;;
    --device) device=$2 ;;
    --samples) samples=$2 ;;
    --requests) requests=$2 ;;
    --max-new-tokens) max_new_tokens=$2 ;;
    --python) python=$2 ;;
    *) usage ;;
    esac
    shift 2
done
train_arguments=("$@")

for given in "$parts$model" "$prompts" "$eval_prompts" "$out"; do
    [ -n "$given" ] || usage
done
for file in "$prompts" "$eval_prompts"; do
    [ -s "$file" ] || { echo "error: no prompts in $file" >&2; exit 2; }
done
started=$SECONDS
repository=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "$work" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$out/logs" "$work"
out=$(cd "$out" && pwd) work=$(cd "$work" && pwd)
prompts=$(realpath "$prompts") eval_prompts=$(realpath "$eval_prompts")
if [ -n "$model" ]; then model=$(realpath "$model"); fi
if [ -n "$parts" ]; then parts=$(realpath "$parts"); fi
cd "$repository"

left_s() { echo $((budget_s - (SECONDS - started))); }
share_s() { echo $((budget_s * $1 / 100)); }

# phase NAME SECONDS COMMAND...: never fails; what a late command has written is used.
phase() {
    local name=$1 seconds=$2 begun=$SECONDS status=0
    shift 2
    if [ "$seconds" -lt 1 ]; then
        echo "$name: left out, no time"
        return
    fi
    # SIGTERM is a clean end for `dspark`: files are whole or absent.
    timeout --kill-after=10 "$seconds" "$@" >"$out/logs/$name.log" 2>&1 || status=$?
    echo "$name: status $status after $((SECONDS - begun)) s"
}

# --- the model -----------------------------------------------------------------------------------
if [ -n "$parts" ]; then
    (cd "$parts" && sha256sum --check --strict --quiet SHA256SUMS) || {
        echo "error: the parts in $parts are damaged or incomplete" >&2
        exit 2
    }
    model=$work/model
    mkdir -p "$model"
    # The list, not the folder, says which parts there are and in which order.
    (cd "$parts" && cut -c 67- SHA256SUMS | xargs cat) | tar -C "$model" -xf -
fi
[ -f "$model/config.json" ] || { echo "error: $model has no config.json" >&2; exit 2; }

# --- prompts: never the same ones for training and calibration --------------------------------------
grep -v '^[[:space:]]*$' "$prompts" | awk -v calibration="$work/calibration.jsonl" \
    -v training="$work/training.jsonl" '{ print > (NR % 20 == 0 ? calibration : training) }'

# --- responses, then training ---------------------------------------------------------------------
drafter=$work/drafter
train=(
    "$python" -m dspark train --target "$model" --prompts "$work/training.jsonl"
    --work "$work/train" --output "$drafter" --device "$device" --max-length 768
    --samples "$samples" --max-new-tokens "$max_new_tokens"
    --requests "$requests" --kv-tokens $((requests * 640))
    --layers 2 --gamma 6 --markov-rank 128 --draft-vocab 8192
    --steps 6000 --sequences-per-step 64 --anchors 64 --learning-rate 1e-3
    --evaluate-every 1000 --checkpoint-every 1000 --log-every 20
)
if [[ $device == cuda* ]]; then
    train+=(--precision bf16 --compile)
fi
train+=("${train_arguments[@]}")

# Responses in flight are finished after their budget: the limit leaves them time.
phase responses "$(share_s 45)" "${train[@]}" --responses-only --generate-budget-s "$(share_s 28)"
# Training starts late by loading target and data and compiling; the rest is for what comes after.
train_s=$(($(left_s) - $(share_s 34)))
# --generate-budget-s 0: no response is begun any more.
phase train "$((train_s + $(share_s 12)))" \
    "${train[@]}" --generate-budget-s 0 --budget-s "$((train_s > 1 ? train_s : 1))"

# --- calibration and evaluation -------------------------------------------------------------------
if [ -f "$drafter/model.safetensors" ]; then
    phase calibrate "$(($(left_s) * 45 / 100))" "$python" -m dspark calibrate \
        --target "$model" --drafter "$drafter" --prompts "$work/calibration.jsonl" \
        --concurrency 32
    phase eval "$(($(left_s) * 85 / 100))" "$python" -m dspark eval --prompts "$eval_prompts" \
        --target "$model" --drafter "$drafter" --device "$device" --json "$out/eval.json"
fi

# --- artefacts ------------------------------------------------------------------------------------
cp "$work"/train/curve.* "$out" 2>/dev/null || echo "no learning curve"
things=()
[ -d "$drafter" ] && things+=(drafter)
[ -f "$work/train/responses.jsonl" ] && things+=(train/responses.jsonl)
if [ ${#things[@]} -gt 0 ]; then
    tar -C "$work" -czf - "${things[@]}" | split -b 14M -d -a 3 - "$out/artefacts.part-"
fi
cat >"$out/join.sh" <<'JOIN'
#!/usr/bin/env bash
# Check the files of this folder and unpack the drafter and the responses here.
set -euo pipefail
cd "$(dirname "$0")"
sha256sum --check --strict --quiet SHA256SUMS
cat artefacts.part-* | tar -xzf -
JOIN
chmod +x "$out/join.sh"
find "$out" -type f -size +15000000c -print | while read -r large; do
    gzip -9 "$large" # a log out of hand
done
(cd "$out" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
echo "artefacts in $out after $((SECONDS - started)) s"
[ -f "$drafter/model.safetensors" ] || { echo "error: no drafter; see $out/logs" >&2; exit 1; }
