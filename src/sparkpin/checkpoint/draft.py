"""A checkpoint while the steps work on it: which tensor goes where, what the index lists, what the config says."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from sparkpin.checkpoint.repository import Repository, Source


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one tensor. before, after: bytes; note: dtypes or where from."""

    verb: str
    name: str
    before: int
    after: int
    note: str = ""


@dataclass
class Draft:
    """shards: file -> tensor -> where its bytes come from; a file not in `rewritten` stays as it was published."""

    base: Repository
    repositories: Mapping[str, Repository]
    shards: dict[str, dict[str, Source]]
    weight_map: dict[str, str]
    config: dict[str, Any]
    rewritten: set[str] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def start(cls, base: Repository, repositories: Mapping[str, Repository]) -> Draft:
        """The `copy` step: the published repository as it is."""
        shards: dict[str, dict[str, Source]] = {file: {} for file in base.metadata}
        for name, source in base.tensors.items():
            shards[source.file][name] = source
        return cls(base, repositories, shards, dict(base.weight_map), copy.deepcopy(dict(base.config)))

    def put(self, file: str, name: str, source: Source) -> None:
        """Let `file` hold `name` with the bytes of `source`; it is listed in the index from now on."""
        self.shards[file][name] = source
        self.weight_map[name] = file
        self.rewritten.add(file)


def matching(names: Sequence[str], pattern: str) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def generalise(name: str) -> str:
    """`model.layers.12.mlp.experts.3.up_proj.scales` -> `model.layers.*.mlp.experts.*.up_proj.scales`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def some(names: Sequence[str]) -> str:
    """The first names of a list and how many there are, for a message."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
