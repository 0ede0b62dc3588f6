"""What differs between two layers or images, on made-up data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkpin.image.listing import ContentsDifference, FieldChange, PathEntry, compare_images

FILE = PathEntry("opt/a.py", "file", 0o644, 0, 0, 5, sha256="a" * 64, owner="wheel:a")
LINK = PathEntry("opt/link", "symlink", 0o777, 0, 0, 0, link="a.py")
FOLDER = PathEntry("opt", "dir", 0o755, 0, 0, 0)


def test_the_same_contents_in_another_order_are_identical() -> None:
    found = compare_images([(FOLDER, FILE, LINK)], [(LINK, FILE, FOLDER)])
    assert found == ContentsDifference((), (), ()) and found.identical


def test_added_and_removed_are_told_by_path() -> None:
    other = replace(FILE, path="opt/0.py")
    found = compare_images([(FOLDER, FILE)], [(FOLDER, other, LINK)])
    assert found == ContentsDifference((other, LINK), (FILE,), ())
    assert not found.identical


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        (FILE, replace(FILE, sha256="b" * 64), [("content", "a" * 64, "b" * 64)]),
        (FILE, replace(FILE, mode=0o4755, uid=3), [("mode", "0644", "4755"), ("uid", "0", "3")]),
        (FILE, replace(FILE, capability="01ff"), [("capability", "", "01ff")]),
        (FILE, replace(FILE, owner=""), []),
        (LINK, replace(LINK, link="b.py"), [("link", "a.py", "b.py")]),
        (FILE, replace(LINK, path=FILE.path), [("kind", "file", "symlink")]),
    ],
)
def test_each_field_is_told_with_both_values(
    old: PathEntry, new: PathEntry, changed: list[tuple[str, str, str]]
) -> None:
    found = compare_images([(old,)], [(new,)])
    assert found == ContentsDifference((), (), tuple(FieldChange(old.path, *row) for row in changed))


def test_images_are_compared_as_containers_see_them() -> None:
    """A file that a layer brings and another deletes makes no difference, nor does the layer that brings it."""
    gone = PathEntry("opt/a.py", "whiteout", 0, 0, 0, 0)
    other = replace(FILE, sha256="b" * 64)
    assert compare_images([(FOLDER, FILE), (gone,)], [(FOLDER,)]).identical
    assert compare_images([(FOLDER, FILE), (LINK,)], [(FOLDER, FILE, LINK), (other,)]) == ContentsDifference(
        (), (), (FieldChange("opt/a.py", "content", "a" * 64, "b" * 64),)
    )
