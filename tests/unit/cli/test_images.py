"""The table of `invoke images`."""

from __future__ import annotations

from typing import Any

import pytest

from sparkpin.cli.releases import show_images
from sparkpin.host.images import ImageInfo, chain_ids

LAYERS = tuple(f"sha256:{number:064x}" for number in range(2))


def image(name: str, count: int) -> ImageInfo:
    layers = dict(zip(chain_ids(LAYERS[:count]), (5_000_000, 7_000_000), strict=False))
    return ImageInfo(name, name, (), LAYERS[:count], layers, None, 0, "linux", "amd64", {})


def test_what_an_image_shares_is_no_size_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    images = [image("base", 1), image("upper", 2)]
    common: dict[str, Any] = {
        "state": "built",
        "smoke": "",
        "size": 1,
        "protected": None,
        "created": "",
        "previous": False,
    }
    rows = [
        common | {"tag": f"sparkpin/r:{one.id}-{'0' * 12}", "image": one.id, "unique_size": one.unique_size(images)}
        for one in images
    ]
    assert [row["unique_size"] for row in rows] == [0, 7_000_000]
    show_images(rows, None)
    base, upper = [line for line in capsys.readouterr().out.splitlines() if "-0" in line]
    assert base.split()[-1] == "-" and "7.0 MB" in upper
