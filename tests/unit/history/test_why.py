"""`why` on releases that no engine has built."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import recorded
from recorded import ROOT, SITE, Site, deb, link

from sparkpin.core.errors import InputError
from sparkpin.history.why import PathOrigin, find_origin, origin_lines

MOD = f"{SITE}/sparkpin_hello"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


def facts(origin: PathOrigin) -> tuple[object, ...]:
    """Layer, package, what locks it."""
    layer, package = origin.layer, origin.package
    named = (f"{package.kind} {package.name} {package.version}", package.lock) if package else ("", "")
    return ((layer.number, layer.name, layer.stage) if layer else None, *named)


LOWEST, HELLO = (1, "root file system", "base"), (5, "hello", "one")
LOCK = "pins/stacks/made.lock"
FOUND: dict[str, tuple[object, ...]] = {
    f"/{SITE}/alpha/__init__.py": ((3, "first", "base"), "wheel alpha 1.0", LOCK),
    f"/{SITE}/beta/__init__.py": ((4, "rest", "base"), "wheel beta 1.0", LOCK),
    "/bin/sh": (LOWEST, "deb dash 1.0~rc1", LOCK),
    "/usr/bin/awk": (LOWEST, "", ""),
    "/opt/vllm/pyvenv.cfg": (HELLO, "", ""),
    f"/{MOD}/__init__.py": (HELLO, "mod hello 0.1.0", ""),
    "/opt/vllm/lib": (None, "", ""),
}


@pytest.mark.parametrize("path", FOUND)
def test_where_a_path_comes_from(site: Site, path: str) -> None:
    assert facts(find_origin(site.paths, site.first().tag, path)) == FOUND[path]


LINKS = (
    *(link("usr/one", "two"), link("usr/two", "/usr/one"), link("usr/self", "self/deeper")),
    *(link("usr/bin/there", "/bin/back"), link("usr/bin/back", "/bin/sh"), link("usr/out", "../../../bin/sh")),
)


@pytest.mark.parametrize(
    ("path", "links", "end"),
    [
        ("/bin/sh", ("bin", "usr/bin/sh"), "usr/bin/dash"),
        ("/bin/there", ("bin", "usr/bin/there", "bin", "usr/bin/back", "bin", "usr/bin/sh"), "usr/bin/dash"),
        ("/usr/out", ("usr/out", "bin", "usr/bin/sh"), "usr/bin/dash"),
        ("/usr/bin/awk", (), "usr/bin/awk"),  # to nothing
    ],
)
def test_links_are_followed(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, links: tuple[str, ...], end: str
) -> None:
    monkeypatch.setattr(recorded, "ROOT", (*ROOT, *LINKS))
    found = find_origin(site.paths, site.first().tag, path)
    assert (found.links, found.path) == (links, end)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/opt/vllm/site-packages/beta/__init__.py", f"/{SITE}/beta/__init__.py"),
        ("/bin/dish", "/usr/bin/dash"),
        ("/etc/gone", "invoke why"),  # an upper layer deletes it
    ],
)
def test_a_path_that_no_layer_has_names_its_neighbours(site: Site, path: str, near: str) -> None:
    with pytest.raises(InputError) as error:
        find_origin(site.paths, site.first().tag, path)
    assert near in error.value.next_step


def test_what_a_terminal_would_obey_is_escaped(site: Site) -> None:
    """The version of a package is text of whoever made the bundle."""
    evil = deb("dash", "1").model_copy(update={"version": "1\x1b[2J"})
    release = site.release(site.record("base", None, [("", ROOT)], [], site.spec(evil)))
    for tag, path in ((release.tag, "/bin/dash"), (site.second().tag, "/etc/odd\udcff")):
        assert all(line.isprintable() for line in origin_lines(find_origin(site.paths, tag, path)))


@pytest.mark.parametrize("path", ["/usr/one", "/usr/self"])
def test_links_in_a_circle_end(site: Site, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(recorded, "ROOT", (*ROOT, *LINKS))
    with contextlib.suppress(InputError):
        find_origin(site.paths, site.first().tag, path)
