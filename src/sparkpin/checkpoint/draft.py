"""A checkpoint while the steps work on it: how it differs from the base, as little as is different."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkpin.checkpoint.repository import ReadRepository, TensorPlace


@dataclass
class Draft:
    """donors: the repositories beside the base that give tensors.

    dropped, added: file -> tensor -> what goes, what comes; a file in neither stays as it was published. A tensor in
    both is replaced. listed: tensor -> file for what the index has to list in addition.
    """

    base: ReadRepository
    donors: Mapping[str, ReadRepository]
    config: dict[str, Any]
    dropped: dict[str, dict[str, TensorPlace]] = field(default_factory=dict)
    added: dict[str, dict[str, TensorPlace]] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, base: ReadRepository, donors: Mapping[str, ReadRepository]) -> Draft:
        """The `copy` step: the published repository as it is."""
        return cls(base, donors, copy.deepcopy(dict(base.config)))

    def file_of(self, tensor: str) -> str | None:
        """The file that will hold a tensor."""
        for file, tensors in self.added.items():
            if tensor in tensors:
                return file
        published = self.base.file_of(tensor)
        return None if published is None or tensor in self.dropped.get(published, {}) else published

    def source(self, tensor: str) -> tuple[str, TensorPlace]:
        """The file that will hold a tensor, and where its bytes are; of the base's tensors only those asked for."""
        for file, tensors in self.added.items():
            if tensor in tensors:
                return file, tensors[tensor]
        source = self.base.found[tensor]
        return source.file, source

    def names(self) -> Iterator[str]:
        """Every tensor of the result."""
        gone = {name for tensors in self.dropped.values() for name in tensors}
        for names in (self.base.listed, self.base.unlisted):
            yield from (name for name in names if name not in gone)
        for tensors in self.added.values():
            yield from tensors

    def unlisted(self) -> frozenset[str]:
        """Every tensor of the result that its index leaves out."""
        added = (name for tensors in self.added.values() for name in tensors)
        names = (name for name in (*self.base.unlisted, *added) if not self.is_listed(name))
        return frozenset(name for name in names if self.file_of(name))

    def is_listed(self, tensor: str) -> bool:
        return tensor in self.listed or tensor in self.base.listed

    def drop(self, source: TensorPlace) -> None:
        self.dropped.setdefault(source.file, {})[source.info.name] = source

    def add(self, file: str, source: TensorPlace, *, listed: bool) -> None:
        self.added.setdefault(file, {})[source.info.name] = source
        if listed:
            self.listed[source.info.name] = file

    def counts(self) -> dict[str, int]:
        """Tensors by what happens to them; unused: what donors have outside of experts and nothing takes.

        A donor's tensor counts as unused if the base has none of its name, or if it is of the MTP layer: that is how
        the published scripts count, whose numbers pins repeat (408 for Qwen3.5-122B-A10B).
        """
        gone = {name for tensors in self.dropped.values() for name in tensors}
        new = {name for tensors in self.added.values() for name in tensors}
        taken = {(one.repository, name) for tensors in self.added.values() for name, one in tensors.items()}
        unused = (
            outside_experts(name) and (name.startswith("mtp.") or self.base.file_of(name) is None)
            for donor in self.donors.values()
            for name in donor.found
            if (donor.name, name) not in taken
        )
        return {
            "replaced": len(gone & new),
            "added": len(new - gone),
            "listed": sum(name not in new for name in self.listed),
            "dropped": len(gone - new),
            "unused": sum(unused),
        }


def outside_experts(name: str) -> bool:
    return ".experts." not in name
