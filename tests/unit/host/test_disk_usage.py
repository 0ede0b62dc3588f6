"""What images cost: chain ids, sizes of layers, what is free once an image is gone."""

from __future__ import annotations

import dataclasses

import pytest

from sparkpin.host import disk_usage as layer_sizes


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
    ("before", "after", "cache", "wanted"),
    [
        ([BASE, TOP, OTHER], [BASE, OTHER], EMPTY, (1, 1, 0, 0)),
        ([BASE, TOP, OTHER], [OTHER], EMPTY, (2, 11, 0, 0)),
        ([BASE, TOP, OTHER], [OTHER], HOLDS, (2, 11, 10, 0)),
        ([BASE, TOP, OTHER], [OTHER], None, (2, 11, 10, 0)),
        ([BASE, TOP, OTHER], [BASE, TOP], HOLDS, (1, 5, 0, 0)),
        ([BASE, TOP, OTHER], [image("unknown", "a", "b")], EMPTY, (2, 6, 0, 0)),
        ([BASE, UNSIZED], [BASE], HOLDS, (0, 0, 0, 1)),
        ([BASE, UNSIZED], [UNSIZED], HOLDS, (0, 0, 0, 0)),
        ([BASE, UNSIZED], [], HOLDS, (2, 110, 110, 1)),
    ],
)
def test_what_no_image_has_any_more_is_free_unless_the_build_cache_may_hold_it(
    before: list[layer_sizes.EngineImage],
    after: list[layer_sizes.EngineImage],
    cache: layer_sizes.BuildCache | None,
    wanted: tuple[int, int, int, int],
) -> None:
    """The image of unknown sizes still needs its layers; the same layer upon another one is another layer."""
    assert dataclasses.astuple(layer_sizes.freed(before, after, cache)) == wanted
