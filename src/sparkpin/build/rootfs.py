"""The images' root file system: a tar of what the locked Debian packages install, made by these packages themselves.

It takes two steps, as debootstrap does, and the host has no part in either. First all packages' files are put in place,
and no program runs (`write_first_root`). Then the engine runs, in there and without a network, the packages' own dpkg,
which installs them again, properly (rootfs.sh). So the lock names every program whose version could show in the bytes.
Where the engine's machine has another architecture the second step is emulated: one way for all machines.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import posixpath
import re
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import BuildError, HostError, ManifestError
from sparkpin.core.files import EPOCH, atomic_file, disk_errors, sha256_file
from sparkpin.core.models import StrictModel
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import detail, say
from sparkpin.fetch.store import Store
from sparkpin.host import buildkit
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import DIRECTORY, canonical_layer, is_ephemeral, link_first, read_members
from sparkpin.pins.manifests import load_stack, load_stack_lock
from sparkpin.pins.schema import LockedDeb, Stack, StackLock

SCRIPT = Path(__file__).with_name("rootfs.sh")
# Folders that are links into /usr in a merged system. They must be there before the first package is unpacked.
MERGED = {"linux/amd64": ["bin", "lib", "lib64", "sbin"], "linux/arm64": ["bin", "lib", "sbin"]}
PYTHON = re.compile(r"(?:lib)?python3(?:\.\d+)?-(?:minimal|stdlib)$")  # the interpreter and its compiler to bytecode
DOCKERFILE = 'FROM scratch\nADD root.tar /\nRUN ["/bin/sh", "/debs/rootfs.sh", "{epoch}"]\n'


class RootfsSpec(StrictModel):
    """All that decides a root file system, in a form that a record can keep.

    merged: folders that are links into /usr; script: text of the one that installs and cleans up; epoch: seconds, of
    every file; time: of the packages' lock.
    """

    suite: str
    platform: str
    debs: list[LockedDeb]
    merged: list[str]
    script: str
    epoch: int = EPOCH
    time: str = ""

    @property
    def key(self) -> str:
        """SHA-256 (hex) over all of it; where a package comes from and how long it is do not matter."""
        parts = self.model_dump(mode="json", exclude={"time"})
        parts["debs"] = [[deb.name, deb.version, deb.sha256] for deb in self.debs]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def rootfs_spec(stack: Stack, lock: StackLock) -> RootfsSpec:
    script, merged = SCRIPT.read_text(encoding="utf-8"), MERGED[stack.platform]
    suite, platform = stack.debian.suite, stack.platform
    return RootfsSpec(suite=suite, platform=platform, debs=lock.debs, merged=merged, script=script, time=lock.time)


def native_stack(paths: Paths, stack: Stack, machine: str) -> tuple[Stack, StackLock]:
    """The stack in whose root file system another's steps run on a machine (its platform), and a lock of its packages.

    Nearly every step only unpacks wheels, links and compiles Python to bytecode; it runs nothing of what it installs.
    So it may run in a root file system of the building machine's own architecture, if Debian and Python are the same to
    the version: what it leaves is the same bytes. Made under emulation are the image's own root file system and the
    mods' GPU kernels, by the image's Triton (dockerfiles/layers.j2 says why).

    Raises HostError (the stack names none for such a machine) or ManifestError (it is for another, or with another
    Python).
    """
    if (name := stack.build_on.get(machine)) is None:  # type: ignore[call-overload]
        places = ", ".join([stack.platform, *stack.build_on])
        cause = f"the stack {stack.name} is built on {places}; this machine's engine is {machine}"
        step = f"build it on {stack.platform}, or name a stack for {machine} in `build_on` of its file"
        raise HostError(cause, next_step=step)
    native = load_stack(paths.project, name)
    lock, file, key = load_stack_lock(paths.project, native), f"pins/stacks/{stack.name}.yaml", f"build_on.{machine}"
    got, expected = pythons(native, lock), pythons(stack, load_stack_lock(paths.project, stack))
    if (native.platform, got) != (machine, expected):
        step = f"invoke lock --stack {name}, then invoke lock --stack {stack.name}"
        found = f"{name}: {native.platform}, {got}"
        raise ManifestError(file, key, found, f"a stack for {machine} with {expected}", next_step=step)
    return native, lock.model_copy(update={"wheels": []})


def pythons(stack: Stack, lock: StackLock) -> str:
    found = [f"{deb.name} {deb.version}" for deb in lock.debs if PYTHON.match(deb.name)]
    return ", ".join([f"Debian {stack.debian.suite}", *found])


def build_rootfs(paths: Paths, engine: Engine, spec: RootfsSpec) -> Path:
    """The tar of the root file system, from the cache or made; the same bytes whenever and wherever it is made.

    Touches no network. Raises IntegrityError (a package is missing in the store or damaged), BuildError, HostError (the
    engine's machine cannot run the platform's programs), EngineError or DiskError.
    """
    folder = paths.cache / "rootfs"
    target, digest = folder / f"{spec.key}.tar", folder / f"{spec.key}.sha256"
    with files.lock(paths.locks / "rootfs.lock", on_wait="waiting for another run that makes a rootfs"):
        for left in paths.work.glob("rootfs-*"):  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
        if target.is_file() and digest.is_file():
            if sha256_file(target)[0] == digest.read_text().strip():
                return target
            say(f"damaged, making it again: {target}")
        say(f"rootfs: {len(spec.debs)} packages of Debian {spec.suite}")
        with disk_errors(paths.work):
            paths.work.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="rootfs-", dir=paths.work) as work, atomic_file(target) as out:
                out.writelines(canonical(make_rootfs(Path(work), engine, spec, Store(paths.store))))
        sha256, size = sha256_file(target)
        with atomic_file(digest) as out:
            out.write(f"{sha256}\n".encode())
        say(f"  {size / 1e6:.1f} MB, sha256:{sha256[:12]}")
    return target


def make_rootfs(work: Path, engine: Engine, spec: RootfsSpec, store: Store) -> Path:
    """A tar, as the engine writes it, of what the packages install. Nothing comes from the engine's build cache."""
    context, raw = work / "context", work / "raw.tar"
    context.mkdir()
    (context / "Dockerfile").write_text(DOCKERFILE.format(epoch=spec.epoch))
    write_first_root(context / "root.tar", spec, store)
    try:
        words = ("--no-cache", "--platform", spec.platform, "--output", f"type=tar,dest={raw}")
        buildkit.build(context, *words, report=detail, host=engine.host)
    except BuildError as error:
        if "exec format error" not in error.message:
            raise
        step = "invoke doctor --stack STACK --fix switches emulation on, for the stack that is built"
        cause = f"the engine's machine, {engine.platform}, runs no programs for {spec.platform}"
        raise HostError(cause, next_step=step) from error
    return raw


def write_first_root(target: Path, spec: RootfsSpec, store: Store) -> None:
    """A tar of all packages' files, of which none has run, and of /debs: the packages, and the script."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as root:
        there = {".", *spec.merged, *(f"usr/{name}" for name in spec.merged)}
        for name in spec.merged:
            add(root, f"usr/{name}", kind=tarfile.DIRTYPE)
            add(root, name, kind=tarfile.SYMTYPE, link=f"usr/{name}")
        for deb in spec.debs:
            try:
                members = read_deb(store.verified(deb).read_bytes())
                unpack(members["data.tar"], root, there, spec.merged)
            except (ValueError, KeyError, lzma.LZMAError, tarfile.TarError) as error:
                cause = f"{deb.file}: got {error!r}, expected a Debian package with a data.tar.xz"
                raise BuildError(cause, next_step="lock the stack with another version of the package") from None
            add(root, f"debs/{deb.file}", join_deb(members))
        add(root, "debs/rootfs.sh", spec.script.encode())


def unpack(data: bytes, root: tarfile.TarFile, there: set[str], merged: Collection[str]) -> None:
    """there: the paths that `root` has; of two members with one path the first counts, which is a folder as a rule."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            member.name = place(member.name, merged)
            if member.islnk():
                member.linkname = place(member.linkname, merged)
            if member.name not in there:
                there.add(member.name)
                root.addfile(member, content)


def place(name: str, merged: Collection[str]) -> str:
    """Where a package's file lies in a merged system."""
    path = posixpath.normpath(name).lstrip("/")
    return f"usr/{path}" if path.partition("/")[0] in merged and "/" in path else path


def add(root: tarfile.TarFile, name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.size, member.linkname = kind, 0o755, len(data), link
    root.addfile(member, io.BytesIO(data))


def read_deb(data: bytes) -> dict[str, bytes]:
    """The members of a package, which is an `ar` archive. data.tar is decompressed: emulated, dpkg takes minutes to.

    Raises ValueError, KeyError or LZMAError for what is none.
    """
    position, members = 8, dict[str, bytes]()
    while position < len(data):
        name, size = data[position : position + 16].decode().rstrip(" /"), int(data[position + 48 : position + 58])
        members[name] = data[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
    members["data.tar"] = lzma.decompress(members.pop("data.tar.xz"))
    return members


def join_deb(members: dict[str, bytes]) -> bytes:
    rows = [b"!<arch>\n"]
    for name, data in members.items():
        rows += [b"%-16b%-12d%-6d%-6d%-8o%-10d`\n" % (name.encode(), 0, 0, 0, 0o644, len(data)), data]
        rows += [b"\n"] * (len(data) % 2)
    return b"".join(rows)


def canonical(tar: Path) -> Iterator[bytes]:
    """The same members with sorted names, fixed times and plain headers, without files that an engine leaves."""
    with tar.open("rb") as raw:
        members = read_members(raw).items()
        found = {path: member for path, member in members if member.kind == DIRECTORY or not is_ephemeral(path)}
        yield from canonical_layer(raw, link_first(found).values()).chunks()
