"""Takes a checkpoint in, or looks at one, in a folder of another machine: runs there in a short container, with the
files that it imports beside it and the standard library alone.

Reads a line of JSON, the order, from standard input, and writes lines of JSON to standard output; "said" is for people,
"failed" is the last. Of a checkpoint to be received it writes the rows that it wants: how many bytes of each file are
there, and their SHA-256. For each row come a line with the offset from which the file is sent, and its bytes. What is
cut off stays as a partial file, from which a later run goes on.

The record is removed before the first change, and written last: without it nothing here is a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from sparkpin.checkpoint.content import RECORD, SMALL, TABLE, Hashes, check_content, is_complete
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, DiskError

Rows = Mapping[str, Mapping[str, Any]]
ROWS = "files"  # of the record: file -> its size and SHA-256


def main() -> None:
    folder, data = Path(sys.argv[1]), sys.stdin.buffer
    try:
        order = json.loads(line_of(data))
        receive(folder, order, data) if "record" in order else look(folder, order)
    except EOFError:  # the sender has gone
        pass
    except (OSError, DiskError) as error:
        tell(failed=str(error), full=isinstance(error, DiskError) or error.errno in (errno.ENOSPC, errno.EDQUOT))
        while data.read(files.CHUNK):  # until the sender has read that
            pass


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def look(folder: Path, order: Mapping[str, Any]) -> None:
    """Whether the folder has the checkpoint of a key whole; changes nothing."""
    whole = is_complete(folder, order["key"])
    try:
        if whole:
            check_content(folder, Hashes(folder / TABLE))
    except CheckpointError as error:
        tell(whole=False, changed=error.message)
    else:
        tell(whole=whole, record=hashlib.sha256((folder / RECORD).read_bytes()).hexdigest() if whole else "")


def receive(folder: Path, order: Mapping[str, Any], data: IO[bytes]) -> None:
    if not os.access(folder, os.W_OK):
        seen = folder.stat()
        tell(owner=[seen.st_uid, seen.st_gid, f"{seen.st_mode & 0o7777:o}"], user=os.getuid())
        return
    record = order["record"].encode()
    rows: Rows = json.loads(record)[ROWS]
    if (folder / RECORD).is_file() and is_right(folder, record, order):
        tell(whole=True)
        return
    (folder / RECORD).unlink(missing_ok=True)
    files.sync_folder(folder)
    sweep(folder, rows)
    wanted = dict(missing(folder, rows))
    space = os.statvfs(folder)
    wants = [
        {"file": name, "offset": offset, "sha256": digest.hexdigest()} for name, (offset, digest) in wanted.items()
    ]
    tell(wants=wants, free=space.f_bavail * space.f_frsize)
    for name, (_, digest) in wanted.items():
        take(folder / name, rows[name], json.loads(line_of(data))["offset"], digest, data)
    with files.atomic_file(folder / RECORD, mode=0o444) as file:
        file.write(record)
    hashes = Hashes(folder / TABLE)
    for name, row in rows.items():
        hashes.note(folder / name, row["sha256"])
    hashes.save()
    tell(whole=True)


def line_of(data: IO[bytes]) -> bytes:
    if line := data.readline():
        return line
    raise EOFError


def is_right(folder: Path, record: bytes, order: Mapping[str, Any]) -> bool:
    """Whether all is there, as far as `check_content` looks; says what is not."""
    try:
        if (folder / RECORD).read_bytes() == record and is_complete(folder, order["key"]):
            hashes = Hashes(folder / TABLE)
            check_content(folder, hashes, lambda path: tell(said=f"hashing {path.name} there"), deep=order["deep"])
            hashes.save()
            return True
        tell(said="what is there is not whole")
    except CheckpointError as error:
        tell(said=f"warning: {error.message}; it is mended")
    return False


def partial_of(path: Path) -> Path:
    return path.with_name(files.PARTIAL + path.name)


def sweep(folder: Path, rows: Rows) -> None:
    """Remove what is neither a file of the checkpoint nor begun: it would be no part of what the record names."""
    known = {path for name in rows for path in (folder / name, partial_of(folder / name))}
    for path in folder.rglob("*"):
        if path.is_symlink() or (path.is_file() and path not in known):
            path.unlink()


def missing(folder: Path, rows: Rows) -> Iterator[tuple[str, tuple[int, Any]]]:
    """Files that are not there whole: the bytes that are, and the hash that has taken them in."""
    for name, row in rows.items():
        path, partial = folder / name, partial_of(folder / name)
        if path.is_file():
            if path.stat().st_size == row["size"] and hash_of(path).hexdigest() == row["sha256"]:
                continue
            path.unlink()
        if partial.is_file() and partial.stat().st_size > row["size"]:
            partial.unlink()
        if partial.is_file():
            yield name, (partial.stat().st_size, hash_of(partial))
        else:
            yield name, (0, hashlib.sha256())


def hash_of(path: Path) -> Any:
    if path.stat().st_size > SMALL:
        tell(said=f"hashing {path.name.removeprefix(files.PARTIAL)} there, {path.stat().st_size / 1e6:.0f} MB of it")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def take(path: Path, row: Mapping[str, Any], offset: int, digest: Any, data: IO[bytes]) -> None:
    """A file from an offset on, under its name when all of it is there, synced and of the SHA-256 that is wanted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = partial_of(path), digest if offset else hashlib.sha256()
    with partial.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        left = row["size"] - offset
        while left:
            if not (chunk := data.read(min(left, files.CHUNK))):
                raise EOFError
            file.write(chunk)
            digest.update(chunk)
            left -= len(chunk)
        file.flush()
        os.fsync(file.fileno())
    seen = digest.hexdigest()
    if seen != row["sha256"]:
        partial.unlink()
    else:
        partial.replace(path)
        path.chmod(0o444)  # not earlier: a later run could not go on with it
        files.sync_folder(path.parent)
    tell(sha256=seen)
