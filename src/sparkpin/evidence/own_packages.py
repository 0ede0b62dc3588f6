"""The packages that sparkpin itself runs with: the project's .venv held against requirements.lock."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.build.consistent import SHOWN
from sparkpin.core.terminal import count
from sparkpin.evidence.verify import Check

LOCK = "requirements.lock"
NOT_LOCKED = ("pip", "setuptools", "sparkpin")  # Python's venv brings the first two; the last is this checkout
OWN = ("sparkpin.pth", "distutils-precedence.pth")  # of the last two
CODE = (".py", ".so", ".pth")
AGAIN = "rm .venv/.requirements.sha256, then ./install.sh"


def check_installed(project: Path, site: Path) -> list[Check]:
    """Versions against the lock, files against their packages' RECORD, and files that no package brought.

    Who can write a file can write its RECORD, and Python's bytecode is in none: this finds accidents and careless
    hands. A .venv that is made again is held to the lock's hashes by pip. site: the site-packages of .venv.
    """
    lines = (project / LOCK).read_text(encoding="utf-8").splitlines()
    rows = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    locked = {canonicalize_name(row.name): row.specifier for row in rows if row.marker is None or row.marker.evaluate()}
    found = {canonicalize_name(one.name): one for one in distributions(path=[str(site)])}
    versions = [f"{name} is missing" for name in sorted(locked.keys() - found.keys())]
    for name, one in sorted(found.items()):
        if name not in NOT_LOCKED and one.version not in locked.get(name, ()):
            versions.append(f"{name} {one.version}, locked {locked.get(name, 'not at all')}")
    files = [(one, file) for one in found.values() for file in one.files or ()]
    changed = [str(file) for one, file in files if not is_as_recorded(one, file)]
    brought = {Path(str(one.locate_file(file))).resolve() for one, file in files}
    strange = [
        str(path.relative_to(site))
        for path in sorted(site.rglob("*"))
        if is_code(path) and path.resolve() not in brought and path.name not in OWN
    ]
    return [
        verdict("versions", versions, f"{count(len(found), 'package')}, as {LOCK} has them"),
        verdict("files", changed, f"{count(len(files), 'file')}, as their packages recorded them"),
        verdict("strangers", strange, "each file of Python's was brought by a package"),
    ]


def is_as_recorded(one: Distribution, file: PackagePath) -> bool:
    if file.hash is None:  # RECORD itself, and what pip made here
        return True
    try:
        made = hashlib.new(file.hash.mode, Path(str(one.locate_file(file))).read_bytes())
    except (OSError, ValueError):  # no such file; no such algorithm
        return False
    digest = base64.urlsafe_b64encode(made.digest())
    return digest.rstrip(b"=").decode() == file.hash.value


def is_code(path: Path) -> bool:
    """Python imports bytecode without its source from anywhere but __pycache__."""
    return path.suffix in CODE or (path.suffix == ".pyc" and path.parent.name != "__pycache__")


def verdict(what: str, wrong: Sequence[str], right: str) -> Check:
    if not wrong:
        return Check(what, "ok", right)
    return Check(what, "wrong", f"{len(wrong)} differ: {', '.join(wrong)[:SHOWN]}", next_step=AGAIN)
