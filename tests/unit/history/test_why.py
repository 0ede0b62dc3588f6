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

NOT_TOLD = "who needs it is not told: the store lacks, or has damaged, 1 wheel (invoke fetch)"


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


def test_a_file_of_a_wheel_leads_to_its_lock_entry_and_to_who_asked_for_it(site: Site) -> None:
    alpha = site.wheels["alpha 1.0"]
    lines = told(why(site.paths, site.first().tag, f"/{SITE}/alpha/__init__.py"))
    assert lines["what"] == ["file, 6 bytes, mode 0644, owner 0:0"]
    assert lines["sha256"] == [sha("a = 1\n")]
    assert lines["layer"][0] == "3 of 5 (first), stage base"
    assert lines["package"] == [f"wheel alpha 1.0, {alpha.size} bytes", alpha.file, f"sha256 {alpha.sha256}"]
    assert lines["locked"] == ["in pins/stacks/made.lock"]
    assert lines["asked for"] == ["in python.requirements of pins/stacks/made.yaml: alpha==1.0"]
    assert lines["source"] == ["alpha/__init__.py of the wheel"]
    assert "needed by" not in lines


def test_who_needs_a_wheel_is_in_the_wheels(site: Site) -> None:
    release = site.first()
    lines = told(why(site.paths, release.tag, f"{SITE}/beta/__init__.py"))
    assert lines["needed by"] == ["alpha (beta>=1)"] and "so" not in lines
    gamma = site.wheels["gamma 1.0"]
    Store(site.paths.store).path(gamma.sha256).unlink()
    lines = told(why(site.paths, release.tag, f"{SITE}/beta/__init__.py"))
    assert lines["locked"][1] == NOT_TOLD


@pytest.mark.parametrize("end", [0, 200, None])
def test_a_damaged_wheel_is_told_as_a_missing_one(site: Site, end: int | None) -> None:
    """It has lost its end, or has zeros for all of it."""
    release = site.first()
    path = Store(site.paths.store).path(site.wheels["gamma 1.0"].sha256)
    path.write_bytes(bytes(path.stat().st_size) if end is None else path.read_bytes()[:end])
    lines = told(why(site.paths, release.tag, f"{SITE}/beta/__init__.py"))
    assert lines["locked"][1] == NOT_TOLD


def test_links_are_followed_inside_the_image(site: Site) -> None:
    lines = told(why(site.paths, site.first().tag, "/bin/sh"))
    assert lines["link"] == [
        *("/bin -> usr/bin", "made by the root file system's set-up: Debian's merged /usr"),
        *("/usr/bin/sh -> dash", "of Debian package dash 1.0~rc1"),
    ]
    assert lines["path"] == ["/usr/bin/dash"]
    assert lines["package"][0] == "Debian package dash 1.0~rc1, 10.0 kB"
    assert lines["asked for"] == ["in debian.packages of pins/stacks/made.yaml"]


def test_a_link_to_nothing_is_explained_itself(site: Site) -> None:
    lines = told(why(site.paths, site.first().tag, "/usr/bin/awk"))
    assert lines["what"] == ["link to /etc/alternatives/awk, owner 0:0, which is not in the image"]
    assert lines["source"] == ["made as packages were installed; no package lists it"]


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
    ],
)
def test_links_that_lead_round_in_a_circle_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, links: list[str], last: str
) -> None:
    monkeypatch.setattr(recorded, "ROOT", (*ROOT, *CIRCLES))
    lines = told(why(site.paths, site.first().tag, path))
    assert [line for line in lines.get("link", []) if "->" in line] == links
    assert lines["path"] == [last] and lines["what"][1] == "these links lead round in a circle"


def test_a_link_that_is_met_twice_is_no_circle(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "ROOT", (*ROOT, *CIRCLES))
    lines = told(why(site.paths, site.first().tag, "/bin/there"))
    assert [line.partition(" ")[0] for line in lines["link"] if "->" in line] == [
        *("/bin", "/usr/bin/there", "/bin", "/usr/bin/back", "/bin", "/usr/bin/sh"),
    ]
    assert lines["path"] == ["/usr/bin/dash"] and len(lines["what"]) == 1


def test_a_deleted_file_names_the_layer_that_deletes_it(site: Site) -> None:
    lines = told(why(site.paths, site.first().tag, "/etc/gone"))
    assert lines["deleted"] == ["by layer 5 of 5 (hello), stage one; what it was:"]
    assert lines["layer"][0] == "1 of 5 (root file system), stage base"


def test_a_file_that_hides_another_names_the_lower_one(site: Site) -> None:
    lines = told(why(site.paths, site.first().tag, "/opt/vllm/pyvenv.cfg"))
    assert lines["layer"][0] == "5 of 5 (hello), stage one"
    assert lines["over"] == ["the one in layer 2 of 5 (venv), stage base"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/etc/passwd", ["made by the root file system's set-up: rootfs.sh writes it"]),
        ("/opt/data.txt", ["copied from the build's context: extra/data.txt (list of wheels)"]),
        (
            "/usr/lib/__pycache__/run.cpython-311.pyc",
            ["compiled by its package's installation from", "/usr/lib/run.py"],
        ),
        (f"/{SITE}/sparkpin_hello/__init__.py", ["mods/hello/sparkpin_hello/__init__.py of the project"]),
        (
            f"/{SITE}/sparkpin_hello/__pycache__/__init__.cpython-311.pyc",
            [
                "compiled by install.py from",
                f"/{SITE}/sparkpin_hello/__init__.py",
                "mods/hello/sparkpin_hello/__init__.py of the project",
            ],
        ),
        (f"/{SITE}/alpha-1.0.dist-info/RECORD", ["written by uv"]),
        ("/usr", []),
        ("/opt/vllm/lib", ["no layer names this folder itself: it came with what is in it"]),
    ],
)
def test_sources(site: Site, path: str, source: list[str]) -> None:
    assert told(why(site.paths, site.first().tag, path)).get("source", []) == source


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


def test_a_mod_is_asked_for_by_its_stage(site: Site) -> None:
    lines = told(why(site.paths, site.first().tag, f"{SITE}/sparkpin_hello/__init__.py"))
    assert lines["package"][0] == "mod hello 0.1.0, 900 bytes"
    assert lines["asked for"] == ["in mods of stages/one.yaml"]


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


def test_names_that_no_terminal_takes_are_escaped(site: Site) -> None:
    lines = told(why(site.paths, site.second().tag, "/etc/odd\udcff"))
    assert lines["path"] == ["/etc/odd\\xff"]


def test_what_a_terminal_would_obey_is_escaped(site: Site) -> None:
    """The version of a package is text of whoever made the bundle."""
    evil = deb("dash", "1").model_copy(update={"version": "1\x1b[2J"})
    release = site.release(site.record("base", None, [("", ROOT)], [], site.spec(evil)))
    lines = told(why(site.paths, release.tag, "/bin/dash"))
    assert lines["package"][0] == "Debian package dash 1\\x1b[2J, 10.0 kB"
