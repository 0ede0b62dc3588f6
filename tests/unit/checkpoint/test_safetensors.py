"""The safetensors container: what is refused, and that writing is a function of the content alone."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from checkpoint_samples import read_header

from sparkpin.checkpoint.safetensors import TensorSource, header_in_order, parse_header, write_file
from sparkpin.core.errors import IntegrityError


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sources() -> list[TensorSource]:
    return [
        TensorSource("b.weight", "F8_E4M3", (3,), (b"\x01\x02\x03",)),
        TensorSource("a.weight", "BF16", (2, 1), (b"\x04\x05", b"\x06\x07")),
        TensorSource("c.scale", "F32", (1,), iter([b"\0\0\x80\x3f"])),
        TensorSource("empty", "I64", (0, 4), ()),
    ]


def test_written_file_reads_back_with_aligned_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, sources(), {"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.metadata == {"format": "pt"} and header.data_start % 8 == 0
    assert {name: data[t.begin : t.end] for name, t in header.tensors.items()} == {
        "b.weight": b"\x01\x02\x03",
        "a.weight": b"\x04\x05\x06\x07",
        "c.scale": b"\0\0\x80\x3f",
        "empty": b"",
    }
    assert [t.name for t in header.tensors.values()] == ["empty", "c.scale", "a.weight", "b.weight"]
    assert (header.tensors["a.weight"].dtype, header.tensors["a.weight"].shape) == ("BF16", (2, 1))


def test_bytes_do_not_depend_on_the_order_of_the_sources(tmp_path: Path) -> None:
    write_file(tmp_path / "1", sources(), {"format": "pt", "a": "b"})
    write_file(tmp_path / "2", reversed(sources()), {"a": "b", "format": "pt"})
    one, two = ((tmp_path / name).read_bytes() for name in "12")
    assert one == two
    # Changes only if what we write changes: then every checkpoint's identity changes too.
    assert hashlib.sha256(one).hexdigest() == "cb21b0cd398638baac259ce3307239e96de2867024a761b59aea3dceadb26f69"


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\0\0",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 50) + b"{}",
        packed(b" {}"),
        packed(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"),
        packed(b'{"a":' + b"[" * 200_000 + b"}"),
        packed({"a": entry(shape=[0, 1 << 64], offsets=[0, 0])}),
        packed({"a": entry() | {"more": 1}}),
        packed({"a": entry("U7")}),
        packed({"a": entry(shape=[-2])}),
        packed({"a": entry(shape=[1 << 40, "a" * 1024])}),
        packed({"a": entry(offsets=[0, 3])}),
        packed({"a": entry(offsets=[2, 0])}),
        packed({"a": entry(), "b": entry(offsets=[1, 3])}),
        packed({"a": entry(), "b": entry(offsets=[3, 5])}),
        packed({"__metadata__": {"a": 1}}),
        packed({"a\ud800": entry()}),  # it could be read, and not be written again
    ],
)
def test_bad_header_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^x\.safetensors: "):
        parse_header(data, origin="x.safetensors")


@pytest.mark.parametrize("name", ["a:b", "a\u20ac", 'quote"', "data_offsets"])
def test_any_name_may_be_a_tensors(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / "x", [TensorSource(name, "U8", (2,), (b"ab",))], {"a:b": "c:d", "e": name})
    header = read_header(tmp_path / "x")
    assert (list(header.tensors), header.metadata) == ([name], {"a:b": "c:d", "e": name})
    text = json.dumps({name: entry()}).encode()  # as the standard library escapes it
    assert list(parse_header(packed(text)).tensors) == [name]


@pytest.mark.parametrize("data", [b"\1", b"\1\2\3"])
def test_file_of_the_wrong_size_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(packed({"a": entry()}, data))
    with pytest.raises(IntegrityError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize("chunks", [(b"\1",), (b"\1\2\3",)])
def test_source_of_the_wrong_length_keeps_the_old_file(tmp_path: Path, chunks: tuple[bytes, ...]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(IntegrityError, match="a"):
        write_file(path, [TensorSource("a", "BF16", (1,), chunks)])
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_no_header_names_a_tensor_twice_or_as_its_metadata(names: tuple[str, ...]) -> None:
    with pytest.raises(IntegrityError):
        header_in_order([(name, "U8", (2,)) for name in names])
