"""Whether the files of a finished checkpoint are those that its record names, without reading all of them each time.

Files up to SMALL bytes (config, tokenizer, chat template, index) are hashed. A larger one is hashed once, or when its
time has changed; what was seen then is noted in the folder. After that, size, time and SAMPLES spans of its bytes have
to be those noted. So a change of a large file by somebody who set its time back is found only where a sample lies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.layout import NOTED, RECORD
from sparkpin.checkpoint.verify import bad
from sparkpin.core.errors import CheckpointError
from sparkpin.core.files import sha256_file, write_json

SMALL = 32 << 20
SAMPLES, SPAN = 16, 64 << 10  # of a large file, evenly over it, the first and the last bytes among them


def check_content(folder: Path, hashing: Callable[[Path], object] | None = None, *, deep: bool = False) -> None:
    """CheckpointError for the first file that is not the recorded one. The folder is one that `is_complete`.

    hashing: is told each large file that is about to be hashed as a whole; None: those wait for a `promote`.
    deep: hash every file, whatever was noted.
    """
    noted = read_notes(folder)
    seen = dict(noted)
    for name, row in json.loads((folder / RECORD).read_bytes())["files"].items():
        path = folder / name
        is_large = row["size"] > SMALL
        if is_large and not deep and (known := noted.get(name)) and known["mtime"] == path.stat().st_mtime_ns:
            if known["samples"] != samples(path):
                raise changed(path, f"{SAMPLES} samples of its bytes are not those of the file that was hashed")
        elif not is_large or hashing:
            if is_large and hashing:
                hashing(path)
            if sha256_file(path)[0] != row["sha256"]:
                raise changed(path, f"its SHA-256 is not {row['sha256']}, which {RECORD} names")
            if is_large:
                seen[name] = note(path)
    if seen != noted:
        write_json(folder / NOTED, seen)


def note_content(folder: Path) -> None:
    """For a folder whose bytes were hashed as they were written."""
    rows = json.loads((folder / RECORD).read_bytes())["files"]
    if notes := {name: note(folder / name) for name, row in rows.items() if row["size"] > SMALL}:
        write_json(folder / NOTED, notes)


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """Nothing where there are none, or where they are damaged: then all is hashed again."""
    try:
        notes = json.loads((folder / NOTED).read_bytes())
        return {name: {"mtime": row["mtime"], "samples": row["samples"]} for name, row in notes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def note(path: Path) -> dict[str, Any]:
    return {"mtime": path.stat().st_mtime_ns, "samples": samples(path)}


def samples(path: Path) -> str:
    """SHA-256 (hex) of the sampled bytes."""
    digest, last = hashlib.sha256(), path.stat().st_size - SPAN
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            digest.update(file.read(SPAN))
    return digest.hexdigest()


def changed(path: Path, cause: str) -> CheckpointError:
    how = "small files are held against their hash, large ones against size, time and samples (promote --deep: all)"
    return bad(path, f"{cause}; {how}")
