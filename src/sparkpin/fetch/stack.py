"""A stack's lock: every wheel and every Debian package of its images, by name, version, size and hash; and these files,
brought into the store. The only network use for a stack.
"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch.debs import TIME, debian_closure, fetch_debs
from sparkpin.fetch.store import Store, find_missing, locked_store, scratch
from sparkpin.fetch.wheels import Newer, fetch_wheels, index_closure, target_of
from sparkpin.pins.manifests import load_stack, lock_text, read_lock, stack_inputs
from sparkpin.pins.schema import LockedDeb, LockedFile, Stack, StackLock


def lock_stack(paths: Paths, name: str, *, newer: Newer | None = None) -> StackLock:
    """Resolve pins/stacks/<name>.yaml and write <name>.lock. Network; nothing is downloaded.

    newer: what may change of the lock that is there; nothing becomes older.
    """
    stack, lock_file = load_stack(paths.project, name), paths.project / f"pins/stacks/{name}.lock"
    file = f"pins/stacks/{name}.yaml"
    check_requirements(stack, file)
    former = read_lock(StackLock, paths.project, name) if lock_file.is_file() else None
    with locked_store(paths) as store:
        if newer and former and newer.what in ("vllm", "python"):
            debs = former.debs
        else:
            say(f"lock {name}: Debian {stack.debian.suite}, {len(stack.debian.packages)} packages asked for")
            with scratch(store.root) as folder:
                debs = debian_closure(folder, stack)
            say(f"  {len(debs)} packages, {sum(deb.size for deb in debs) / 1e6:.1f} MB")
        target = target_of(stack, debs)
        say(f"lock {name}: {', '.join(stack.python.requirements)} for Python {target.python}, {target.machine}")
        wheels = former.wheels if former else []
        if newer is None or newer.what != "debian":
            wheels = index_closure(stack, target, wheels, file, newer)
        say(f"  {len(wheels)} wheels, {sum(wheel.size for wheel in wheels) / 1e6:.1f} MB")
    time = former.time if former and former.debs == debs else f"{datetime.now(UTC):{TIME}}" if debs else ""
    lock = StackLock(stack=name, inputs=stack_inputs(stack), time=time, debs=debs, wheels=wheels)
    check_unique(lock)
    if former:
        require_forward(former, lock)
    with atomic_file(lock_file) as out:
        out.write(lock_text(lock).encode())
    return lock


def require_forward(former: StackLock, lock: StackLock) -> None:
    """What a lying or stale mirror or index does: other bytes of what is locked, or older versions.

    Raises IntegrityError. New pins may want older versions, or another file of one: these are only reported.
    """
    before = {(type(row), row.name): row for row in former.files}
    for new in lock.files:
        old = before.get((type(new), new.name), new)
        if old.sha256 == new.sha256 or (old.version != new.version and not is_older(new, old)):
            continue
        what = "other bytes than those locked" if old.version == new.version else "an older version"
        file = f"pins/stacks/{lock.stack}.lock"
        message = f"{file}: the index or the mirror offers {what}: {old.file} -> {new.file}"
        if former.inputs == lock.inputs or old.file == new.file:
            step = f"ask whoever runs it; if that is meant: rm {file}, then invoke lock --stack {lock.stack}"
            raise IntegrityError(message, next_step=step)
        say(message)


def is_older(new: LockedFile, old: LockedFile) -> bool:
    if isinstance(new, LockedDeb):
        return subprocess.run(["dpkg", "--compare-versions", new.version, "lt", old.version]).returncode == 0
    return Version(new.version) < Version(old.version)


def check_requirements(stack: Stack, file: str) -> None:
    """What is both asked for and excluded or overridden is a mistake that uv does not report."""
    asked = {canonicalize_name(Requirement(row).name) for row in stack.python.requirements}
    for key, rows in (("overrides", stack.python.overrides), ("exclude", stack.python.exclude)):
        for row in rows:
            name = canonicalize_name(Requirement(row).name)
            if name in asked or (key == "exclude" and name != row):
                expected = "a canonical name that python.requirements does not ask for"
                raise ManifestError(file, f"python.{key}", row, expected)


def check_unique(lock: StackLock) -> None:
    """A lock that a person merged may hold two versions of one package: which of them wins would be chance."""
    for key, rows in (("wheels", lock.wheels), ("debs", lock.debs)):
        names = [canonicalize_name(row.name) for row in rows]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            file, step = f"pins/stacks/{lock.stack}.lock", f"invoke lock --stack {lock.stack}"
            raise ManifestError(file, key, f"several versions of {', '.join(twice)}", "one version", next_step=step)


def fetch_stack(paths: Paths, stack: Stack, lock: StackLock) -> int:
    """Everything of the lock into the store, verified. How many bytes were not in the store, or not right.

    Files that are there are read again; a damaged one is replaced. Touches no network when nothing is missing. What
    cannot be had keeps nothing else from being fetched. Raises NetworkError, IntegrityError (other bytes than in the
    lock; nothing of that file is stored) or DiskError.
    """
    check_unique(lock)
    with locked_store(paths) as store:
        absent = find_missing((file, store.path(file.sha256)) for file in lock.files)
        wanted = {file.sha256: file for file in absent}  # one content may have two names
        size = sum(file.size for file in wanted.values())
        if wanted:
            files.require_space(paths.store, size, "the locked files", "SPARKPIN_CACHE")
            say(f"fetch {stack.name}: {len(wanted)} files, {size / 1e6:.1f} MB")
            debs = [file for file in wanted.values() if isinstance(file, LockedDeb)]
            wheels = [file for file in wanted.values() if not isinstance(file, LockedDeb)]
            fault = None
            try:
                fetch_debs(stack, lock.time, debs, store)
            except (NetworkError, IntegrityError) as error:
                say(error.message)
                fault = error
            if wheels:
                fetch_wheels(stack.python.torch_backend, target_of(stack, lock.debs), wheels, store)
            if fault:
                raise fault
    return size


def require_fetched(paths: Paths, lock: StackLock) -> None:
    """InputError when the store lacks a file of the lock. Looks at sizes only: a file is verified when it is used."""
    store = Store(paths.store)
    if absent := [file for file in lock.files if not store.has(file)]:
        first = ", ".join(file.file for file in absent[:3]) + (", ..." if len(absent) > 3 else "")
        raise InputError(
            f"{len(absent)} of {len(lock.files)} locked files are not in the store {paths.store}: {first}",
            next_step="`invoke build --fetch-only` with a network, or `invoke import` of a bundle that has its store",
        )
