"""What images cost: chain ids, sizes of layers, what is free once an image is gone."""

from __future__ import annotations

import dataclasses

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
HOLDS = layer_sizes.BuildCache(records=3, bytes=1, holds_layers=True)
EMPTY = layer_sizes.BuildCache(records=1, bytes=1, holds_layers=False)


@pytest.mark.parametrize(
    ("after", "cache", "wanted"),
    [
        ([BASE, OTHER], EMPTY, (1, 1, 0, 0)),
        ([OTHER], EMPTY, (2, 11, 0, 0)),
        ([OTHER], HOLDS, (2, 11, 10, 0)),
        ([OTHER], None, (2, 11, 10, 0)),
        ([BASE, TOP], HOLDS, (1, 5, 0, 0)),
        ([], HOLDS, (4, 116, 110, 0)),
        ([image("unknown", "a", "b")], EMPTY, (2, 6, 0, 0)),
    ],
)
def test_what_no_image_has_any_more_is_free_unless_the_build_cache_may_hold_it(
    after: list[layer_sizes.EngineImage], cache: layer_sizes.BuildCache | None, wanted: tuple[int, int, int, int]
) -> None:
    """The image of unknown sizes still needs its layers; the same layer upon another one is another layer."""
    freed = layer_sizes.freed([BASE, TOP, OTHER], after, cache)
    assert dataclasses.astuple(freed) == wanted


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ([BASE, UNSIZED], (0, 0, 0, 0)),
        ([BASE], (0, 0, 0, 1)),
        ([UNSIZED], (0, 0, 0, 0)),
        ([], (2, 110, 110, 1)),
    ],
)
def test_images_of_unknown_size_that_go_are_counted(
    after: list[layer_sizes.EngineImage], wanted: tuple[int, int, int, int]
) -> None:
    assert dataclasses.astuple(layer_sizes.freed([BASE, UNSIZED], after, HOLDS)) == wanted


def test_an_image_of_which_another_tells_all_sizes_is_known() -> None:
    assert layer_sizes.freed([BASE, image("same", "a", "b")], [], EMPTY).unsized == 0
