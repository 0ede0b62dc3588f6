"""`why` on releases that no engine has built."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import recorded
import tiny_images
from recorded import ROOT, SITE, Site, deb, file, link, sha, wheel_layer

from sparkpin.build.record import BuildInput, records_of
from sparkpin.core.errors import InputError
from sparkpin.fetch.store import Store
from sparkpin.history.text import origin_json, origin_lines
from sparkpin.history.why import PathOrigin, why
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Releases

NOT_TOLD = "who needs it is not told: the store lacks, or has damaged, 1 wheel (invoke build --fetch-only)"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


def told(origin: PathOrigin) -> dict[str, list[str]]:
    """Label -> its lines."""
    found: dict[str, list[str]] = {}
    label = ""
    lines = list(origin_lines(origin))
    width = max(len(line.split("  ")[0]) for line in lines)
    for line in lines:
        label = line[:width].strip() or label
        found.setdefault(label, []).append(line[width:].strip())
    return found


MOD = f"{SITE}/sparkpin_hello"
TOLD: dict[str, dict[str, list[str]]] = {
    f"/{SITE}/alpha/__init__.py": {
        "what": ["file, 6 bytes, mode 0644, owner 0:0"],
        "sha256": [sha("a = 1\n")],
        "locked": ["in pins/stacks/made.lock"],
        "asked for": ["in python.requirements of pins/stacks/made.yaml: alpha==1.0"],
        "source": ["alpha/__init__.py of the wheel"],
        "needed by": [],
    },
    f"{SITE}/beta/__init__.py": {"needed by": ["alpha (beta>=1)"], "so": []},
    "/bin/sh": {
        "link": [
            *("/bin -> usr/bin", "made by the root file system's set-up: Debian's merged /usr"),
            *("/usr/bin/sh -> dash", "of Debian package dash 1.0~rc1"),
        ],
        "path": ["/usr/bin/dash"],
        "asked for": ["in debian.packages of pins/stacks/made.yaml"],
    },
    "/usr/bin/awk": {
        "what": ["link to /etc/alternatives/awk, owner 0:0, which is not in the image"],
        "source": ["made as packages were installed; no package lists it"],
    },
    "/etc/gone": {"deleted": ["by layer 5 of 5 (hello), stage one; what it was:"]},
    "/opt/vllm/pyvenv.cfg": {"over": ["the one in layer 2 of 5 (venv), stage base"]},
    f"/{MOD}/__init__.py": {
        "asked for": ["in mods of stages/one.yaml"],
        "source": ["mods/hello/sparkpin_hello/__init__.py of the project"],
    },
    f"/{MOD}/__pycache__/__init__.cpython-311.pyc": {
        "source": [
            *("compiled by install.py from", f"/{MOD}/__init__.py"),
            "mods/hello/sparkpin_hello/__init__.py of the project",
        ],
    },
    "/etc/passwd": {"source": ["made by the root file system's set-up: rootfs.sh writes it"]},
    "/opt/data.txt": {"source": ["copied from the build's context: extra/data.txt (list of wheels)"]},
    "/usr/lib/__pycache__/run.cpython-311.pyc": {
        "source": ["compiled by its package's installation from", "/usr/lib/run.py"],
    },
    f"/{SITE}/alpha-1.0.dist-info/RECORD": {"source": ["written by uv"]},
    "/usr": {"source": []},
    "/opt/vllm/lib": {"source": ["no layer names this folder itself: it came with what is in it"]},
}
PLACES = {  # the first line of these labels
    f"/{SITE}/alpha/__init__.py": ("3 of 5 (first), stage base", "wheel alpha 1.0, "),
    "/bin/sh": ("1 of 5 (root file system), stage base", "Debian package dash 1.0~rc1, 10.0 kB"),
    "/etc/gone": ("1 of 5 (root file system), stage base", ""),
    "/opt/vllm/pyvenv.cfg": ("5 of 5 (hello), stage one", ""),
    f"/{MOD}/__init__.py": ("5 of 5 (hello), stage one", "mod hello 0.1.0, 900 bytes"),
}


@pytest.mark.parametrize("path", TOLD)
def test_where_a_path_comes_from(site: Site, path: str) -> None:
    lines = told(why(site.paths, site.first().tag, path))
    assert {label: lines.get(label, []) for label in TOLD[path]} == TOLD[path]
    for label, start in zip(("layer", "package"), PLACES.get(path, ()), strict=False):
        assert lines.get(label, [""])[0].startswith(start)


@pytest.mark.parametrize("end", [None, 0, 200, -1])
def test_who_needs_it_is_not_told_without_all_wheels(site: Site, end: int | None) -> None:
    """One is gone, has lost its end, or has zeros for all of it."""
    release = site.first()
    path = Store(site.paths.store).path(site.wheels["gamma 1.0"].sha256)
    data = path.read_bytes()
    path.unlink()
    if end is not None:
        path.write_bytes(bytes(len(data)) if end < 0 else data[:end])
    assert told(why(site.paths, release.tag, f"{SITE}/beta/__init__.py"))["locked"][1] == NOT_TOLD


CIRCLES = (
    *(link("usr/one", "two"), link("usr/two", "/usr/three/x"), link("usr/three", "one")),
    *(link("usr/self", "self/deeper"), link("usr/bin/there", "/bin/back"), link("usr/bin/back", "/bin/sh")),
)


@pytest.mark.parametrize(
    ("path", "links", "last"),
    [
        ("usr/one", ["/usr/one -> two", "/usr/two -> /usr/three/x"], "/usr/three"),
        ("usr/two/y/z", ["/usr/two -> /usr/three/x", "/usr/three -> one"], "/usr/one"),
        ("usr/self", [], "/usr/self"),
        (
            "/bin/there",  # what is met twice is no circle
            ["/bin ", "/usr/bin/there ", "/bin ", "/usr/bin/back ", "/bin ", "/usr/bin/sh "],
            "/usr/bin/dash",
        ),
    ],
)
def test_links_that_lead_round_in_a_circle_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, links: list[str], last: str
) -> None:
    monkeypatch.setattr(recorded, "ROOT", (*ROOT, *CIRCLES))
    lines = told(why(site.paths, site.first().tag, path))
    found = [line for line in lines.get("link", []) if "->" in line]
    assert len(found) == len(links) and all(map(str.startswith, found, links))
    circle = ["these links lead round in a circle"] if last != "/usr/bin/dash" else []
    assert (lines["path"], lines["what"][1:]) == ([last], circle)


def test_a_file_that_a_community_mod_changed(site: Site) -> None:
    """It is not what lies in its wheel any more."""
    first = records_of(site.paths, site.first())[-1]
    files = (file(f"{SITE}/alpha/__init__.py", "a = 3\n"), file("workspace/x.jinja", "{{ 1 }}"))
    given = [
        BuildInput(path=f"runmods/fix/files/{name}", sha256=sha(text), size=len(text), what="community mod fix")
        for name, text in (("run.sh", "#!/bin/sh\n"), ("t.jinja", "{{ 1 }}"))
    ]
    release = site.release(site.record("two", first, [("fix", files)], given))
    lines = told(why(site.paths, release.tag, f"/{SITE}/alpha/__init__.py"))
    assert lines["source"] == ["made or changed by run.sh of the community mod fix"]
    assert lines["over"] == ["the one in layer 3 of 6 (first), stage base"]
    copied = told(why(site.paths, release.tag, "/workspace/x.jinja"))["source"]
    assert copied == ["copied from the build's context: runmods/fix/files/t.jinja (community mod fix)"]


def test_an_empty_file_is_taken_for_no_other_file(site: Site) -> None:
    """Many a package, project and list has empty files of the same names."""
    empty = ["mods/hello/sparkpin_hello/a/__init__.py", "mods/hello/sparkpin_hello/b/__init__.py"]
    for name in empty:
        tiny_images.write(site.paths.project / name, "")
    lists = [BuildInput(path="wheels/first/requirements.txt", sha256=sha(""), size=0, what="list of wheels")]
    base = site.record(
        "base",
        None,
        [("", ROOT), ("first", wheel_layer("alpha", ""))],
        [site.wheel("first", "alpha 1.0"), *lists],
        site.spec(deb("libc6", "2.36-9"), deb("python3.11-minimal", "3.11.2-6")),
    )
    own = [file(f"{SITE}/sparkpin_hello/{name}/__init__.py", "", "wheel:sparkpin-hello") for name in "abc"]
    own.append(file("opt/empty", ""))
    release = site.release(site.record("one", base, [("hello", tuple(own))], [site.mod("x"), *lists]))
    KeptInputs.of(site.paths).keep_project(site.paths.project, dict.fromkeys(empty, sha("")))
    Releases(site.paths).save(dataclasses.replace(release, inputs={**release.inputs, **dict.fromkeys(empty, sha(""))}))

    def source(path: str) -> list[str]:
        return told(why(site.paths, release.tag, path))["source"]

    assert source(f"{SITE}/alpha/__init__.py") == ["alpha/__init__.py of the wheel"]
    assert source(f"{SITE}/alpha/__pycache__/__init__.cpython-311.pyc") == [
        *("compiled by install.py from", f"/{SITE}/alpha/__init__.py"),
    ]
    assert source(f"{SITE}/sparkpin_hello/a/__init__.py") == [f"{empty[0]} of the project"]
    assert source(f"{SITE}/sparkpin_hello/b/__init__.py") == [f"{empty[1]} of the project"]
    assert source("opt/empty") == ["made by the build step of layer `hello`; no package lists it"]


def test_a_folder_tells_what_it_holds(site: Site) -> None:
    origin = why(site.paths, site.first().tag, "/opt/vllm/")
    assert list(origin.below) == ["mod:hello", "wheel:alpha", "wheel:beta", ""]
    assert told(origin)["holds"][0] == "10 files, 162 bytes"
    assert origin_json(origin)["below"]["wheel:beta"] == (3, 22)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        (f"/{SITE}/alpha/__init_.py", f"/{SITE}/alpha/__init__.py"),
        ("/opt/vllm/site-packages/beta/__init__.py", f"/{SITE}/beta/__init__.py"),
        ("/bin/dish", "/usr/bin/dash"),
    ],
)
def test_a_path_that_no_layer_has_names_its_neighbours(site: Site, path: str, near: str) -> None:
    tag = site.first().tag
    with pytest.raises(InputError, match="has no ") as error:
        why(site.paths, tag, path)
    assert near in error.value.next_step


def test_what_a_terminal_would_obey_is_escaped(site: Site) -> None:
    """The version of a package is text of whoever made the bundle."""
    evil = deb("dash", "1").model_copy(update={"version": "1\x1b[2J"})
    release = site.release(site.record("base", None, [("", ROOT)], [], site.spec(evil)))
    lines = told(why(site.paths, release.tag, "/bin/dash"))
    assert lines["package"][0] == "Debian package dash 1\\x1b[2J, 10.0 kB"
    assert told(why(site.paths, site.second().tag, "/etc/odd\udcff"))["path"] == ["/etc/odd\\xff"]
