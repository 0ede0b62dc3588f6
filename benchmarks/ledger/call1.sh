#!/usr/bin/env bash
# On the GPU machine, in the folder that was carried: call1.sh [SECONDS [CALL [NAME...]]]. Random weights: proofs, planted faults, and which
# caches start. It unpacks vLLM to /tmp/site and fills /tmp/cache for call2.sh.
set -u
here=$(cd "$(dirname "$0")" && pwd) seconds=${1:-430}
OUT=$(realpath "$OUT")
export OUT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
date -u
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
mkdir -p /tmp/site /tmp/carried /tmp/models /tmp/cache
tar xJf "$here/site.tar.xz" -C /tmp/site
python3 -m compileall -q -j 16 /tmp/site/site >/dev/null 2>&1 # or each server compiles it for itself
tar xJf "$here/harness.tar.xz" -C /tmp/carried
export PYTHONPATH=/tmp/carried/once:/tmp/site/site:/tmp/carried/project/src:/tmp/carried/extra
cd /tmp/carried/project || exit
ledger=benchmarks/ledger
python3 -c 'import sys; from pathlib import Path; from benchmarks.scripted_tiny.repositories import generate_plain
generate_plain(Path(sys.argv[1]), seed=7, positions=16384)' /tmp/scripted
python3 $ledger/random_shape.py /tmp/scripted /tmp/models/random
python3 $ledger/random_shape.py /tmp/scripted /tmp/models/dense dense
date -u
timeout -s KILL $((seconds + 40)) python3 $ledger/ledger.py "$OUT" --call "${2:-1}" --seconds "$seconds" --at-once 10 "${@:3}"
date -u
ls -l "$OUT"
