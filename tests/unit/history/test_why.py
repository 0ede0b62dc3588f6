"""`why` on releases that no engine has built."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import ROOT, SITE, Site, deb

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
    "/usr/bin/dash": (LOWEST, "deb dash 1.0~rc1", LOCK),
    "/usr/bin/awk": (LOWEST, "", ""),
    "/opt/vllm/pyvenv.cfg": (HELLO, "", ""),
    f"/{MOD}/__init__.py": (HELLO, "mod hello 0.1.0", ""),
    "/opt/vllm/lib": (None, "", ""),
}


@pytest.mark.parametrize("path", FOUND)
def test_where_a_path_comes_from(site: Site, path: str) -> None:
    assert facts(find_origin(site.paths, site.first().tag, path)) == FOUND[path]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/opt/vllm/site-packages/beta/__init__.py", f"/{SITE}/beta/__init__.py"),
        ("/bin/dash", "/usr/bin/dash"),  # /bin is a link
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
    for tag, path in ((release.tag, "/usr/bin/dash"), (site.second().tag, "/etc/odd\udcff")):
        assert all(line.isprintable() for line in origin_lines(find_origin(site.paths, tag, path)))
