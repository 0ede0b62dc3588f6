"""Sealing. The literal digests fail if any change ever changes the bytes of images that exist already."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from sparkpin import canonical, seal
from sparkpin.errors import BuildError

CAPABILITY = {
    canonical.CAPABILITY: b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\xff".decode("utf-8", "surrogateescape")
}
LONG = "opt/" + "a-long-folder-name/" * 6 + "file.txt"
LAYER_DIGEST = "sha256:add9a93a11aa6ee28eaa8383e0d7a87a888067aa3b16300190aa0138ddeaf83f"
CONFIG_DIGEST = "sha256:6425b41d8836351dbe48a016a7fb844bc1872738d015368d2c2f3da2f9b575ed"


def member(name: str, data: bytes | None = None, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    if data is not None:
        info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def everything() -> list[tuple[tarfile.TarInfo, bytes | None]]:
    return [
        member("opt", type=tarfile.DIRTYPE, mode=0o755),
        member("opt/tool", b"#!/bin/sh\n", mode=0o4755, uid=10001, gid=10001, uname="me", gname="us"),
        member("opt/tool-2", type=tarfile.LNKTYPE, linkname="opt/tool", mode=0o4755, uid=10001, gid=10001),
        member("opt/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        member("opt/link", type=tarfile.SYMTYPE, linkname="../etc/passwd"),
        member("opt/ping", b"binary", mode=0o755, pax_headers=CAPABILITY),
        member("opt/.wh.gone", b""),
        member("opt/sub", type=tarfile.DIRTYPE, mode=0o700),
        member("opt/sub/.wh..wh..opq", b"", mode=0o600),
        member(LONG, b"deep"),
        member("opt/caf\udce9", b"latin-1 name"),
        member("opt/to-far", type=tarfile.SYMTYPE, linkname="/" + "x" * 120),
    ]


def noise() -> list[tuple[tarfile.TarInfo, bytes | None]]:
    """What build steps leave behind."""
    return [
        member("etc", type=tarfile.DIRTYPE, mode=0o755),
        member("etc/resolv.conf", b""),
        member("tmp", type=tarfile.DIRTYPE, mode=0o1777),
        member("tmp/uv-123.lock", b""),
        member("root", type=tarfile.DIRTYPE, mode=0o700),
        member("root/.cache", type=tarfile.DIRTYPE, mode=0o700),
        member("root/.cache/x", b"x"),
    ]


def layer(
    members: Iterable[tuple[tarfile.TarInfo, bytes | None]], *, mtime: int = 5, format: int = tarfile.PAX_FORMAT
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            info.mtime = mtime
            tar.addfile(info, io.BytesIO(data) if data is not None else None)
    return out.getvalue()


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def canonical_bytes(data: bytes, **options: str) -> bytes:
    read = canonical.read_layer(io.BytesIO(data), **options)
    out = b"".join(read.chunks())
    assert len(out) == read.size
    return out


def save(path: Path, layers: list[bytes], *, oci: bool = False, packed: bool = False, labels: dict[str, str]) -> Path:
    """An archive as `docker save` writes it: up to 24, or from 25 on (`oci`)."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-11-21T08:00:00.123Z" if oci else "2026-11-20T07:00:00Z",
        "config": {"Hostname": "abc", "Labels": labels, "Env": ["B=1", "A=2"], "Cmd": None, "Image": "x"},
        "container_config": {"Hostname": "def"},
        "history": [{"created": "2026-11-21T08:00:00Z", "created_by": "RUN something"}],
        "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in layers]},
    }
    blobs = [gzip.compress(data) if packed else data for data in layers]
    body = json.dumps(config).encode()
    names = [f"blobs/sha256/{sha(blob)[7:]}" if oci else f"{number}/layer.tar" for number, blob in enumerate(blobs)]
    config_name = f"blobs/sha256/{sha(body)[7:]}" if oci else f"{sha(body)[7:]}.json"
    with tarfile.open(path, "w") as tar:
        done: dict[bytes, str] = {}
        for name, blob in zip(names, blobs, strict=True):
            info = tarfile.TarInfo(name)
            if blob in done and not oci:  # 20.10 writes a layer that comes twice as a link
                info.type, info.linkname = tarfile.SYMTYPE, f"../{done[blob]}"
                tar.addfile(info)
                continue
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
            done[blob] = name
        for name, data in (
            (config_name, body),
            ("manifest.json", json.dumps([{"Config": config_name, "Layers": names, "RepoTags": ["a:b"]}]).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sealed(source: Path, target: Path, **options: object) -> seal.Sealed:
    with target.open("wb") as file:
        return seal.seal_archive(source, file.write, tag="sparkpin/test:1", **options)  # type: ignore[arg-type]


def test_layer_has_the_literal_digest() -> None:
    assert sha(canonical_bytes(layer(everything()))) == LAYER_DIGEST


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("seed", range(3))
def test_order_time_names_and_noise_do_not_count(seed: int, format: int) -> None:
    members = [m for m in everything() + noise() if format == tarfile.PAX_FORMAT or not m[0].pax_headers]
    plain = [m for m in everything() if format == tarfile.PAX_FORMAT or not m[0].pax_headers]
    links = [m for m in members if m[0].islnk()]
    others = [m for m in members if not m[0].islnk()]
    random.Random(seed).shuffle(others)
    assert canonical_bytes(layer(others + links, mtime=10**9 + seed, format=format)) == canonical_bytes(layer(plain))


def test_canonical_bytes_are_a_fixed_point() -> None:
    once = canonical_bytes(layer(everything() + noise()))
    assert canonical_bytes(once) == once


def test_canonical_tar_holds_what_the_layer_held() -> None:
    with tarfile.open(
        fileobj=io.BytesIO(canonical_bytes(layer(everything()))), encoding="utf-8", errors="surrogateescape"
    ) as tar:
        found = {info.name: info for info in tar}
        assert list(found) == sorted(found, key=lambda n: n.encode("utf-8", "surrogateescape").split(b"/"))
        assert {info.mtime for info in found.values()} == {1767225600}
        assert {(info.uname, info.gname) for info in found.values()} == {("", "")}
        assert found["opt/tool"].mode == 0o4755 and found["opt/tool"].uid == 10001
        assert found["opt/tool-2"].islnk() and found["opt/tool-2"].linkname == "opt/tool"
        assert found["opt/null"].ischr() and (found["opt/null"].devmajor, found["opt/null"].devminor) == (1, 3)
        assert found["opt/link"].linkname == "../etc/passwd"
        assert found["opt/to-far"].linkname == "/" + "x" * 120
        assert found["opt/ping"].pax_headers[canonical.CAPABILITY] == CAPABILITY[canonical.CAPABILITY]
        assert {"opt/.wh.gone", "opt/sub/.wh..wh..opq"} <= set(found)
        for name, data in ((LONG, b"deep"), ("opt/caf\udce9", b"latin-1 name"), ("opt/tool-2", b"#!/bin/sh\n")):
            file = tar.extractfile(found[name])
            assert file is not None and file.read() == data


def test_first_name_of_a_hard_link_carries_the_data() -> None:
    one = layer([member("b", b"data", mode=0o600), member("a", type=tarfile.LNKTYPE, linkname="b", mode=0o600)])
    two = layer([member("a", b"data", mode=0o600), member("b", type=tarfile.LNKTYPE, linkname="a", mode=0o600)])
    chain = layer(
        [
            member("b", b"data", mode=0o600),
            member("tmp/x", type=tarfile.LNKTYPE, linkname="b"),
            member("a", type=tarfile.LNKTYPE, linkname="tmp/x"),
        ]
    )
    assert canonical_bytes(one) == canonical_bytes(two) == canonical_bytes(chain)
    with tarfile.open(fileobj=io.BytesIO(canonical_bytes(one))) as tar:
        assert [(info.name, info.islnk()) for info in tar] == [("a", False), ("b", True)]


def test_data_of_an_ephemeral_name_survives_in_a_lasting_one() -> None:
    data = layer([member("tmp/x", b"data"), member("keep", type=tarfile.LNKTYPE, linkname="tmp/x")])
    assert canonical_bytes(data) == canonical_bytes(layer([member("keep", b"data")]))


def test_folders_go_only_with_ephemeral_content() -> None:
    kept = [member("opt/empty", type=tarfile.DIRTYPE, mode=0o755), member("opt", type=tarfile.DIRTYPE, mode=0o755)]
    with tarfile.open(fileobj=io.BytesIO(canonical_bytes(layer(kept + noise())))) as tar:
        assert tar.getnames() == ["opt", "opt/empty"]


def test_below_takes_one_tree() -> None:
    tree = [member("m", type=tarfile.DIRTYPE), member("m/a", b"x"), member("m/b", type=tarfile.LNKTYPE, linkname="m/a")]
    other = [member("mm/c", b"not this"), member("top", b"nor this")]
    plain = [member("a", b"x"), member("b", type=tarfile.LNKTYPE, linkname="a")]
    assert canonical_bytes(layer(tree + other), below="m") == canonical_bytes(layer(plain))


def test_large_owner_and_size_fit_the_header() -> None:
    with tarfile.open(fileobj=io.BytesIO(canonical_bytes(layer([member("a", b"x", uid=3_000_000_000)])))) as tar:
        assert tar.next().uid == 3_000_000_000  # type: ignore[union-attr]
    assert canonical.number(9 << 30, 12) == b"\x80" + (9 << 30).to_bytes(11, "big")


@pytest.mark.parametrize("length", [*range(85, 110), 990, 999, 1000])
def test_pax_record_counts_its_own_length(length: int) -> None:
    record = canonical.pax_record(b"k", b"v" * length)
    assert int(record.split(b" ", 1)[0]) == len(record)


def test_image_has_the_literal_digest_whatever_saved_it(tmp_path: Path) -> None:
    layers = [layer(everything()), layer([member("opt/second", b"2")])]
    noisy = [layer(everything() + noise(), mtime=99), layer([member("opt/second", b"2")], mtime=98)]
    old = save(tmp_path / "old.tar", layers, labels={"b": "1", "a": "2"})
    new = save(tmp_path / "new.tar", noisy, oci=True, labels={"a": "2", "b": "1"})
    packed = save(tmp_path / "packed.tar", noisy, oci=True, packed=True, labels={"a": "2", "b": "1"})
    results = [sealed(source, tmp_path / f"{source.stem}-sealed.tar") for source in (old, new, packed)]
    assert {result.config_digest for result in results} == {CONFIG_DIGEST}
    outputs = [(tmp_path / f"{name}-sealed.tar").read_bytes() for name in ("old", "new", "packed")]
    assert outputs[0] == outputs[1] == outputs[2]


def test_sealing_a_sealed_image_changes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "a.tar", [layer(everything() + noise())], labels={})
    first = sealed(source, tmp_path / "b.tar")
    again = sealed(tmp_path / "b.tar", tmp_path / "c.tar")
    assert first == again
    assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "c.tar").read_bytes()


def test_config_keeps_only_what_runs(tmp_path: Path) -> None:
    result = sealed(save(tmp_path / "a.tar", [layer([member("x", b"")])], labels={"k": "v"}), tmp_path / "b.tar")
    config = json.loads(result.config)
    assert config["config"] == {"Env": ["B=1", "A=2"], "Labels": {"k": "v"}}
    assert config["created"] == "2026-01-01T00:00:00Z"
    assert sorted(config) == ["architecture", "config", "created", "history", "os", "rootfs"]


def test_the_parents_layers_pass_through_or_stay_out(tmp_path: Path) -> None:
    below = layer(noise())  # not canonical, and kept so: the parent is what it is
    source = save(tmp_path / "a.tar", [below, layer([member("x", b"1")])], labels={})
    whole = sealed(source, tmp_path / "whole.tar", parent=[sha(below)])
    thin = sealed(source, tmp_path / "thin.tar", parent=[sha(below)], leave_out=True)
    assert whole == thin and whole.diff_ids[0] == sha(below)
    with tarfile.open(tmp_path / "whole.tar") as tar:
        raw = tar.extractfile("layers/000.tar")
        assert raw is not None and raw.read() == below
    with tarfile.open(tmp_path / "thin.tar") as tar:
        assert tar.getnames() == ["layers/001.tar", "config.json", "manifest.json"]


def test_an_image_that_stands_on_something_else_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "a.tar", [layer([member("x", b"1")])], labels={})
    with pytest.raises(BuildError, match="does not stand on its parent"):
        sealed(source, tmp_path / "b.tar", parent=["sha256:" + "0" * 64])


def test_layers_without_content_go(tmp_path: Path) -> None:
    one = layer([member("x", b"1")])
    with_empty = save(tmp_path / "a.tar", [one, layer(noise()), layer([])], labels={})
    without = save(tmp_path / "b.tar", [one], labels={})
    assert sealed(with_empty, tmp_path / "c.tar") == sealed(without, tmp_path / "d.tar")


def test_a_layer_that_comes_twice_is_read_through_its_link(tmp_path: Path) -> None:
    one = layer([member("x", b"1")])
    result = sealed(save(tmp_path / "a.tar", [one, one], labels={}), tmp_path / "b.tar")
    assert len(result.diff_ids) == 2 and result.diff_ids[0] == result.diff_ids[1]


def test_a_torn_archive_is_told(tmp_path: Path) -> None:
    source = save(tmp_path / "a.tar", [layer([member("x", b"1")])], labels={})
    with tarfile.open(source) as tar:
        end = tar.getmember("manifest.json").offset
    source.write_bytes(source.read_bytes()[:end])
    with pytest.raises(BuildError, match=r"manifest\.json"):
        sealed(source, tmp_path / "b.tar")


def test_unknown_member_kinds_are_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="tar type"):
        canonical_bytes(layer([member("x", type=b"V")]))
