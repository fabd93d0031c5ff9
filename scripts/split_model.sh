#!/usr/bin/env bash
# Cut a model folder into files small enough to travel, for `gpu_train.sh --model-parts`.
#
#   scripts/split_model.sh MODEL_FOLDER PARTS_FOLDER [MIB_PER_PART]
#
# Writes model.part-000, model.part-001, ... (a tar archive end to end) and SHA256SUMS.
set -euo pipefail

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1 parts=$2 mib=${3:-14}

if [ ! -f "$model/config.json" ]; then
    echo "error: $model is not a model folder: it has no config.json" >&2
    exit 2
fi
if compgen -G "$parts/model.part-*" >/dev/null; then
    echo "error: $parts holds parts already" >&2
    exit 2
fi
mkdir -p "$parts"
# -h: a model store may keep its files elsewhere, behind links.
tar -C "$model" --sort=name -h -cf - . | split -b "${mib}M" -d -a 3 - "$parts/model.part-"
(cd "$parts" && sha256sum model.part-* >SHA256SUMS)
echo "$(wc -l <"$parts/SHA256SUMS") parts in $parts"
