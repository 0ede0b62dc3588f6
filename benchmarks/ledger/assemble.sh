#!/usr/bin/env bash
# assemble.sh SITE.TAR.XZ VENV OUT: the harness as it is carried, into OUT/call1 and OUT/call2. See README.md.
set -euo pipefail
site=$1 venv=$2 out=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
models=pins/models
mkdir -p "$work"/{once,extra,project/{benchmarks,stages,tests/support,$models/trained-tiny}} "$out"/{call1,call2}
cp "$root/benchmarks/stage_table/sitecustomize.py" "$work/once"
packages=("$venv"/lib/python3*/site-packages)
cp -r "${packages[0]}"/{docker,uv,rich,pygments,markdown_it,mdurl} "$work/extra" # the first two are imported, not used
"$venv/bin/uv" pip install -q --no-deps --target "$work/extra" --python-version 3.12 --python-platform x86_64-manylinux_2_35 \
    mistral-common==1.13.1 pycountry==26.2.16 # what vLLM's parsers of tool calls import
rm -r "$work"/extra/mistral_common/data "$work"/extra/pycountry/locales
cp -r "$root/src" "$work/project"
cp -r "$root"/benchmarks/{ledger,scripted_tiny,trained_tiny} "$work/project/benchmarks"
rm -r "$work/project/benchmarks/ledger/data"
cp -r "$root/tests/support/sabotage" "$work/project/tests/support"
cp "$root/$models"/trained-tiny{.yaml,.lock} "$work/project/$models"
cp "$root/$models"/trained-tiny/*.{json,jinja} "$work/project/$models/trained-tiny"
find "$work" -name __pycache__ -prune -exec rm -r {} +
tar cJf "$out/call1/harness.tar.xz" -C "$work" once extra project
cp "$out/call1/harness.tar.xz" "$out/call2"
XZ_OPT=-T0 tar cJf "$out/call2/trained.tar.xz" -C "$root/$models/trained-tiny" model.safetensors
cp "$root"/benchmarks/ledger/call1.sh "$out/call1"
cp "$root"/benchmarks/ledger/call2.sh "$out/call2"
ln -f "$site" "$out/call1/site.tar.xz"
du -sh "$out"/call*
