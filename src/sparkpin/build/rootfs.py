"""The images' root file system: a tar that mmdebstrap makes, without network, from the store's Debian packages."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sparkpin.core import files
from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import BuildError, HostError
from sparkpin.core.files import atomic_file, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.debs import ARCHITECTURES, HOST_PACKAGES, raise_no_space, tail
from sparkpin.fetch.store import Store
from sparkpin.image.layer_tar import DIRECTORY, Member, canonical_layer, link_first, read_members
from sparkpin.pins.schema import LockedDeb, LockedFile, Stack, StackLock, StrictModel

CUSTOMIZE = Path(__file__).with_name("rootfs.sh")
# Folders that are links into /usr in a merged system. They must be there before the first package is unpacked.
MERGED = {"linux/amd64": ("bin", "lib", "lib64", "sbin"), "linux/arm64": ("bin", "lib", "sbin")}

# As root, mmdebstrap mounts /proc, /sys and more where it works. In namespaces of its own these end with it, and it
# ends with us, however we end; in the host's they would lie in wait for the next `rm -rf` in /tmp. Run by other users,
# mmdebstrap makes such namespaces by itself.
ISOLATED = ("setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")


def arguments(stack: Stack, lock: StackLock) -> list[str]:
    """mmdebstrap's arguments that decide the bytes."""
    merge = "; ".join(f'mkdir -p "$1/usr/{name}" && ln -s usr/{name} "$1/{name}"' for name in MERGED[stack.platform])
    return [
        *("--variant=essential", "--format=tar", f"--architectures={ARCHITECTURES[stack.platform]}"),
        f"--include={','.join(deb.name for deb in lock.debs)}",
        "--aptopt=APT::Install-Recommends false",
        '--aptopt=pkgCacheGen::ForceEssential ","',  # apt counts itself as Essential otherwise
        "--dpkgopt=force-unsafe-io",  # the tar is synced at the end; each unpacked file need not be
        "--skip=output/dev",  # the engine mounts its own /dev
        "--skip=cleanup/apt,cleanup/mmdebstrap",  # rootfs.sh removes all of apt, these two would look for it
        f"--setup-hook=set -e; {merge}",
    ]


class RootfsSpec(StrictModel):
    """All that decides a root file system, in a form that a record can keep.

    arguments: mmdebstrap's; customize: the text of the script that cleans up; epoch: seconds, of every file;
    time: of the packages' lock.
    """

    suite: str
    platform: str
    debs: list[LockedDeb]
    arguments: list[str]
    customize: str
    epoch: int
    time: str = ""

    @property
    def key(self) -> str:
        """SHA-256 (hex) over all of it; where a package comes from and how long it is do not matter."""
        parts = self.model_dump(mode="json", exclude={"time"})
        parts["debs"] = [[deb.name, deb.version, deb.sha256] for deb in self.debs]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def rootfs_spec(stack: Stack, lock: StackLock) -> RootfsSpec:
    return RootfsSpec(
        suite=stack.system.suite,
        platform=stack.platform,
        debs=lock.debs,
        arguments=arguments(stack, lock),
        customize=CUSTOMIZE.read_text(encoding="utf-8"),
        epoch=EPOCH,
        time=lock.time,
    )


def build_rootfs(paths: Paths, spec: RootfsSpec, say: Say) -> Path:
    """The tar of the root file system, from cache or made anew; the same bytes whenever and wherever it is made.

    Touches no network. Raises IntegrityError (a package is missing in the store or damaged), HostError or BuildError.
    """
    key = spec.key
    folder = paths.cache / "rootfs"
    target, digest = folder / f"{key}.tar", folder / f"{key}.sha256"
    with files.lock(paths.locks / "rootfs.lock", on_wait=lambda: say("waiting for another run that makes a rootfs")):
        files.sweep(folder)
        if target.is_file() and digest.is_file():
            if sha256_file(target)[0] == digest.read_text().strip():
                return target
            say(f"damaged, making it again: {target}")
        say(f"rootfs: {len(spec.debs)} packages of Debian {spec.suite}")
        with workplace(paths) as work, atomic_file(target) as out:
            for chunk in made(spec, repository(work, Store(paths.store), spec.debs)):
                out.write(chunk)
        sha256, size = sha256_file(target)
        with atomic_file(digest) as out:
            out.write(f"{sha256}\n".encode())
        say(f"  {size / 1e6:.1f} MB, sha256:{sha256[:12]}")
    return target


@contextmanager
def workplace(paths: Paths) -> Iterator[Path]:
    """A folder that an unprivileged mmdebstrap can read too. Those of killed runs go; the caller holds the lock."""
    prefix = f"sparkpin-rootfs-{hashlib.sha256(bytes(paths.cache)).hexdigest()[:8]}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        work.chmod(0o755)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def repository(work: Path, store: Store, debs: Sequence[LockedFile]) -> Path:
    repo = work / "repo"
    with files.disk_errors(work):
        repo.mkdir()
        for deb in debs:
            store.link(deb, repo / deb.file)
        (repo / "Packages").write_text("\n".join(stanza(deb, repo) for deb in debs))
    return repo


def stanza(deb: LockedFile, repo: Path) -> str:
    argv = ["dpkg-deb", "--field", str(repo / deb.file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"dpkg-deb cannot read {deb.file}:\n{tail(done)}", next_step="invoke build --fetch-only")
    return f"{done.stdout.rstrip()}\nFilename: ./{deb.file}\nSize: {deb.size}\nSHA256: {deb.sha256}\n"


def made(spec: RootfsSpec, repo: Path) -> Iterator[bytes]:
    """Run mmdebstrap and yield its tar in canonical form."""
    if not shutil.which("mmdebstrap"):
        raise HostError("mmdebstrap is missing", next_step=HOST_PACKAGES)
    work = repo.parent
    customize = work / "customize.sh"
    customize.write_text(spec.customize, encoding="utf-8")
    customize.chmod(0o755)
    argv = [
        *(ISOLATED if os.geteuid() == 0 else ()),
        *("mmdebstrap", *spec.arguments, f'--customize-hook="{customize}" "$1"'),
        # No suite and no signature: each package was verified against the lock, there is no release to verify.
        *("", "-", f"deb [trusted=yes] copy://{repo} ./"),
    ]
    # Nothing of the caller's: the packages' own scripts run with it, and Python's variables decide their bytecode.
    env = {
        "SOURCE_DATE_EPOCH": str(spec.epoch),
        "LC_ALL": "C.UTF-8",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(work),
    }
    with tempfile.TemporaryFile(dir=work) as raw:
        done = subprocess.run(argv, stdout=raw, stderr=subprocess.PIPE, text=True, env=env, check=False)
        if done.returncode:
            if "No space left on device" in done.stderr:
                raise_no_space(work)
            raise BuildError(f"mmdebstrap failed:\n{tail(done, 15)}", next_step="read what it says above")
        yield from canonical(raw)


def canonical(raw: BinaryIO) -> Iterator[bytes]:
    """The same members with sorted names, fixed times and plain headers, whichever mmdebstrap and tar wrote them."""
    found = read_members(raw)
    found.setdefault(b"dev", Member(b"dev", DIRECTORY, 0o755, 0, 0))  # a mount point
    return canonical_layer(raw, link_first(found).values()).chunks()
