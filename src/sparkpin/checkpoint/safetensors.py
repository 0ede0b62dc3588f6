"""The safetensors container: strict header parsing and a deterministic streaming writer.

A file is ``u64 little-endian N``, ``N`` bytes of JSON, then the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). The reference writer emits ``__metadata__`` in random order, so two saves
of the same tensors differ; :func:`write_file` sorts everything and gives the same bytes for the same input. The
reference reader opens complete files only; here a header is checked before a byte of its tensors is fetched.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
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
"""The reference reader's limit: what passes here loads there."""

_ALIGN = 8
_METADATA = "__metadata__"
_LARGEST = (1 << 64) - 1  # the reference reader counts in 64 bits
_NEXT = "delete the file and run `invoke build --fetch-only`, which gets it again"


class TensorInfo(NamedTuple):
    """One tensor of a file; ``begin`` and ``end`` are absolute byte offsets in that file.

    A tuple: a checkpoint has more than 100,000 of them, and a frozen dataclass takes four times as long to create.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Header(NamedTuple):
    """A parsed header. ``tensors`` is in file order of the data."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


class TensorSource(NamedTuple):
    """One tensor to write. ``chunks`` is iterated once, when the writer reaches this tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[bytes | bytearray | memoryview]


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor. Raises IntegrityError for an unknown dtype."""
    if dtype not in ITEM_SIZE:
        raise IntegrityError(f"got dtype {dtype!r}, expected one of {', '.join(ITEM_SIZE)}", next_step=_NEXT)
    return ITEM_SIZE[dtype] * math.prod(shape)


def header_length(prefix: bytes, *, origin: str = "safetensors") -> int:
    """Length in bytes of the JSON header, from the file's first eight bytes."""
    if len(prefix) < PREFIX_BYTES:
        raise _bad(origin, f"got a file of {len(prefix)} bytes, expected at least {PREFIX_BYTES}")
    (length,) = struct.unpack_from("<Q", prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _bad(origin, f"got a header of {length} bytes, expected 2 to {MAX_HEADER_BYTES}")
    return int(length)


@functools.lru_cache(maxsize=8)  # a plan reads those of a few large files several times
def parse_header(data: bytes, *, file_size: int | None = None, origin: str = "safetensors") -> Header:
    """Parse the first bytes of a file (length prefix and JSON; what follows is ignored).

    ``file_size`` is checked against the last tensor's end if given; ``origin`` names the file in messages.
    Raises IntegrityError for anything that the reference reader would refuse, and for a repeated key.
    """
    data_start = PREFIX_BYTES + header_length(data, origin=origin)
    if len(data) < data_start:
        raise _bad(origin, f"the header ends after {len(data)} bytes, expected {data_start}")
    raw = _load_json(data[PREFIX_BYTES:data_start], origin)
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(origin, f"got {_METADATA} {metadata!r:.80}, expected a map of strings")
    infos = [_tensor_info(name, entry, data_start, origin) for name, entry in raw.items()]
    infos.sort(key=itemgetter(3, 4, 0))  # begin, end, name
    position = data_start
    for info in infos:
        if info.begin != position:
            raise _bad(origin, f"tensor {info.name!r}: got begin at byte {info.begin}, expected {position} (no gaps)")
        position = info.end
    if file_size is not None and file_size != position:
        raise _bad(origin, f"got a file of {file_size} bytes, expected {position} (end of the last tensor)")
    return Header({info.name: info for info in infos}, metadata, data_start)


def read_header_bytes(path: Path) -> bytes:
    """Length prefix and JSON of a file on disk."""
    with path.open("rb") as file:
        prefix = file.read(PREFIX_BYTES)
        return prefix + file.read(header_length(prefix, origin=str(path)))


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, tuple[str, ...]]:
    """The header's bytes for ``(name, dtype, shape)``, and the order of the tensors' data.

    Data is laid out by falling item size, then by name, so that every tensor is aligned to its item size, which loaders
    that view a mapped file need. Depends on the set of tensors, not on their order.
    """
    specs = sorted(tensors, key=lambda spec: (-tensor_nbytes(spec[1], ()), spec[0]))
    return header_in_order(specs, metadata), tuple(name for name, _, _ in specs)


def header_in_order(
    specs: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length prefix, JSON and padding of a file whose data lies in the given order. JSON keys are sorted by name."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in specs:
        if name in entries or name == _METADATA:
            raise IntegrityError(f"tensor {name!r}: got it twice or under a reserved name, expected each name once")
        end = position + tensor_nbytes(dtype, shape)
        entries[name] = {"data_offsets": (position, end), "dtype": dtype, "shape": shape}
        position = end
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, sources: Iterable[TensorSource], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file in constant memory: same tensors and metadata, same bytes, whatever the order of ``sources``.

    Each source's chunks are consumed in the order of the data (see :func:`build_header`). The file appears under
    ``path`` only when it is complete and on disk. Raises IntegrityError if a source yields more or fewer bytes than its
    dtype and shape require.
    """
    given = list(sources)
    by_name = {source.name: source for source in given}
    header, order = build_header(((source.name, source.dtype, source.shape) for source in given), metadata)
    with atomic_file(path) as file:
        file.write(header)
        for source in map(by_name.__getitem__, order):
            expected, got = tensor_nbytes(source.dtype, source.shape), 0
            for chunk in source.chunks:
                got += memoryview(chunk).nbytes
                file.write(chunk)
            if got != expected:
                raise _bad(str(path), f"tensor {source.name!r}: got {got} bytes, expected {expected}")


def _load_json(text: bytes, origin: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"a key appears twice among {', '.join(sorted(key for key, _ in pairs))[:200]}")
        return found

    try:
        if not text.startswith(b"{"):  # the reference reader refuses a space, too
            raise ValueError(f"it begins with {text[:1]!r}")
        loaded = dict(json.loads(text.decode(), object_pairs_hook=unique))
        if b"\\u" in text:
            json.dumps(loaded, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written again
        return loaded
    except (ValueError, RecursionError) as error:
        raise _bad(origin, f"the header is no JSON object: {error}") from error


def _tensor_info(name: str, entry: Any, data_start: int, origin: str) -> TensorInfo:
    """A tensor of a header. Its offsets count from the start of the data. Called more than 100,000 times."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        are_numbers = True  # before they are multiplied: a number times a text fills the memory
        for number in (*shape, begin, end):
            are_numbers = are_numbers and type(number) is int and 0 <= number <= _LARGEST
        if are_numbers and len(entry) == 3 and end - begin == ITEM_SIZE[dtype] * math.prod(shape):
            return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)
    except (KeyError, TypeError, ValueError):
        pass
    dtypes = ", ".join(ITEM_SIZE)
    raise _bad(origin, f"tensor {name!r}: got {entry!r:.200}, expected a dtype of {dtypes}, shape and fitting offsets")


def _bad(origin: str, cause: str) -> IntegrityError:
    return IntegrityError(f"{origin}: {cause}", next_step=_NEXT)
