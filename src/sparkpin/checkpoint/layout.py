"""What a draft comes to in files: shards to write, index and config; and how a shard's data lies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.repository import CONFIG, INDEX, TensorPlace
from sparkpin.checkpoint.safetensors import Header, header_in_order, item_size


class Link(NamedTuple):
    """A file that is taken over unchanged. path: in the checkpoint; of: its repository where that is not the base: then
    it lies in a folder of that name."""

    path: str
    size: int
    of: str = ""


class ByteSpan(NamedTuple):
    """Bytes that are taken over in one go: those of a tensor, and of its neighbours in a file of the base."""

    first: TensorPlace
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file that is written anew: the base's file of this name, if it has one, with changes.

    added: tensor -> where its bytes come from; dropped: the names that go, also of what is replaced; header, then the
    spans: all bytes of the file.
    """

    path: str
    in_base: bool
    added: Mapping[str, TensorPlace] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    header: bytes = b""
    spans: tuple[ByteSpan, ...] = ()

    @property
    def size(self) -> int:
        return len(self.header) + sum(span.length for span in self.spans)


class SmallFile(NamedTuple):
    """A small file with new content: the index, the config."""

    path: str
    data: bytes


def in_order(shard: Shard, header: Header | None, base: str) -> list[TensorPlace]:
    """The tensors of a shard as its data lies: falling item size, so that each is aligned to it, as loaders that view
    a mapped file need; within that first the base's in the order of its file, so that long runs stay long, then what
    is added, by name.
    """
    infos = header.tensors.values() if header else ()
    kept = [TensorPlace(base, shard.path, info) for info in infos if info.name not in shard.dropped]
    sources = kept + [shard.added[name] for name in sorted(shard.added)]
    sources.sort(key=lambda source: -item_size(source.info.dtype))
    return sources


def spans_of(sources: Iterable[TensorPlace], base: str) -> Iterator[ByteSpan]:
    """As few as there can be. Tensors of other repositories may lie apart, where they were fetched to."""
    first, end = None, 0
    for source in sources:
        repository, file, info, of = source
        together = first and not first.of and first.file == file and first.repository == repository == base
        if together and not of and end == info.begin:
            end = info.end
            continue
        if first:
            yield ByteSpan(first, end - first.info.begin)
        first, end = source, info.end
    if first:
        yield ByteSpan(first, end - first.info.begin)


def shards_of(draft: Draft) -> tuple[Shard, ...]:
    """The files that are written anew, sorted."""
    return tuple(lay_out_shard(draft, file) for file in sorted({*draft.added, *draft.dropped}))


def lay_out_shard(draft: Draft, file: str) -> Shard:
    base = draft.base
    old = base.header(file) if file in base.listing.headers else None
    metadata = old.metadata if old else {"format": "pt"}
    shard = Shard(file, old is not None, draft.added.get(file, {}), frozenset(draft.dropped.get(file, {})))
    sources = in_order(shard, old, base.name)
    header = header_in_order(((s.info.name, s.info.dtype, s.info.shape) for s in sources), metadata)
    return replace(shard, header=header, spans=tuple(spans_of(sources, base.name)))


def texts_of(draft: Draft) -> tuple[SmallFile, ...]:
    """Index and config, where they change."""
    texts = []
    if draft.added or draft.dropped or draft.listed:
        texts.append(SmallFile(INDEX, index_bytes(draft)))
    if draft.config != draft.base.config:
        texts.append(SmallFile(CONFIG, json_bytes(draft.config)))
    return tuple(texts)


def index_bytes(draft: Draft) -> bytes:
    """The index with sorted names; its total_size counts the bytes of what it lists, as Transformers writes it."""
    old = dict(draft.base.index or {})
    published, listed = draft.base.listed, draft.listed
    total = draft.base.listed_bytes
    gone: set[str] = set()
    for file, tensors in draft.dropped.items():
        gone |= tensors.keys()
        total -= sum(s.info.nbytes for name, s in tensors.items() if published.get(name) == file)
    total += sum(draft.source(name)[1].info.nbytes for name in listed)
    metadata = {**(old.pop("metadata", None) or {}), "total_size": total}
    names = sorted([*(name for name in published if name not in gone and name not in listed), *listed])
    # Line by line: for 100,000 names the encoder of the standard library takes a second and 60 MB.
    out = bytearray(b"{\n")
    for key, value in {"metadata": metadata, **old}.items():
        out += f"  {encode_basestring(key)}: {indented(value)},\n".encode()
    out += b'  "weight_map": {\n'
    for name in names:
        out += f"    {encode_basestring(name)}: {encode_basestring(listed.get(name) or published[name])},\n".encode()
    out[-2:] = b"\n  }\n}\n"
    return bytes(out)


def indented(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Indented, with the keys in the order of the published file, so that a diff shows only what was changed."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
