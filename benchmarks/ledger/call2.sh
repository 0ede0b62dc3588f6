#!/usr/bin/env bash
# On the same machine, at once after call1.sh: call2.sh PROJECT [SECONDS]. Trained weights: the ledger, and proofs.
# PROJECT has src/ and pins/ with pins/models/trained-tiny and its weights.
set -u
here=$(cd "$(dirname "$0")" && pwd) project=$(cd "$1" && pwd) seconds=${2:-470}
OUT=$(realpath "$OUT")
export OUT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
date -u
ls /tmp/site/site/vllm/version.py || exit
rm -rf /tmp/carried/project /tmp/models/{bf16,base,mtp,draft}
tar xJf "$here/harness.tar.xz" -C /tmp/carried
export PYTHONPATH=/tmp/carried/once:/tmp/site/site:/tmp/carried/extra
cd /tmp/carried/project || exit
ledger=benchmarks/ledger
PYTHONPATH=$PWD:$project/src:$PYTHONPATH python3 $ledger/models.py "$project" /tmp/models >"$OUT/models.log" 2>&1 &
PYTHONPATH=$PWD/src:$PYTHONPATH timeout -s KILL $((seconds + 40)) python3 $ledger/ledger.py "$OUT" --call 2 --seconds "$seconds" --at-once 16
date -u
ls -l "$OUT" /tmp/models
