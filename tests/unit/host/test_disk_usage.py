"""What images cost: chain ids, sizes of layers, what is free once an image is gone."""

from __future__ import annotations

from sparkpin.host import disk_usage as layer_sizes


def image(name: str, *diff_ids: str, sizes: tuple[int, ...] | None = None) -> layer_sizes.EngineImage:
    chain = layer_sizes.chain_ids(diff_ids)
    known = dict(zip(chain, sizes, strict=True)) if sizes else None
    return layer_sizes.EngineImage(name, name, (name,), diff_ids, known, None)


BASE = image("base", "a", "b", sizes=(100, 10))
TOP = image("top", "a", "b", "c", sizes=(100, 10, 1))
OTHER = image("other", "a", "x", sizes=(100, 5))
UNSIZED = image("unsized", "a", "b", "z")
