"""The safetensors container: strict header parsing and a deterministic streaming writer.

A file is ``u64 little-endian N``, ``N`` bytes of JSON, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). The reference writer emits ``__metadata__`` in random order, so two saves
of the same tensors differ; :func:`write_file` sorts everything and gives the same bytes for the same input.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import atomic_file

ITEM_SIZE: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of each dtype name. Sub-byte dtypes (F4, F6) are refused: no model here uses them."""

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The reference reader's limit, kept so that whatever passes here loads there."""

_ALIGN = 8
_METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_LARGEST = (1 << 64) - 1  # the reference reader counts in 64 bits
_NEXT = "delete the file and run `invoke build --fetch-only`, which gets it again"


class TensorInfo(NamedTuple):
    """One tensor of a file; ``begin`` and ``end`` are absolute byte offsets in that file.

    A tuple: a checkpoint has more than 100,000 of them, and a frozen dataclass takes four times as long to make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``tensors`` is in file order of the data."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor to write. ``chunks`` is iterated once, when the writer reaches this tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[bytes | bytearray | memoryview]


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises IntegrityError for a dtype that is not known."""
    if dtype not in ITEM_SIZE:
        raise IntegrityError(f"dtype {dtype!r} is not known, wanted one of {', '.join(ITEM_SIZE)}", next_step=_NEXT)
    return ITEM_SIZE[dtype] * math.prod(shape)


def header_length(prefix: bytes, *, origin: str = "safetensors") -> int:
    """Length in bytes of the JSON header, from the file's first eight bytes."""
    if len(prefix) < PREFIX_BYTES:
        raise _bad(origin, f"the file has {len(prefix)} bytes, wanted at least {PREFIX_BYTES}")
    (length,) = struct.unpack_from("<Q", prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _bad(origin, f"header length {length}, wanted 2 to {MAX_HEADER_BYTES}")
    return int(length)


def parse_header(data: bytes, *, file_size: int | None = None, origin: str = "safetensors") -> Header:
    """Parse the first bytes of a file (length prefix and JSON; what follows is ignored).

    ``file_size`` is checked against the last tensor's end if given; ``origin`` names the file in messages.
    Raises IntegrityError for anything that the reference reader would refuse, and for a key that stands there twice.
    """
    length = header_length(data, origin=origin)
    data_start = PREFIX_BYTES + length
    if len(data) < data_start:
        raise _bad(origin, f"the header ends after {len(data)} bytes, wanted {data_start}")
    raw = _load_json(data[PREFIX_BYTES:data_start], origin)
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(origin, f"{_METADATA} is not a map of strings")
    infos = _tensor_infos(raw, data[PREFIX_BYTES:data_start], data_start, origin)
    infos.sort(key=itemgetter(3, 4, 0))  # begin, end, name
    position = data_start
    for info in infos:
        if info[3] != position:
            kind = "overlaps what is before it" if info.begin < position else "leaves a gap before it"
            raise _bad(origin, f"tensor {info.name!r} {kind}: begins at byte {info.begin}, wanted {position}")
        position = info[4]
    if file_size is not None and file_size != position:
        raise _bad(origin, f"the file has {file_size} bytes, wanted {position} (end of the last tensor)")
    return Header({info.name: info for info in infos}, metadata, data_start)


def read_header_bytes(path: Path) -> bytes:
    """The first bytes of a file on disk: length prefix and JSON."""
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        return prefix + file.read(header_length(prefix, origin=str(path)))


def read_header(path: Path) -> Header:
    """Parse the header of a file on disk and check it against the file's size."""
    return parse_header(read_header_bytes(path), file_size=path.stat().st_size, origin=str(path))


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """The header's bytes for ``(name, dtype, shape)``, and the order of the tensors' data.

    Data is laid out by falling item size, then by name, so that every tensor is aligned to its item size, which loaders
    that view a mapped file need. Depends on the set of tensors, not on their order.
    """
    specs = sorted(tensors, key=lambda spec: (-item_size(spec[1]), spec[0]))
    return header_in_order(specs, metadata), tuple(name for name, _, _ in specs)


def header_in_order(
    specs: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length prefix, JSON and padding of a file whose data lies in the given order. JSON keys are sorted by name."""
    entries: dict[str, str] = {}
    position = 0
    for name, dtype, shape in specs:
        if name in entries or name == _METADATA:
            raise IntegrityError(f"tensor name {name!r} is given twice or reserved", next_step="report this as a bug")
        end = position + tensor_nbytes(dtype, shape)
        sizes = ",".join(map(str, shape))
        entries[name] = f'{{"data_offsets":[{position},{end}],"dtype":"{dtype}","shape":[{sizes}]}}'
        position = end
    if metadata:
        entries[_METADATA] = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # Put together by hand: the encoder of the standard library needs five objects for each tensor.
    body = ",".join(f"{encode_basestring(name)}:{entries[name]}" for name in sorted(entries))
    text = f"{{{body}}}".encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, sources: Iterable[TensorSource], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file in constant memory: same tensors and metadata, same bytes, whatever the order of ``sources``.

    Each source's chunks are consumed in the order of the data (see :func:`build_header`). The file appears under
    ``path`` only when it is whole and on disk. Raises IntegrityError if a source yields more or fewer bytes than its
    dtype and shape say.
    """
    by_name: dict[str, TensorSource] = {}
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    for source in sources:
        by_name[source.name] = source
        specs.append((source.name, source.dtype, source.shape))
    header, order = build_header(specs, metadata)
    with atomic_file(path) as file:
        file.write(header)
        for name in order:
            source = by_name[name]
            wanted = tensor_nbytes(source.dtype, source.shape)
            got = 0
            for chunk in source.chunks:
                got += memoryview(chunk).nbytes
                file.write(chunk)
            if got != wanted:
                raise _bad(str(path), f"tensor {name!r} yielded {got} bytes, wanted {wanted}")


def item_size(dtype: str) -> int:
    return tensor_nbytes(dtype, ())


def _load_json(text: bytes, origin: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise _bad(origin, f"key {twice!r} appears twice in the header")
        return found

    def refuse(number: str) -> None:
        raise _bad(origin, f"{number} stands in the header, wanted whole numbers")

    if not text.startswith(b"{"):
        raise _bad(origin, f"the header begins with {text[:1]!r}, wanted b'{{'")
    try:
        loaded: dict[str, Any] = json.loads(
            text.decode(), parse_float=refuse, parse_constant=refuse, object_pairs_hook=unique
        )
        if b"\\u" in text:
            json.dumps(loaded, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise _bad(origin, f"the header is not JSON: {error}") from error
    return loaded


def _tensor_infos(raw: Mapping[str, Any], text: bytes, data_start: int, origin: str) -> list[TensorInfo]:
    """A loop with as little in it as there can be: it runs more than 100,000 times for a checkpoint.

    Few tensors differ in dtype and shape: these are checked once, and one shape is kept for all that are equal.
    """
    infos: list[TensorInfo] = []
    booleans = b"true" in text or b"false" in text  # equal to 1 and 0, and in no header that is right
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], int]] = {}
    new = tuple.__new__
    for name, entry in raw.items():
        try:
            shape, size = known[(entry["dtype"], *entry["shape"])]
            begin, end = entry["data_offsets"]
            if end - begin != size or len(entry) != 3 or booleans:
                raise KeyError
        except (KeyError, TypeError, ValueError):
            begin, end = _check_entry(name, entry, origin)
            shape, size = tuple(entry["shape"]), end - begin
            known[(entry["dtype"], *shape)] = shape, size
        infos.append(new(TensorInfo, (name, entry["dtype"], shape, data_start + begin, data_start + end)))
    return infos


def _check_entry(name: str, entry: object, origin: str) -> tuple[int, int]:
    """Begin and end of a tensor that holds together, counted from the data's start."""
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        raise _bad(origin, f"tensor {name!r} has not exactly the keys {sorted(_ENTRY_KEYS)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise _bad(origin, f"tensor {name!r} has dtype {dtype!r}, wanted one of {', '.join(ITEM_SIZE)}")
    if not _naturals(shape):
        raise _bad(origin, f"tensor {name!r} has shape {shape!r}, wanted a list of whole numbers below 2**64")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _bad(origin, f"tensor {name!r} has data_offsets {offsets!r}, wanted [begin, end]")
    begin, end = offsets
    wanted = tensor_nbytes(dtype, shape)
    if end - begin != wanted:
        raise _bad(origin, f"tensor {name!r} ({dtype}, shape {shape}) takes {end - begin} bytes, wanted {wanted}")
    return begin, end


def _naturals(value: object) -> bool:
    # bool is an int in Python but not in the format.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST for item in value)


def _bad(origin: str, cause: str) -> IntegrityError:
    return IntegrityError(f"{origin}: {cause}", next_step=_NEXT)
