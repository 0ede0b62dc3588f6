"""Community mods: what is read of them, and how they come into keys and records."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import made_releases
import pytest
import source_samples
import tiny_images
from places import PROJECT
from run_mods import PATCH, write_mod

from sparkpin.build import render
from sparkpin.build.closed_dockerfile import require_closed
from sparkpin.build.pair import pair
from sparkpin.commands import lint
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_community_mod
from sparkpin.history import operands
from sparkpin.pins import community_mods, manifests
from sparkpin.releases.kept_inputs import KeptInputs

RUNMOD = runpy.run_path(str(PROJECT / "dockerfiles/runmod.py"))
RECIPE = "recipes/scripted-tiny.yaml"
TEMPLATE = "{{ messages }}\n"
PINNED = {"file": "t.jinja", "name": "mine.jinja", "licence": "MIT", "mends": ["nothing"]}


def quiet(line: str) -> None:
    pass


def name_in_recipe(project: Path, *mods: str) -> None:
    file = project / RECIPE
    lines = [line for line in file.read_text().splitlines() if not line.startswith("mods:")]
    tiny_images.write(file, "\n".join([*lines, f"mods: {json.dumps(mods)}", ""]))


def images_of(project: Path) -> tuple[render.RenderedImage, ...]:
    return tuple(pairing.rendered for pairing in pair(project, "scripted-tiny"))


def test_a_recipe_has_them_in_every_stage_in_its_order(project: Path) -> None:
    write_mod(project, "Fix-One", "true")
    write_mod(project, "fix-two", "true")
    plain = images_of(project)
    name_in_recipe(project, "mods/Fix-One", "mods/fix-two")
    images = images_of(project)
    assert [name for name, _ in images[0].layers][-2:] == ["fix-one", "fix-two"]
    assert images[0].layers[:-2] == plain[0].layers, "what lies below is shared with recipes that have no mods"
    tops = [image.layers[-1][0] for image in images if image.layers]
    assert tops == ["fix-two", "hybrid-int4-fp8", "int8-lm-head", "turboquant"]
    text = images[0].dockerfile
    assert "COPY --from=fix-one-tree / /\nRUN" in text, "the second meets what the first left"
    assert text.index("AS fix-one\n") < text.index("AS fix-two\n")
    for image in images:
        require_closed(image.dockerfile, image.parent_ref)
    assert lint.hadolint(PROJECT, {f"{image.stage}.Dockerfile": image.dockerfile for image in images}) == []
    name_in_recipe(project, "mods/fix-two", "mods/Fix-One")
    assert images_of(project)[0].key != images[0].key
    assert all(image.key not in {one.key for one in plain} for image in images)


def test_a_stage_has_them_too(project: Path) -> None:
    write_mod(project, "fix", "true")
    file = project / "stages/hybrid.yaml"
    file.write_text(file.read_text() + "community: [fix]\n")
    plain, _, *rest = images_of(project)
    assert [name for name, _ in images_of(project)[1].layers] == ["hybrid-int4-fp8", "fix"]
    assert "fix" not in plain.dockerfile and rest
    assert "COPY --from=hybrid-int4-fp8-tree / /\nRUN" in images_of(project)[1].dockerfile


def test_content_is_in_the_key_and_in_the_record(project: Path) -> None:
    folder = write_mod(project, "fix", "true", **{"fix.patch": PATCH, "__pycache__/x.pyc": ""})
    name_in_recipe(project, "fix")
    last = pair(project, "scripted-tiny")[-1]
    assert last.patched == ("fix",)
    assert {"community/fix/run.sh", "community/fix/fix.patch"} <= set(last.inputs)
    assert "community/fix/run.sh" in last.executable and "community/fix/__pycache__/x.pyc" not in last.inputs
    (folder / "fix.patch").write_text(PATCH + "\n")
    changed = pair(project, "scripted-tiny")[-1]
    assert changed.rendered.key != last.rendered.key and changed.key != last.key


def test_a_template_that_a_mod_brings_is_found(project: Path) -> None:
    write_mod(project, "template", "cp t.jinja $WORKSPACE_DIR/unsloth.jinja", **{"t.jinja": "{{ 1 }}"})
    file = project / RECIPE
    file.write_text(file.read_text().rstrip() + " \\\n    --chat-template unsloth.jinja\n")
    assert "unsloth.jinja" in pair(project, "scripted-tiny")[-1].argv
    name_in_recipe(project, "template")
    argv = pair(project, "scripted-tiny")[-1].argv
    assert argv[argv.index("--chat-template") + 1] == "/workspace/unsloth.jinja"
    assert community_mods.in_workspace(["--chat-template=a.jinja", "--chat-template", "/x.jinja"]) == [
        "--chat-template=/workspace/a.jinja",
        "--chat-template",
        "/x.jinja",
    ]


def test_what_is_no_mod_is_told(project: Path) -> None:
    name_in_recipe(project, "mods/nothing")
    with pytest.raises(ManifestError, match=r"community/nothing/ with a run\.sh, community/nothing\.zip, or pins/"):
        pair(project, "scripted-tiny")
    (project / "community/nothing").mkdir(parents=True)
    with pytest.raises(ManifestError, match=r"a folder with a run\.sh"):
        pair(project, "scripted-tiny")
    folder = write_mod(project, "nothing", "true")
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(ManifestError, match="plain files, no links"):
        pair(project, "scripted-tiny")
    (folder / "link").unlink()
    name_in_recipe(project, "nothing", "mods/nothing")
    with pytest.raises(ManifestError, match="each mod once"):
        pair(project, "scripted-tiny")
    write_mod(project, "vllm", "true")
    name_in_recipe(project, "vllm")
    with pytest.raises(ManifestError, match="whose name no other layer"):
        pair(project, "scripted-tiny")


def test_an_archive_is_one_file(project: Path) -> None:
    (project / "community").mkdir()
    with zipfile.ZipFile(project / "community/packed.zip", "w") as archive:
        archive.writestr("packed/run.sh", "#!/bin/sh\n")
    name_in_recipe(project, "packed")
    last = pair(project, "scripted-tiny")[0]
    assert [file.path for file in last.rendered.context if file.path.startswith("runmods/")] == [
        "runmods/packed/mod.zip"
    ]
    assert "community/packed.zip" in last.inputs


@pytest.fixture
def pinned(project: Path, tmp_path: Path) -> Callable[..., Paths]:
    """A pin on a real repository, which is not locked yet."""
    files = {"mods/fix/run.sh": "#!/bin/sh\n", "mods/fix/sub/a.patch": PATCH, "mods/fixed/run.sh": "", "README": ""}
    files["mods/fix/t.jinja"] = TEMPLATE
    url, commit = source_samples.repository(tmp_path / "published", files)

    def write(folder: str = "mods/fix", **more: object) -> Paths:
        pin = {
            "description": "made up",
            "git": {"repository": url, "commit": commit},
            "folder": folder,
            "reason": "no need of it from there on",
            **more,
        }
        tiny_images.write(project / "pins/community/fix.yaml", json.dumps(pin))
        return Paths(project, tmp_path / "cache", tmp_path / "home")

    return write


def test_a_pinned_mod_is_brought_and_locked(pinned: Callable[..., Paths]) -> None:
    paths = pinned()
    name_in_recipe(paths.project, "mods/fix")
    with pytest.raises(ManifestError, match="wanted a lock") as missing:
        pair(paths.project, "scripted-tiny")
    assert missing.value.next_step == "invoke lock --mod fix"
    lock = lock_community_mod.lock_mod(paths, "fix", quiet)
    tar = paths.project / "community/fix.tar"
    assert (lock.archive.sha256, lock.archive.size) == sha256_file(tar)
    with tarfile.open(tar) as opened:
        assert opened.getnames() == ["run.sh", "sub/a.patch", "t.jinja"], "of mods/fix alone"
    last = pair(paths.project, "scripted-tiny")[0]
    assert {"community/fix.tar", "pins/community/fix.yaml", "pins/community/fix.lock"} <= set(last.inputs)

    tar.unlink()
    with pytest.raises(ManifestError, match=r"community/fix\.tar, which its pin describes"):
        pair(paths.project, "scripted-tiny")
    assert lock_community_mod.lock_mod(paths, "fix", quiet) == lock, "a locked mod is brought back by the same command"
    tar.write_bytes(tar.read_bytes() + bytes(512))
    with pytest.raises(IntegrityError, match=lock.archive.sha256):
        pair(paths.project, "scripted-tiny")
    lock_file = paths.project / "pins/community/fix.lock"
    lock_file.write_text(lock_file.read_text().replace(lock.archive.sha256, "0" * 64))
    with pytest.raises(IntegrityError, match="wanted size="):
        lock_community_mod.lock_mod(paths, "fix", quiet)
    lock_file.unlink()
    pinned(folder="mods")
    with pytest.raises(ManifestError, match=r"a folder of file://\S+ with a run\.sh"):
        lock_community_mod.lock_mod(paths, "fix", quiet)
    assert [path.name for path in (paths.project / "community").iterdir()] == ["fix.tar"]


def serve_with(project: Path, template: str) -> None:
    file = project / RECIPE
    file.write_text(file.read_text().rstrip() + f" \\\n    --chat-template {template}\n")


def test_a_pinned_template_is_one_file_known_by_its_hash(pinned: Callable[..., Paths]) -> None:
    paths = pinned(template=PINNED | {"sha256": "0" * 64})
    serve_with(paths.project, "mine.jinja")
    name_in_recipe(paths.project, "mods/fix")
    with pytest.raises(ManifestError, match=f"wanted {hashlib.sha256(TEMPLATE.encode()).hexdigest()}"):
        lock_community_mod.lock_mod(paths, "fix", quiet)
    assert (
        not list((paths.project / "community").iterdir()) and not (paths.project / "pins/community/fix.lock").exists()
    )
    pinned(template=PINNED | {"file": "other.jinja"})
    with pytest.raises(ManifestError, match="with that file"):
        lock_community_mod.lock_mod(paths, "fix", quiet)
    pinned(template=PINNED)
    lock = lock_community_mod.lock_mod(paths, "fix", quiet)
    file = paths.project / "community/fix.jinja"
    assert file.read_text() == TEMPLATE and lock.archive.sha256 == sha256_file(file)[0]
    last = pair(paths.project, "scripted-tiny")[-1]
    assert last.argv[last.argv.index("--chat-template") + 1] == "/workspace/mine.jinja" and last.patched == ("fix",)
    assert {"community/fix.jinja", "pins/community/fix.yaml", "pins/community/fix.lock"} <= set(last.inputs)
    context = {one.path: one for image in pair(paths.project, "scripted-tiny") for one in image.rendered.context}
    assert sorted(path for path in context if path.startswith("runmods/")) == [
        "runmods/fix/files/mine.jinja",
        "runmods/fix/files/run.sh",
    ]
    assert context["runmods/fix/files/run.sh"].executable and "dockerfiles/template.sh" in last.executable
    pinned(template=PINNED | {"sha256": "0" * 64})
    with pytest.raises(ManifestError, match=r"template\.sha256"):
        pair(paths.project, "scripted-tiny")
    pinned(template=PINNED)
    file.write_text(TEMPLATE + "\n")
    with pytest.raises(IntegrityError, match=lock.archive.sha256):
        pair(paths.project, "scripted-tiny")


def own_template(project: Path, text: str) -> None:
    """A template that the project holds, with its pin."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    template = {"name": "mine.jinja", "sha256": digest, "licence": "MIT", "mends": ["nothing"]}
    pin = {"description": "made up", "reason": "a test", "template": template}
    tiny_images.write(project / "pins/community/own.yaml", json.dumps(pin))
    tiny_images.write(project / "pins/community/own.jinja", text)


def test_a_template_of_the_project_is_in_the_key_and_named_by_diff(project: Path, tmp_path: Path) -> None:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    serve_with(project, "mine.jinja")
    own_template(project, "{{ 1 }}\n")
    name_in_recipe(project, "own")
    like = made_releases.release(3, recipe="scripted-tiny", stage="v2-tq")
    was, before = pair(project, "scripted-tiny")[-1], operands.tree_side(paths, like)
    KeptInputs.of(paths).keep_project(project, was.inputs)
    (project / "pins/community/own.jinja").write_text("{{ 2 }}\n")
    with pytest.raises(ManifestError, match=r"template\.sha256"):
        pair(project, "scripted-tiny")
    own_template(project, "{{ 2 }}\n")
    now, after = pair(project, "scripted-tiny")[-1], operands.tree_side(paths, like)
    KeptInputs.of(paths).keep_project(project, now.inputs)
    assert now.key != was.key and now.rendered.key != was.rendered.key
    assert (now.argv, now.env) == (was.argv, was.env)
    changed = {change.path: change.diff for change in operands.recorded_difference(paths, before, after).files}
    assert set(changed) == {"pins/community/own.jinja", "pins/community/own.yaml"}
    assert changed["pins/community/own.jinja"][1:] == ("-{{ 1 }}", "+{{ 2 }}")


def test_the_run_of_a_template_puts_it_into_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "work space").mkdir()
    (tmp_path / "a.jinja").write_text(TEMPLATE)
    script = PROJECT / "dockerfiles/template.sh"
    env = {"WORKSPACE_DIR": str(tmp_path / "work space"), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", script], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "work space/a.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(
    "change",
    [
        {"template": {key: value for key, value in PINNED.items() if key != "licence"}},
        {"template": PINNED | {"mends": []}},
        {"template": PINNED | {"name": "../x.jinja"}},
        {"template": {key: value for key, value in PINNED.items() if key != "file"}},  # which of the folder's?
        {"folder": ""},
        {"git": None, "folder": ""},  # neither a mod nor a template
        {"git": None, "folder": "", "template": PINNED | {"sha256": "0" * 64}},  # `file` of nothing
    ],
)
def test_pins_that_do_not_say_which_file(pinned: Callable[..., Paths], change: dict[str, object]) -> None:
    paths = pinned(**change)
    with pytest.raises(ManifestError):
        manifests.load_community(paths.project, "fix")


def test_only_for_the_versions_that_need_it(pinned: Callable[..., Paths]) -> None:
    paths = pinned(drop_when="vllm >= 0.19.1")
    name_in_recipe(paths.project, "mods/fix")
    with pytest.raises(ManifestError, match=r"vllm 0\.32\.0.*`vllm >= 0\.19\.1` does not hold: no need") as caught:
        pair(paths.project, "scripted-tiny")
    assert "take fix out of the recipe's `mods`" in caught.value.next_step
    pinned(drop_when="vllm >= 0.33")
    lock_community_mod.lock_mod(paths, "fix", quiet)
    pair(paths.project, "scripted-tiny")
    pinned(drop_when="nonsense >")
    with pytest.raises(ManifestError, match="a condition on a version"):
        pair(paths.project, "scripted-tiny")


def test_the_projects_own_pins_are_read() -> None:
    names = [file.stem for file in (PROJECT / "pins/community").glob("*.yaml")]
    assert len(names) == 5
    for name in names:
        pin = manifests.load_community(PROJECT, name)
        assert pin.git and len(pin.git.commit) == 40 and pin.folder == f"mods/{name}"
    assert len(community_mods.templates_of(PROJECT, [f"mods/{name}" for name in names])) == 4


@pytest.mark.parametrize(
    ("code", "output", "rows", "said"),
    [
        (0, "done\n", [("applied", ["b/x"])], None),
        (0, "Patch is not applicable, skipping...\n", [("failed", ["b/x"])], "a patch does not fit"),
        (0, "already there; skipping.\n", [], "it skipped something: already there"),
        (0, "x\n", [("refused", ["b/x"])], "no other took its place"),
        (0, "x\n", [("refused", ["b/x"]), ("applied", ["b/x"])], None),
        (0, "x\n", [("question", ["b/x"])], None),
        (3, "curl: (6) could not resolve\n", [], r"run\.sh ended with 3 \(a build has no network\):\ncurl"),
    ],
)
def test_when_a_mod_is_not_applied(code: int, output: str, rows: list[tuple[str, list[str]]], said: str | None) -> None:
    found = RUNMOD["faults"](code, output, [{"kind": kind, "files": files, "text": "hunk"} for kind, files in rows])
    if said is None:
        assert found == []
    else:
        assert re.search(said, "\n".join(found))
