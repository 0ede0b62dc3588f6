"""Whether the files of a finished checkpoint are those that its record names, without reading all of them each time.

Files up to SMALL bytes (config, tokenizer, chat template, index) are hashed. A larger one is hashed once, or when its
time has changed; what was seen then is noted in the folder. After that, size, time and SAMPLES spans of its bytes have
to be those noted. So a change of a large file by somebody who set its time back is found only where a sample lies, and
so is any change until somebody hashes: only `promote` does. A large file without a note has its size alone till then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkpin.core.errors import CheckpointError
from sparkpin.core.files import sha256_file, write_json

RECORD = "sparkpin.json"
"""How a checkpoint was made."""

JOURNAL = "journal"
"""While it is made: the shards that are finished."""

IMPORTED = ".imported"
"""An empty file in a checkpoint that a bundle brought."""

NOTED = ".noted.json"
"""Times and samples of the large files of a checkpoint, as they were when these were hashed."""

OWN = (RECORD, JOURNAL, IMPORTED, NOTED)
"""Files of a checkpoint that are not the model's. A base that has such a file, as a checkpoint of ours that was
published has, does not lend it: it would say of another checkpoint how it was made."""

REBUILD = "delete this folder and run `invoke build --checkpoint-only` with the same options, which builds it again"

SMALL = 32 << 20
SAMPLES, SPAN = 16, 64 << 10  # of a large file, evenly over it, the first and the last bytes among them


def is_made_here(folder: Path, key: str) -> bool:
    return is_complete(folder, key) and not is_imported(folder)


def is_imported(folder: Path) -> bool:
    return (folder / IMPORTED).exists()


def is_complete(folder: Path, key: str) -> bool:
    """Cheap: the record is of this key and names every file with the size that it has. Bytes: `verify_checkpoint`."""
    try:
        made = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if made["key"] != key:
            return False
        seen = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        del seen[RECORD]
        for own in (IMPORTED, NOTED):
            seen.pop(own, None)
        return bool(seen == {name: entry["size"] for name, entry in made["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_content(folder: Path, hashing: Callable[[Path], object] | None = None, *, deep: bool = False) -> list[Path]:
    """The files that were hashed. CheckpointError for the first that is not the recorded one. The folder is one that
    `is_complete`.

    hashing: is told each large file that is about to be hashed as a whole; None: those wait for a `promote`.
    deep: hash every file, whatever was noted.
    """
    noted = read_notes(folder)
    seen, hashed = dict(noted), []
    for name, row in json.loads((folder / RECORD).read_bytes())["files"].items():
        path = folder / name
        if not isinstance(row.get("sha256"), str):
            seen = row.get("sha256", "(missing)")
            raise bad(folder / RECORD, f"files[{name!r}].sha256: saw {seen!r}, wanted the SHA-256 of that file")
        is_large = row["size"] > SMALL
        known = noted.get(name) if is_large and not deep else None
        if known and known["samples"] != samples(path):
            raise changed(path, f"{SAMPLES} samples of its bytes are not those of the file that was hashed")
        if known and known["mtime"] == path.stat().st_mtime_ns:
            continue
        if not is_large or hashing:
            if is_large and hashing:
                hashing(path)
            if sha256_file(path)[0] != row["sha256"]:
                raise changed(path, f"its SHA-256 is not {row['sha256']}, which {RECORD} names")
            hashed.append(path)
            if is_large:
                seen[name] = note(path)
    if seen != noted:
        write_json(folder / NOTED, seen)
    return hashed


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


def bad(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path}: {cause}", next_step=REBUILD)
