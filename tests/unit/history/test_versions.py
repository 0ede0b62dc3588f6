"""Which version is the later one."""

from __future__ import annotations

import pytest

from sparkpin.history.versions import Direction, direction

REVERSED: dict[Direction, Direction] = {"up": "down", "down": "up"}


@pytest.mark.parametrize(
    ("kind", "before", "after", "wanted"),
    [
        ("deb", "1.0~rc1", "1.0", "up"),
        ("deb", "1:0.1", "2.0", "down"),
        ("deb", "2.36-9", "2.36-9+deb12u1", "up"),
        ("deb", "--help", "1", "unordered"),
        ("deb", "1", "1", "same"),
        ("wheel", "1.9", "1.10", "up"),
        ("wheel", "1.0", "1.0.0", "same"),
        ("wheel", "1.0rc1", "1.0", "up"),
        ("wheel", "one", "two", "unordered"),
    ],
)
def test_orders(kind: str, before: str, after: str, wanted: Direction) -> None:
    assert direction(kind, before, after) == wanted
    assert direction(kind, after, before) == REVERSED.get(wanted, wanted)
