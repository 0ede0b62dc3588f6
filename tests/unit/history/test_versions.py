"""Orders of versions: Debian's, as its Policy and dpkg have it, and Python's."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

from sparkpin.history.versions import direction

# From the least to the greatest: Debian Policy 5.6.12, and what real packages are called.
DEBIAN = ["~~", "~~a", "~", "0", "1.0~rc1", "1.0", "1.0-1", "1.0-1+deb12u5", "1.0-1+deb12u15", "1.0a", "1.0+b1"]
DEBIAN += ["1.0.1", "09", "9.9", "12.3-9", "12.3-9+deb12u14", "20250419~deb12u2", "20250419", "1:0.1", "1:1.2.13"]


@pytest.mark.parametrize(("low", "high"), list(itertools.pairwise(DEBIAN)))
def test_debian_order(low: str, high: str) -> None:
    assert direction("deb", low, high) == "up" and direction("deb", high, low) == "down"


@pytest.mark.parametrize(("one", "other"), [("1.0", "0:1.0"), ("1.0", "1.0-0"), ("1.01", "1.1"), ("a", "a0")])
def test_versions_that_debian_takes_for_one(one: str, other: str) -> None:
    assert direction("deb", one, other) == direction("deb", other, one) == "same"


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="compares with dpkg: run it on Debian")
def test_debian_order_is_that_of_dpkg() -> None:
    versions = ["1-2-3", "1.2.3", "1.2~", "1.2+", "1.2b", "1.2b-0~", "3:1", "1.2-1"]
    for one, other in itertools.product(versions, repeat=2):
        less, more = (
            subprocess.run(["dpkg", "--compare-versions", one, how, other]).returncode for how in ("lt", "gt")
        )
        wanted = "up" if not less else "down" if not more else "same"
        assert direction("deb", one, other) == wanted, (one, other)


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("1.9", "1.10", "up"),
        ("2.0", "2.0rc1", "down"),
        ("2.13.0", "2.13.0+cpu", "up"),
        ("1.0", "1.0.0", "same"),
        ("1.0", "not a version", "unordered"),
    ],
)
def test_python_order(before: str, after: str, wanted: str) -> None:
    assert direction("wheel", before, after) == wanted
