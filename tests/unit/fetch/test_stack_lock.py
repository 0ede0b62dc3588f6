"""What a lock is made from, without an index: the target's tags, apt's words, packages that stay."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from heard import heard
from places import PROJECT

from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.debs import MIRROR, apt_conf, mirrors_of, parse_uris
from sparkpin.fetch.stack import require_forward
from sparkpin.pins.manifests import load_stack, load_stack_lock, lock_text
from sparkpin.pins.schema import LockedDeb, LockedFile, StackLock

OF_DEBIAN = [("debian", ""), ("debian", "-updates")]


def test_apt_output_becomes_lock_entries() -> None:
    """With where Debian keeps them: releases that lie below one another's URI are told apart."""
    mirrors = [("http://m/", "s"), ("http://m/", "s-updates"), ("http://m/sec/", "s-security")]
    name = "bsdutils_1%3a2.38.1-5+b1_amd64.deb"
    rows = [f"pool/main/b/{name}", f"sec/pool/updates/main/b/{name.replace('1%3a', '')}"]
    text = "".join(f"'http://m/{row.replace('+', '%2b')}' {name} 94412 SHA256:{'a' * 64}\n" for row in rows)
    common = {"name": "bsdutils", "version": "1:2.38.1-5+b1", "file": name, "size": 94412, "sha256": "a" * 64}
    assert parse_uris(text, mirrors) == [
        LockedDeb(path="pool/main/b/bsdutils_1:2.38.1-5+b1_amd64.deb", archive="debian", **common),
        LockedDeb(path="pool/updates/main/b/bsdutils_2.38.1-5+b1_amd64.deb", archive="debian-security", **common),
    ]
    with pytest.raises(NetworkError):
        parse_uris("'http://m/b.deb' b_1_amd64.deb 94412 MD5Sum:00\n", mirrors)


def test_host_hooks_stay_out_of_the_private_apt(tmp_path: Path) -> None:
    host = (
        'Acquire::http::Proxy "http://p:3128";\nAcquire::Check-Valid-Until "false";\n'
        'APT::Update::Post-Invoke:: "rm -f /var/cache/apt/*";\nDir::Cache "x";\n'
    )
    conf = apt_conf(tmp_path, "arm64", host)
    assert "p:3128" in conf and "Check-Valid-Until" in conf
    assert "Post-Invoke" not in conf and f'Dir "{tmp_path}"' in conf


def test_the_mirrors_are_the_host_s_own_for_the_suite_else_debian_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    debian = [(f"{MIRROR}/{archive}/", f"s{end}") for archive, end in (("debian-security", "-security"), *OF_DEBIAN)]
    assert mirrors_of("s") == debian, "there is no apt at all"
    rows = ["Debian other http://m/ main", "Debian s http://m/ contrib", "Ubuntu s http://u/ main"]
    apt = tmp_path / "apt-get"
    for more, expected in (([], debian), (["Debian s http://m/ main"], [("http://m/", "s")])):
        apt.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in [*rows, *more]))
        apt.chmod(0o755)
        assert mirrors_of("s") == expected


def test_the_projects_own_locks_fit_their_pins() -> None:
    project = PROJECT
    for file in sorted((project / "pins/stacks").glob("*.lock")):
        stack = load_stack(project, file.stem)
        lock = load_stack_lock(project, stack)
        assert file.read_text() == lock_text(lock), "written by `invoke lock`, not by hand"
        lock_module.check_unique(lock)
        assert not {wheel.name for wheel in lock.wheels} & set(stack.python.exclude)
        assert "://" not in file.read_text()
        assert json.loads(file.read_text())["stack"] == stack.name
        assert lock.time and all(deb.path.endswith(".deb") and deb.archive for deb in lock.debs), "for its snapshots"


def wheel(version: str, digit: str, build: str = "") -> LockedFile:
    return LockedFile(name="a", version=version, file=f"a-{version}{build}-py3-none-any.whl", size=1, sha256=digit * 64)


LOCKED = StackLock(stack="s", inputs="0" * 64, debs=[], wheels=[wheel("1.10", "a")])


@pytest.mark.parametrize(
    ("offered", "refused", "always"),
    [
        (wheel("1.11", "b"), False, False),
        (wheel("1.10", "b"), True, True),
        (wheel("1.9", "b"), True, False),
    ],
)
def test_what_is_offered_is_held_to_the_former_lock(offered: LockedFile, refused: bool, always: bool) -> None:
    """With other pins it is only reported, unless a name has other bytes."""
    lock, said = LOCKED.model_copy(update={"wheels": [offered]}), heard()
    with pytest.raises(IntegrityError) if refused else contextlib.nullcontext():
        require_forward(LOCKED, lock)
    with pytest.raises(IntegrityError) if always else contextlib.nullcontext():
        require_forward(LOCKED, lock.model_copy(update={"inputs": "1" * 64}))
    assert len(said) == int(refused and not always)
