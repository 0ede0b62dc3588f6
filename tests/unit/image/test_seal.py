"""Sealing. The literal digests fail if any change ever changes the bytes of images that exist already."""

from __future__ import annotations

import io
import subprocess
import tarfile
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import layer_samples as samples
import pytest
from layer_samples import everything, folder_member, hardlink, layer, member, symlink

from sparkpin.core.errors import BuildError
from sparkpin.image import layer_tar, seal
from sparkpin.image.archive import END, Slice, padded
from sparkpin.image.oci import OciImage
from sparkpin.image.saved import open_saved

PLAIN_DIGEST = "sha256:45d37204f671ee3b50468c4e0e568dc21f43f278e3992950dbe800c2857a0be0"
BIG_DIGEST = "sha256:a48fe5d2f6c0fb706a971b92fe8f886b2ccb647314b03496c41cfa1a5c7c276d"
MIB = 1 << 20
CONFIG_DIGEST = "sha256:6425b41d8836351dbe48a016a7fb844bc1872738d015368d2c2f3da2f9b575ed"


def canonical_bytes(data: bytes) -> bytes:
    read = layer_tar.read_layer(io.BytesIO(data))
    out = b"".join(read.chunks())
    assert len(out) == read.size
    return out


def sealed(source: Path) -> tuple[OciImage, bytes]:
    """What sealing makes of an image that an engine saved: the image, and the archive for `docker load`."""
    with open_saved(source) as saved:
        return finished([layer_tar.read_layer(cast(BinaryIO, tar)) for tar in saved.layers], saved.config["config"])


def finished(parts: Sequence[seal.Part], config: Mapping[str, Any] = MappingProxyType({})) -> tuple[OciImage, bytes]:
    image: list[OciImage] = []

    def pieces() -> Iterator[bytes]:
        image.append((yield from seal.seal(parts, config, os="linux", architecture="amd64", tag="sparkpin/test:1")))

    data = b"".join(pieces())
    return image[0], data


Members = list[tuple[tarfile.TarInfo, bytes | None]]
KINDS: dict[str, Members] = {
    "nothing": [],
    "files": [member("a", b"data"), member("empty", b""), member("block", b"x" * 512), member("more", b"x" * 513)],
    "folder": [folder_member("d"), member("d/f", b"")],
    "hardlinks": [member("b/z", b"data", mode=0o600, uid=7), hardlink("a", "b/z"), hardlink("b/a", "b/z")],
    "hardlink-to-a-symlink": [symlink("s", "x"), hardlink("a", "s")],
    "symlink": [symlink("s", "../a/./b//c", mode=0o644)],
    "symlink-not-utf8": [symlink("s", "\udcff\udcfe")],
    "char": [member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666)],
    "fifo": [member("pipe", type=tarfile.FIFOTYPE, mode=0o600)],
    "setuid": [member("su", b"", mode=0o4755)],
    "sticky": [folder_member("open", 0o1777)],
    "capability": [member("ping", b"binary", mode=0o755, pax_headers=samples.CAPABILITY)],
    "capability-name-long": [
        member("é" * 60, b"1", mode=0o755, pax_headers=samples.CAPABILITY),
        member("d" * 100, type=tarfile.DIRTYPE, pax_headers=samples.CAPABILITY),
    ],
    "capability-owner-large": [member("a", b"x", uid=3_000_000_000, pax_headers=samples.CAPABILITY)],
    "whiteout": [member("d/.wh.gone", b"", mode=0o600), member(".wh.\udce9", b"")],
    "opaque": [folder_member("d"), member("d/.wh..wh..opq", b"", mode=0o600)],
    "not-utf8": [member("caf\udce9", b"1"), member("\udcff" * 99, b"2"), member("\udc80" * 101, b"3")],
    "utf8": [member("Çağrı/\u4f60\u597d", b"1"), member("é" * 60, b"2")],
    "control": [member("a\nb\tc\\d", b"1"), member("e =f", b"2")],
    "name-99-100-101": [member(c * n, b"") for c, n in (("a", 99), ("b", 100), ("c", 101))],
    "name-long": [member("d/" * 150 + "f", b"1"), member("n" * 255, b"2"), member("p/" * 2000 + "f", b"3")],
    "owner-large": [member("a", b"x", uid=3_000_000_000, gid=2_097_151), member("b", b"", uid=2_097_152)],
}
DIGESTS = {  # how each begins
    "nothing": "5f70bf18a0860070", "files": "9744ec45e116741e", "folder": "04efb4269cb67d1e",
    "hardlinks": "7444195038960e1e", "hardlink-to-a-symlink": "94a3c7e5e7f4e34c", "symlink": "f28c4a6a3aef1fa6",
    "symlink-not-utf8": "3be4c504b8938e37", "char": "d362dea526605beb", "fifo": "9c26fade0c954146",
    "setuid": "79efe2de67779812", "sticky": "e4cee242204cb202", "capability": "a44387ca4e78d54a",
    "capability-name-long": "9026662748c60793", "capability-owner-large": "8be14990ba752475",
    "whiteout": "9bf8a40f85f2b293", "opaque": "2bd8dc250374baf8", "not-utf8": "79cf7faa7aea31fa",
    "utf8": "ce44363b1838790a", "control": "896d50d5b71ffbe6", "name-99-100-101": "de5aed3d2a78558a",
    "name-long": "1da73b99d634ae49", "owner-large": "42c9386ca572b801",
}  # fmt: skip


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_literal_digest(kind: str, format: int) -> None:
    members = KINDS[kind]
    if any(info.pax_headers for info, _ in members):
        format = tarfile.PAX_FORMAT  # GNU's holds no attributes
    once = canonical_bytes(layer(members, format=format))
    assert samples.sha(once).startswith(f"sha256:{DIGESTS[kind]}")
    assert canonical_bytes(once) == once


def test_headers_of_other_writers_give_the_same() -> None:
    """Numbers without an end, with blanks, of GNU's binary form; old signed checksums; the V7 form; times in PAX."""
    info = member("caf\udce9", b"data", uid=7)[0]

    def raw(**fields: tuple[int, bytes]) -> bytes:
        head = bytearray(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        for start, value in fields.values():
            head[start : start + len(value)] = value
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        return bytes(head) + padded(b"data") + END

    plain = canonical_bytes(raw())
    assert samples.sha(plain) == PLAIN_DIGEST
    signed = bytearray(raw())
    signed[148:156] = b"%06o\0 " % (int(signed[148:154], 8) - 256)  # one byte of the name is above 127
    for other in (
        raw(mode=(100, b"   644 \0"), uid=(108, b"     7 \0")),
        raw(size=(124, b"000000000004")),
        raw(size=(124, b"\x80" + (4).to_bytes(11, "big"))),
        raw(magic=(257, b"\0" * 8)),
        raw(times=(345, b"15300275450\0" * 2)),
        raw(kind=(156, b"\0")),
        bytes(signed),
        layer([(member("caf\udce9", b"data", uid=7, pax_headers={"mtime": "1.5", "comment": "x"}))]),
    ):
        assert canonical_bytes(other) == plain


def test_odd_orders_and_names_give_the_same() -> None:
    """A hard link before its file, members that come twice, ./ and / before names, no entry for the top."""
    plain = layer([*KINDS["hardlinks"], folder_member("d")])
    _, first, second = KINDS["hardlinks"]
    odd = layer(
        [
            folder_member("./", 0o700),
            (first[0], None),
            member("b/a", b"replaced below"),
            folder_member("./d/", 0o700),
            second,
            member("/b//z", b"data", mode=0o600, uid=7),
            folder_member("d/../d"),
        ]
    )
    assert canonical_bytes(odd) == canonical_bytes(plain)


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_files_with_holes_are_refused(tmp_path: Path, format: str) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    tar = tmp_path / "a.tar"
    subprocess.run(["tar", f"--format={format}", "-cSf", tar, "-C", tmp_path, "hole"], check=True)
    assert tar.stat().st_size < 1 << 19
    with pytest.raises(BuildError):
        canonical_bytes(tar.read_bytes())


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_files_above_8_gib_are_read_and_written(tmp_path: Path, format: int) -> None:
    size = 9 << 30
    info = member("big", size=size)[0]
    with (tmp_path / "a.tar").open("wb+") as file:
        file.write(info.tobuf(format))
        file.truncate(file.tell() + size + 1024)
        file.seek(0)
        read = layer_tar.read_layer(file)
    (big,) = read.members
    assert big.size == size and read.size == 512 + size + 1024
    assert samples.sha(layer_tar.header(big)) == BIG_DIGEST
    assert tarfile.TarInfo.frombuf(layer_tar.header(big), "utf-8", "strict").size == size


def test_data_of_an_ephemeral_name_survives_in_a_lasting_one() -> None:
    data = layer([member("tmp/x", b"data"), hardlink("keep", "tmp/x")])
    assert canonical_bytes(data) == canonical_bytes(layer([member("keep", b"data")]))


def test_folders_go_only_with_ephemeral_content() -> None:
    kept = [folder_member("opt/empty"), folder_member("opt")]
    with tarfile.open(fileobj=io.BytesIO(canonical_bytes(layer(kept + samples.noise())))) as tar:
        assert tar.getnames() == ["opt", "opt/empty"]


def test_image_has_the_literal_digest_whatever_saved_it(tmp_path: Path) -> None:
    layers = [layer(everything()), layer([member("opt/second", b"2")])]
    noisy = [layer(everything() + samples.noise(), mtime=99), layer([member("opt/second", b"2")], mtime=98)]
    old = samples.save(tmp_path / "old.tar", layers, labels={"b": "1", "a": "2"})
    new = samples.save(tmp_path / "new.tar", noisy, oci=True, labels={"a": "2", "b": "1"})
    results = [sealed(source) for source in (old, new)]
    assert results[0] == results[1]
    image, archive = results[0]
    assert image.config_digest == CONFIG_DIGEST
    (tmp_path / "sealed.tar").write_bytes(archive)
    assert sealed(tmp_path / "sealed.tar")[0].diff_ids == image.diff_ids


def peak(size: int) -> int:
    """Bytes of memory that sealing a layer with a file of that size takes."""
    source = io.BytesIO(member("file", size=size)[0].tobuf() + bytes(size + 1024))
    part = layer_tar.read_layer(source)
    tracemalloc.start()
    for _ in seal.seal([part], {}, os="linux", architecture="amd64", tag="sparkpin/test:1"):
        pass
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_memory_does_not_grow_with_the_layers() -> None:
    assert peak(50 * MIB) < peak(10 * MIB) + MIB


def test_the_parents_layers_pass_through_or_stay_out(tmp_path: Path) -> None:
    below = layer(samples.noise())  # not canonical, and kept so: the parent is what it is
    above = layer_tar.read_layer(io.BytesIO(layer([member("x", b"1")])))
    whole, archive = finished([Slice(io.BytesIO(below), 0, len(below)), above])
    thin, small = finished([samples.sha(below), above])
    assert whole == thin and whole.diff_ids[0] == samples.sha(below)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        raw = tar.extractfile("layers/000.tar")
        assert raw is not None and raw.read() == below
    with tarfile.open(fileobj=io.BytesIO(small)) as tar:
        assert tar.getnames() == ["layers/001.tar", "config.json", "manifest.json"]


def test_a_layer_that_comes_twice_is_read_through_its_link(tmp_path: Path) -> None:
    one = layer([member("x", b"1")])
    image, _ = sealed(samples.save(tmp_path / "a.tar", [one, one], labels={}))
    assert len(image.diff_ids) == 2 and image.diff_ids[0] == image.diff_ids[1]


def test_damage_is_refused() -> None:
    data = bytearray(layer([member("x", b"1"), member("y" * 120, b"2"), member("z", b"3")]))
    for place in (1024, 3):
        torn = bytearray(data)
        torn[place - place % 512 : place - place % 512 + 9] = b"\xff" * 9
        with pytest.raises(BuildError):
            canonical_bytes(bytes(torn))
    for end in (1024 + 100, 1024 + 512, 512):
        with pytest.raises(BuildError):
            canonical_bytes(bytes(data[:end]))


def header(kind: bytes = b"0", **fields: tuple[int, bytes]) -> bytes:
    """One header block. fields: place and bytes of what is to stand there."""
    head = bytearray(samples.tar_header("a", type=kind))
    for start, value in fields.values():
        head[start : start + len(value)] = value
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def told(body: bytes, kind: bytes = b"x") -> bytes:
    """A header about the member after it."""
    return header(kind, size=(124, b"%011o\0" % len(body))) + padded(body)


@pytest.mark.parametrize(
    "data",
    [
        header(size=(124, b"\x80" + b"\xff" * 11)),
        header(uid=(108, b"-000007\0")),
        told(layer_tar.pax_record(b"size", b"-512")) + header(),
        told(layer_tar.pax_record(b"gid", b"9" * 30)) + header(),
        header(b"3", major=(329, b"no\0")),
        header(b"g") + header(),
        header(b"V"),
        told(b"x" * (layer_tar.MAX_HEADER + 1), b"K") + header(),
        told(b"n", b"L") * 10_000 + header(),
    ],
)
def test_what_no_member_has_is_refused(data: bytes) -> None:
    """A layer of a bundle is a stranger's: each of these was an endless loop, another error or any amount of memory."""
    with pytest.raises(BuildError):
        canonical_bytes(data + END)


def test_hard_links_in_a_ring_point_nowhere() -> None:
    ring = [hardlink(a, b) for a, b in ("ab", "bc", "ca", "da", "ee")]
    read = layer_tar.read_layer(io.BytesIO(layer(ring)))
    assert [(m.path, m.kind, m.link) for m in read.members] == [
        (info.name.encode(), layer_tar.HARDLINK, info.linkname.encode()) for info, _ in ring
    ]


def test_a_chain_of_hard_links_is_walked_once() -> None:
    """Not by each of its names: a chain of a million would take days."""

    class Counting(dict[bytes, layer_tar.Member]):
        looks = 0

        def __getitem__(self, path: bytes) -> layer_tar.Member:
            self.looks += 1
            return super().__getitem__(path)

    chain = [layer_tar.Member(b"%03d" % n, layer_tar.HARDLINK, 0, 0, 0, link=b"%03d" % (n - 1)) for n in range(1, 500)]
    for members in (chain, chain[::-1]):
        found = Counting({m.path: m for m in (*members, layer_tar.Member(b"000", b"0", 0o644, 0, 0))})
        assert {m.link for m in layer_tar.link_first(found).values()} == {b"", b"000"}
        assert found.looks < 1_100


def test_a_folder_of_a_tar_is_a_layer_of_its_own() -> None:
    inside = [folder_member("opt"), member("opt/b", b"data"), hardlink("opt/a", "opt/b"), symlink("opt/c", "/etc/x")]

    def moved(info: tarfile.TarInfo, data: bytes | None) -> tuple[tarfile.TarInfo, bytes | None]:
        info.name = f"./layer/{info.name}"
        info.linkname = f"layer/{info.linkname}" if info.islnk() else info.linkname
        return info, data

    plain = canonical_bytes(layer(inside))
    beside = [member("etc/passwd", b"root"), folder_member("layer"), member("layer-2/x", b"no")]
    whole = layer([*beside, *(moved(*each) for each in inside)])
    assert b"".join(map(bytes, layer_tar.read_layer(io.BytesIO(whole), folder=b"layer").chunks())) == plain
    outside = layer([member("etc/passwd", b"root"), hardlink("layer/opt/a", "etc/passwd")])
    with pytest.raises(BuildError):
        layer_tar.read_layer(io.BytesIO(outside), folder=b"layer")
