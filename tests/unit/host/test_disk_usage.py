"""What images cost: chain ids, sizes of layers, what is free once an image is gone."""

from __future__ import annotations

import pytest

from sparkpin.host import disk_usage as layer_sizes


def test_chain_ids_are_those_of_the_specification() -> None:
    import hashlib

    second = "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    third = "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()
    assert layer_sizes.chain_ids(("sha256:a", "sha256:b", "sha256:c")) == ["sha256:a", second, third]
    assert layer_sizes.chain_ids(()) == []


@pytest.mark.parametrize(
    ("history", "count", "wanted"),
    [([5, 0, 7], 3, [5, 0, 7]), ([5, 0, 7], 2, [5, 7]), ([5, 0, 0], 2, None), ([], 0, []), ([], 2, None)],
)
def test_sizes_of_layers(history: list[int], count: int, wanted: list[int] | None) -> None:
    assert layer_sizes.layer_sizes(history, count) == wanted


def image(name: str, *diff_ids: str, sizes: tuple[int, ...] | None = None) -> layer_sizes.EngineImage:
    chain = layer_sizes.chain_ids(diff_ids)
    known = dict(zip(chain, sizes, strict=True)) if sizes else None
    return layer_sizes.EngineImage(name, name, (name,), diff_ids, known, None)


BASE = image("base", "a", "b", sizes=(100, 10))
TOP = image("top", "a", "b", "c", sizes=(100, 10, 1))
OTHER = image("other", "a", "x", sizes=(100, 5))
UNSIZED = image("unsized", "a", "b", "z")
