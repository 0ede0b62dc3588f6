#!/usr/bin/env bash
# On the same machine, at once after call1.sh: call2.sh [SECONDS [CALL [NAME...]]]. Trained weights: the ledger, and proofs.
set -u
here=$(cd "$(dirname "$0")" && pwd) seconds=${1:-470}
OUT=$(realpath "$OUT")
export OUT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
date -u
ls /tmp/site/site/vllm/version.py || exit
rm -rf /tmp/carried /tmp/models/{bf16,base,mtp,draft}
mkdir -p /tmp/carried
tar xJf "$here/harness.tar.xz" -C /tmp/carried
tar xJf "$here/trained.tar.xz" -C /tmp/carried/project/pins/models/trained-tiny
cd /tmp/carried/project || exit
export PYTHONPATH=/tmp/carried/once:/tmp/site/site:$PWD:$PWD/src:/tmp/carried/extra
ledger=benchmarks/ledger
python3 $ledger/models.py "$PWD" /tmp/models >"$OUT/models.log" 2>&1 &
timeout -s KILL $((seconds + 40)) python3 $ledger/ledger.py "$OUT" --call "${2:-2}" --seconds "$seconds" --at-once 16 "${@:3}"
date -u
ls -l "$OUT" /tmp/models
