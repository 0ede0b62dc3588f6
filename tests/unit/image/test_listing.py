"""What layers hold: every kind of entry, owners, listings on disk, layers over each other; two images compared."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from layer_samples import CAPABILITY, LONG, everything, folder_member, layer, member, noise, symlink

from sparkpin.core.errors import IntegrityError
from sparkpin.image import listing
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import (
    Contents,
    ContentsDifference,
    FieldChange,
    PathEntry,
    compare_images,
    contents_of,
    image_contents,
    read_contents,
    write_contents,
)


def listed(*members: tuple[tarfile.TarInfo, bytes | None], whole: bool = False) -> dict[str, PathEntry]:
    found = contents_of(read_layer(io.BytesIO(layer(members)), everything=whole))
    assert len({(entry.path, entry.kind == "opaque") for entry in found}) == len(found)
    return {entry.path: entry for entry in found}


def hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file(path: str, data: bytes = b"", **fields: object) -> PathEntry:
    return PathEntry(path, "file", 0o644, 0, 0, len(data), hashed(data), **fields)  # type: ignore[arg-type]


def folder(path: str) -> PathEntry:
    return PathEntry(path, "dir", 0o755, 0, 0, 0)


def mark(path: str, kind: str = "whiteout") -> PathEntry:
    return PathEntry(path, kind, 0, 0, 0, 0)


def test_every_kind_of_entry_is_told() -> None:
    pipe = [
        member("opt/pipe", type=tarfile.FIFOTYPE, mode=0o600),
        member("opt/disk", type=tarfile.BLKTYPE, devmajor=8, devminor=1),
    ]
    found = contents_of(read_layer(io.BytesIO(layer(everything() + pipe))))
    capability = CAPABILITY["SCHILY.xattr.security.capability"].encode("utf-8", "surrogateescape").hex()
    assert set(found) == {
        PathEntry("opt", "dir", 0o755, 0, 0, 0),
        PathEntry("opt/tool", "file", 0o4755, 10001, 10001, 10, hashed(b"#!/bin/sh\n")),
        PathEntry("opt/tool-2", "hardlink", 0o4755, 10001, 10001, 0, hashed(b"#!/bin/sh\n"), "opt/tool"),
        PathEntry("opt/null", "char", 0o666, 0, 0, 0, device=(1, 3)),
        PathEntry("opt/disk", "block", 0o644, 0, 0, 0, device=(8, 1)),
        PathEntry("opt/pipe", "fifo", 0o600, 0, 0, 0),
        PathEntry("opt/link", "symlink", 0o777, 0, 0, 0, link="../etc/passwd"),
        PathEntry("opt/to-far", "symlink", 0o777, 0, 0, 0, link="/" + "x" * 120),
        PathEntry("opt/ping", "file", 0o755, 0, 0, 6, hashed(b"binary"), capability=capability),
        mark("opt/gone"),
        PathEntry("opt/sub", "dir", 0o700, 0, 0, 0),
        mark("opt/sub", "opaque"),
        file(LONG, b"deep"),
        file("opt/caf\udce9", b"latin-1 name"),
    }


def test_a_root_file_systems_listing_is_complete() -> None:
    lasting = listed(*noise(), member("a", b"x"))
    assert list(lasting) == ["a"]
    assert set(listed(*noise(), member("a", b"x"), whole=True)) == {
        *("a", "etc", "etc/resolv.conf", "root", "root/.cache", "root/.cache/x", "tmp", "tmp/uv-123.lock")
    }


SITE = "opt/vllm/lib/python3.11/site-packages"
RECORD = b"""\
demo/__init__.py,sha256=x,1
"demo/a,b.py",,
demo/caf\xc3\xa9.py,,
../../../bin/demo,,
Demo_Pack.age-1.0.dist-info/RECORD,,
"""


def test_files_of_wheels_have_owners() -> None:
    info = f"{SITE}/Demo_Pack.age-1.0.dist-info"
    found = listed(
        *(folder_member(f"{SITE}/demo"), member(f"{info}/RECORD", RECORD)),
        *(member(f"{info}/INSTALLER", b"uv"), member(f"{info}/licenses/LICENSE", b"")),
        *(member(f"{SITE}/demo/{name}", b"") for name in ("__init__.py", "a,b.py", "caf\xe9.py", "stray.py")),
        *(
            member(f"{SITE}/demo/__pycache__/{name}.pyc", b"")
            for name in ("__init__.cpython-311", "a,b.cpython-311.opt-2", "stray.cpython-311", "odd")
        ),
        member("opt/vllm/bin/demo", b"#!"),
        member("opt/vllm/bin/other", b"#!"),
    )
    owner = {path.removeprefix(f"{SITE}/"): entry.owner for path, entry in found.items()}
    mine = "wheel:demo-pack-age"
    assert owner == {
        **{f"Demo_Pack.age-1.0.dist-info/{name}": mine for name in ("INSTALLER", "RECORD", "licenses/LICENSE")},
        **{f"demo/{name}": mine for name in ("__init__.py", "a,b.py", "caf\xe9.py")},
        **{f"demo/__pycache__/{name}.pyc": mine for name in ("__init__.cpython-311", "a,b.cpython-311.opt-2")},
        **{"demo": "", "demo/stray.py": "", "demo/__pycache__/stray.cpython-311.pyc": ""},
        **{"demo/__pycache__/odd.pyc": "", "opt/vllm/bin/demo": mine, "opt/vllm/bin/other": ""},
    }


def test_files_of_debian_packages_have_owners() -> None:
    info = "var/lib/dpkg/info"
    found = listed(
        symlink("bin", "usr/bin"),
        folder_member("usr/lib"),
        member(f"{info}/dash.list", b"/.\n/bin\n/bin/dash\n/usr/share/doc/dash\n"),
        member(f"{info}/dash.md5sums", b""),
        member(f"{info}/libc6:amd64.list", b"/usr/lib\n/usr/lib/libc.so.6\n/usr/lib/libc.py\n"),
        member("usr/bin/dash", b"elf"),
        member("usr/share/doc/dash", b""),
        symlink("usr/lib/libc.so.6", "libc-2.so"),
        member("usr/lib/libc.py", b""),
        member("usr/lib/__pycache__/libc.cpython-311.pyc", b""),
        member("usr/lib/local.so", b""),
    )
    assert {path: entry.owner for path, entry in found.items()} == {
        **dict.fromkeys(("bin", "usr/bin/dash", "usr/share/doc/dash"), "deb:dash"),
        **{f"{info}/{name}": "deb:dash" for name in ("dash.list", "dash.md5sums")},
        **{f"usr/lib/{name}": "deb:libc6" for name in ("libc.so.6", "libc.py", "__pycache__/libc.cpython-311.pyc")},
        **{f"{info}/libc6:amd64.list": "deb:libc6", "usr/lib": "", "usr/lib/local.so": ""},
    }


INFO = "var/lib/dpkg/info"


def owned(*members: tuple[tarfile.TarInfo, bytes | None]) -> set[str]:
    """What has an owner, but for the lists themselves."""
    return {path for path, entry in listed(*members).items() if entry.owner and "info/" not in path}


def test_a_list_that_is_a_link_names_no_owners() -> None:
    text = member("a", b"/file\n../file,,\n")
    for name in (f"{INFO}/x.list", "opt/x-1.dist-info/RECORD"):
        for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
            assert owned(text, member(name, type=kind, linkname="a"), member("file", b"")) == set()


def test_lists_of_a_stranger_name_no_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these was an error that is not ours, or asked for hours of work or any amount of memory."""
    file, record = member("file", b""), "x-1.dist-info/RECORD"
    assert owned(file, member(record, b"file,,\n")) == {"file"}
    assert owned(file, member(record, b"file,,\n" + b"x" * 131_072 + b",\n")) == {"file"}
    assert owned(file, member(record, b"file,,\n" + b"x" * 131_073 + b",\n")) == set()
    deep = "d/" * listing.DEPTH
    assert owned(file, member(f"{deep}{record}", b"../" * listing.DEPTH + b"file,,\n")) == set()
    monkeypatch.setattr(listing, "LIST", 8)
    assert [owned(file, member(f"{INFO}/x.list", b"/file\n" + b"\n" * n)) for n in (2, 3)] == [{"file"}, set()]
    assert [owned(file, member(record, b"file,,\n" + b"\n" * n)) for n in (1, 2)] == [{"file"}, set()]


def test_memory_does_not_grow_with_what_a_list_names() -> None:
    """A few bytes of a row come to thousands with a link."""
    rows = b"".join(b"/l/%d\n" % n for n in range(4_000))
    long = symlink("l", "d" * 3_000)
    read = read_layer(io.BytesIO(layer([long, member(f"{INFO}/x.list", rows)])))
    tracemalloc.start()
    contents_of(read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000  # bytes; the buffer for files has a million, the names would have 12


def test_the_package_of_a_path_is_found_in_one_pass() -> None:
    """The last folder of metadata counts, and the name ends before its first hyphen; never a search through hyphens."""
    found = listing.DIST_INFO.fullmatch("a-1.dist-info/b/c-d-2.dist-info/RECORD")
    assert found and found["name"] == "c"
    assert listing.DIST_INFO.fullmatch("-" * 1_000_000 + "/.dist-info/") is None  # hours, if each were tried


def test_a_listing_comes_back_and_has_the_same_bytes(tmp_path: Path) -> None:
    found = contents_of(read_layer(io.BytesIO(layer(everything()))))
    write_contents(tmp_path / "a.gz", found)
    write_contents(tmp_path / "deep/b.gz", found)
    assert read_contents(tmp_path / "a.gz") == found
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "deep/b.gz").read_bytes()
    write_contents(tmp_path / "none.gz", ())
    assert read_contents(tmp_path / "none.gz") == ()


@pytest.mark.parametrize("damage", ["cut", "more", "flip", "fewer", "other", "negative", "empty"])
def test_a_damaged_listing_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.gz"
    write_contents(path, tuple(file(f"f{number}", b"%d" % number) for number in range(100)))
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-40],
            "more": data + b"x",
            "flip": data[:200] + bytes([data[200] ^ 1]) + data[201:],
            "fewer": gzip.compress(gzip.decompress(data).rpartition(b"[")[0]),
            "other": gzip.compress(b'{"contents":1,"entries":1}\n["a"]\n'),
            "negative": gzip.compress(b'{"contents":1,"entries":1}\n["a","file",420,0,-1,0]\n'),
            "empty": b"",
        }[damage]
    )
    with pytest.raises(IntegrityError, match=r"a\.gz"):
        read_contents(path)


D, DA = (folder("d"), file("d/a"), file("d/b"), file("da")), (folder("d"), file("d/a"), file("da"))
LINK = PathEntry("e", "symlink", 0o777, 0, 0, 0, link="d")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([], {}),
        ([(file("a"), file("b")), (file("a", b"2"),)], {"a": 1, "b": 0}),
        # A deletion mark works on lower layers only.
        ([D, (mark("d/a"),)], {"d": 0, "d/b": 0, "da": 0}),
        ([D, (mark("d"),)], {"da": 0}),
        ([D, (mark("d"), folder("d"), file("d/c"))], {"d": 1, "d/c": 1, "da": 0}),
        ([D, (mark("d/a"),), (file("d/a"),)], {"d": 0, "d/a": 2, "d/b": 0, "da": 0}),
        # An opaque folder hides what is below it only.
        ([(*DA, folder("d/e"), file("d/e/b")), (folder("d"), mark("d", "opaque"), file("d/new"))],
         {"d": 1, "d/new": 1, "da": 0}),
        ([DA, (mark("", "opaque"), file("x"))], {"x": 1}),
        # What is no folder hides one; a folder that is only implied replaces a file.
        ([(*DA, file("e/unnamed-parent")), (file("d"), LINK)], {"d": 1, "da": 0, "e": 1}),
        ([(file("d"), file("x")), (file("d/a/b"),)], {"d/a/b": 1, "x": 0}),
    ],
)  # fmt: skip
def test_layers_laid_over_each_other(layers: list[Contents], expected: dict[str, int]) -> None:
    assert {path: number for path, (number, _) in image_contents(layers).items()} == expected


FILE = PathEntry("opt/a.py", "file", 0o644, 0, 0, 5, sha256="a" * 64, owner="wheel:a")
LINK = PathEntry("opt/link", "symlink", 0o777, 0, 0, 0, link="a.py")
FOLDER = PathEntry("opt", "dir", 0o755, 0, 0, 0)


def test_the_same_contents_in_another_order_are_identical() -> None:
    found = compare_images([(FOLDER, FILE, LINK)], [(LINK, FILE, FOLDER)])
    assert found == ContentsDifference((), (), ()) and found.identical


def test_added_and_removed_are_told_by_path() -> None:
    other = replace(FILE, path="opt/0.py")
    found = compare_images([(FOLDER, FILE)], [(FOLDER, other, LINK)])
    assert found == ContentsDifference((other, LINK), (FILE,), ())
    assert not found.identical


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        (FILE, replace(FILE, sha256="b" * 64), [("content", "a" * 64, "b" * 64)]),
        (FILE, replace(FILE, mode=0o4755, uid=3), [("mode", "0644", "4755"), ("uid", "0", "3")]),
        (FILE, replace(FILE, capability="01ff"), [("capability", "", "01ff")]),
        (FILE, replace(FILE, owner=""), []),
        (LINK, replace(LINK, link="b.py"), [("link", "a.py", "b.py")]),
        (FILE, replace(LINK, path=FILE.path), [("kind", "file", "symlink")]),
    ],
)
def test_each_field_is_told_with_both_values(
    old: PathEntry, new: PathEntry, changed: list[tuple[str, str, str]]
) -> None:
    found = compare_images([(old,)], [(new,)])
    assert found == ContentsDifference((), (), tuple(FieldChange(old.path, *row) for row in changed))


def test_images_are_compared_as_containers_see_them() -> None:
    """A file that a layer brings and another deletes makes no difference, nor does the layer that brings it."""
    gone = PathEntry("opt/a.py", "whiteout", 0, 0, 0, 0)
    other = replace(FILE, sha256="b" * 64)
    assert compare_images([(FOLDER, FILE), (gone,)], [(FOLDER,)]).identical
    assert compare_images([(FOLDER, FILE), (LINK,)], [(FOLDER, FILE, LINK), (other,)]) == ContentsDifference(
        (), (), (FieldChange("opt/a.py", "content", "a" * 64, "b" * 64),)
    )
