"""Runs inside a build step: make the venv, or a tree with exactly the wheels of a folder; the same bytes each time.

usage: install.py                  make the empty venv /opt/vllm
       install.py WHEELS ROOT      install WHEELS (wheels and requirements.txt: name==version with hash) for the venv,
                                   below ROOT: the tree that becomes a layer
"""

from __future__ import annotations

import compileall
import csv
import functools
import os
import py_compile
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

VENV = Path("/opt/vllm")
UV = [str(Path(__file__).with_name("uv")), "--offline", "--no-config", "--no-cache", "--no-progress", "--quiet"]
# hardlink: out of uv's own temporary folder, which goes when it ends; a copy would write every byte twice.
EXACTLY = ["--no-index", "--no-deps", "--require-hashes", "--link-mode", "hardlink"]


def make_venv() -> None:
    subprocess.run([*UV, "venv", "--python", "/usr/bin/python3", VENV], check=True)
    (VENV / ".lock").unlink(missing_ok=True)


def install(wheels: Path, root: str) -> None:
    prefix = Path(f"{root}{VENV}")
    subprocess.run(
        [
            *(*UV, "pip", "install", *EXACTLY),
            *("--python", VENV / "bin/python"),
            *("--prefix", prefix),
            *("--find-links", wheels),
            *("--requirements", wheels / "requirements.txt"),
        ],
        check=True,
    )
    (prefix / ".lock").unlink(missing_ok=True)
    sources = [
        source for info in sorted(prefix.glob("lib/python3*/site-packages/*.dist-info")) for source in tidy(info)
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(functools.partial(compile_file, root), sources, chunksize=64))


def tidy(info: Path) -> list[Path]:
    """Remove uv's note of when the wheel file changed, and its line in RECORD; return the distribution's modules."""
    record = info / "RECORD"
    note = info / "uv_cache.json"
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    if note.exists():
        note.unlink()
        lines = [line for line in lines if not line.startswith(f"{info.name}/uv_cache.json,")]
        record.write_text("".join(lines), encoding="utf-8")
    paths = [info.parent / row[0] for row in csv.reader(lines)]
    return [path for path in paths if path.suffix == ".py" and path.is_file()]


def compile_file(root: str, source: Path) -> None:
    """Bytecode that is checked against nothing: its header holds the source's hash and no time."""
    compileall.compile_file(
        source,
        quiet=2,  # some distributions ship files for other Pythons, which do not compile
        force=True,
        stripdir=root,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


if __name__ == "__main__":
    os.umask(0o022)
    if len(sys.argv) == 1:
        make_venv()
    else:
        install(Path(sys.argv[1]), sys.argv[2])
