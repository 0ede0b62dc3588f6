"""A checkpoint while the steps work on it: how it differs from the base; and the files that this comes to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sparkpin.checkpoint.repository import CONFIG, INDEX, ReadRepository, TensorPlace, header_of
from sparkpin.checkpoint.safetensors import ITEM_SIZE, Header, header_in_order


class ByteSpan(NamedTuple):
    """Bytes that are taken over in one go: those of a tensor, and of its neighbours in a file of the base."""

    first: TensorPlace
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file to be written: the base's file of this name, if it has one, with changes.

    added: tensor -> where its bytes come from; dropped: the names that go, also of what is replaced; header, then the
    spans: all bytes of the file.
    """

    path: str
    added: Mapping[str, TensorPlace] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    header: bytes = b""
    spans: tuple[ByteSpan, ...] = ()

    @property
    def size(self) -> int:
        return len(self.header) + sum(span.length for span in self.spans)

    def in_order(self, header: Header | None, base: str) -> list[TensorPlace]:
        """The tensors as the data lies: falling item size, so that each is aligned to it, as loaders that view a
        mapped file need; within that first the base's in the order of its file, so that long runs stay long, then what
        is added, by name. header: of the base's file of this name, if there is one.
        """
        infos = header.tensors.values() if header else ()
        sources = [TensorPlace(base, self.path, info) for info in infos if info.name not in self.dropped]
        sources += [self.added[name] for name in sorted(self.added)]
        return sorted(sources, key=lambda source: -ITEM_SIZE[source.info.dtype])


class SmallFile(NamedTuple):
    """A small file with new content: the index, the config."""

    path: str
    data: bytes


@dataclass
class Draft:
    """donors: the repositories besides the base that give tensors.

    dropped, added: file -> tensor -> what goes, what comes; a file in neither stays as it was published. A tensor in
    both is replaced. listed: tensor -> file for what the index has to list in addition.
    """

    base: ReadRepository
    donors: Mapping[str, ReadRepository]
    config: dict[str, Any]
    dropped: dict[str, dict[str, TensorPlace]] = field(default_factory=dict)
    added: dict[str, dict[str, TensorPlace]] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)

    def new(self) -> dict[str, tuple[str, TensorPlace]]:
        """Tensor -> the file that will hold it, and where it comes from."""
        return {name: (file, place) for file, places in self.added.items() for name, place in places.items()}

    def gone(self) -> set[str]:
        """What leaves the base's files, also because it is replaced."""
        return {name for places in self.dropped.values() for name in places}

    def names(self) -> set[str]:
        """Every tensor of the result."""
        return ({*self.base.listed, *self.base.unlisted} - self.gone()) | self.new().keys()

    def is_listed(self, tensor: str) -> bool:
        return tensor in self.listed or tensor in self.base.listed

    def unlisted(self) -> frozenset[str]:
        """Every tensor of the result that its index leaves out."""
        rest = (self.base.unlisted.keys() - self.gone()) | self.new().keys()
        return frozenset(name for name in rest if not self.is_listed(name))

    def drop(self, source: TensorPlace) -> None:
        self.dropped.setdefault(source.file, {})[source.info.name] = source

    def add(self, file: str, source: TensorPlace, *, listed: bool) -> None:
        self.added.setdefault(file, {})[source.info.name] = source
        if listed:
            self.listed[source.info.name] = file

    def counts(self) -> dict[str, int]:
        """Tensors by what happens to them."""
        gone, new = self.gone(), self.new().keys()
        return {
            "replaced": len(gone & new),
            "added": len(new - gone),
            "listed": len(self.listed.keys() - new),
            "dropped": len(gone - new),
        }

    def shard(self, file: str) -> Shard:
        base = self.base.listing
        shard = Shard(file, self.added.get(file, {}), frozenset(self.dropped.get(file, {})))
        header = header_of(base, file) if file in base.headers else None  # a second of a large model's plan
        sources = shard.in_order(header, base.name)
        metadata = header.metadata if header else {"format": "pt"}
        text = header_in_order((source.info[:3] for source in sources), metadata)
        return replace(shard, header=text, spans=tuple(spans_of(sources, base.name)))

    def texts(self) -> tuple[SmallFile, ...]:
        """Index and config, where they change."""
        index = [SmallFile(INDEX, self.index())] if self.added or self.dropped or self.listed else []
        # Keys in the order of the published file, so that a diff shows the change.
        config = (json.dumps(self.config, indent=2, ensure_ascii=False) + "\n").encode()
        return (*index, *([SmallFile(CONFIG, config)] if self.config != self.base.config else []))

    def index(self) -> bytes:
        """The index with sorted names; its total_size counts the bytes of what it lists, as Transformers writes it."""
        base, new, gone = self.base, self.new(), self.gone()
        lost = sum(p.info.nbytes for places in self.dropped.values() for n, p in places.items() if n in base.listed)
        gained = sum((new[name][1] if name in new else base.found[name]).info.nbytes for name in self.listed)
        old = dict(base.index or {})
        total = {"total_size": base.listed_bytes - lost + gained}
        head = {"metadata": {**(old.pop("metadata", None) or {}), **total}, **old}
        weight_map = {name: file for name, file in base.listed.items() if name not in gone} | self.listed
        # With an indent, the encoder of the standard library takes a second and 60 MB for 100,000 names.
        rows = json.dumps(weight_map, sort_keys=True, ensure_ascii=False, separators=(",\n    ", ": "))[1:-1]
        text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
        return f'{text},\n  "weight_map": {{\n    {rows}\n  }}\n}}\n'.encode()


def spans_of(sources: Iterable[TensorPlace], base: str) -> Iterator[ByteSpan]:
    """As few as there can be. Tensors of other repositories may lie apart, where they were fetched to."""
    first: TensorPlace | None = None
    end = 0
    for source in sources:
        if first and source[:2] == first[:2] and source.repository == base and source.info.begin == end:
            end = source.info.end
            continue
        if first:
            yield ByteSpan(first, end - first.info.begin)
        first, end = source, source.info.end
    if first:
        yield ByteSpan(first, end - first.info.begin)
