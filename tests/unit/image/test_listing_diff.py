"""What differs between two layers or images, on made-up data."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sparkpin.image.listing import Contents, PathEntry, above, image_contents
from sparkpin.image.listing_diff import (
    ContentsDifference,
    FieldChange,
    compare_contents,
    images_apart,
)

FILE = PathEntry("opt/a.py", "file", 0o644, 0, 0, 5, sha256="a" * 64, owner="wheel:a")
LINK = PathEntry("opt/link", "symlink", 0o777, 0, 0, 0, link="a.py")
FOLDER = PathEntry("opt", "dir", 0o755, 0, 0, 0)


def test_the_same_contents_in_another_order_are_identical() -> None:
    found = compare_contents((FOLDER, FILE, LINK), (LINK, FILE, FOLDER))
    assert found == ContentsDifference((), (), ()) and found.identical and found.only_metadata


def test_added_and_removed_are_told_by_path() -> None:
    other = replace(FILE, path="opt/0.py")
    found = compare_contents((FOLDER, FILE), (FOLDER, other, LINK))
    assert found == ContentsDifference((other, LINK), (FILE,), ())
    assert not found.identical and not found.only_metadata


@pytest.mark.parametrize(
    ("old", "new", "changed", "only_metadata"),
    [
        (FILE, replace(FILE, sha256="b" * 64), [("content", "a" * 64, "b" * 64)], False),
        (FILE, replace(FILE, mode=0o4755, uid=3), [("mode", "0644", "4755"), ("uid", "0", "3")], True),
        (FILE, replace(FILE, capability="01ff"), [("capability", "", "01ff")], True),
        (FILE, replace(FILE, owner=""), [], True),
        (LINK, replace(LINK, link="b.py"), [("link", "a.py", "b.py")], False),
        (FILE, replace(LINK, path=FILE.path), [("kind", "file", "symlink")], False),
        (
            FILE,
            replace(FILE, kind="hardlink", link="opt/b", mode=0o600),
            [("kind", "file", "hardlink"), ("link", "", "opt/b"), ("mode", "0644", "0600")],
            False,
        ),
    ],
)
def test_each_field_is_told_with_both_values(
    old: PathEntry, new: PathEntry, changed: list[tuple[str, str, str]], only_metadata: bool
) -> None:
    found = compare_contents((old,), (new,))
    assert found == ContentsDifference((), (), tuple(FieldChange(old.path, *row) for row in changed))
    assert found.only_metadata == only_metadata


def whole(layers: list[Contents]) -> dict[str, PathEntry]:
    return {path: entry for path, (_, entry) in image_contents(layers).items()}


def random_layer(chance: random.Random) -> Contents:
    """A few paths of a small tree, with folders, links, marks of deletion and hidden folders, as a layer may have them:
    nothing lies below what is no folder.
    """
    entries: dict[tuple[str, str], PathEntry] = {}
    for _ in range(chance.randint(0, 6)):
        path = "/".join(chance.choices("abc", k=chance.randint(1, 3)))
        kind = chance.choice(["file", "file", "dir", "symlink", "whiteout", "opaque"])
        entry = PathEntry(path, kind, 0o644, 0, 0, 1, sha256=chance.choice("12") if kind == "file" else "", link="")
        entries[path, "mark" if kind == "opaque" else ""] = entry
    ends = {path for (path, mark), entry in entries.items() if not mark and entry.kind != "dir"}
    return tuple(
        e for e in entries.values() if ends.isdisjoint(above(e.path)) and (e.kind != "opaque" or e.path not in ends)
    )


@pytest.mark.parametrize("seed", range(400))
def test_common_layers_may_be_narrowed(seed: int) -> None:
    """Against all of both images: what differs is the same."""
    chance = random.Random(seed)
    layers = {str(number): random_layer(chance) for number in range(6)}
    low, high = chance.choices("012345", k=2), chance.choices("012345", k=2)
    before = [*low, *chance.choices("012345", k=chance.randint(0, 2)), *high]
    after = [*low, *chance.choices("012345", k=chance.randint(0, 2)), *high]
    images = images_apart(before, after, layers.__getitem__)
    found = compare_contents(tuple(images[0].values()), tuple(images[1].values()))
    wanted = compare_contents(
        *(tuple(whole([layers[name] for name in side]).values()) for side in (before, after)),
    )
    assert found == wanted


def test_of_equal_images_no_listing_is_read() -> None:
    def read(diff_id: str) -> Contents:
        raise AssertionError(diff_id)

    assert images_apart(["1", "2"], ["1", "2"], read) == ({}, {})
