"""Community mods: what is read of them, how they come into keys and records, and a real build with them."""

from __future__ import annotations

import io
import json
import re
import runpy
import tarfile
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import source_samples
import tiny_images
from in_container import output_of
from places import PROJECT
from private_engine import remove_tags
from wheelhouse import make_wheel

from sparkpin.build import render
from sparkpin.build.closed_dockerfile import require_closed
from sparkpin.build.image import build_image
from sparkpin.build.pair import pair
from sparkpin.build.record import read_record, record_file
from sparkpin.commands import lint
from sparkpin.core.errors import BuildError, IntegrityError, ManifestError
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_community_mod
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.pins import community_mods, manifests, schema

RUNMOD = runpy.run_path(str(PROJECT / "dockerfiles/runmod.py"))
RECIPE = "recipes/scripted-tiny.yaml"
SITE = "/usr/local/lib/python3.12/dist-packages"  # as the community's scripts have it
BEFORE, AFTER = "VALUE = 41\n", "VALUE = 42\n"
PATCH = f"--- a/standin/__init__.py\n+++ b/standin/__init__.py\n@@ -1 +1 @@\n-{BEFORE}+{AFTER}"


def quiet(line: str) -> None:
    pass


def write_mod(project: Path, name: str, script: str, **files: str) -> Path:
    folder = project / "community" / name
    for file, text in {"run.sh": f"#!/bin/bash\nset -e\n{script}\n", **files}.items():
        tiny_images.write(folder / file, text)
    (folder / "run.sh").chmod(0o755)
    return folder


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
    url, commit = source_samples.repository(tmp_path / "published", files)

    def write(folder: str = "mods/fix", **more: str) -> Paths:
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
        assert opened.getnames() == ["run.sh", "sub/a.patch"], "of mods/fix alone"
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
    assert len(names) == 3
    for name in names:
        pin = manifests.load_community(PROJECT, name)
        assert len(pin.git.commit) == 40 and pin.folder == f"mods/{name}"


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


@dataclass(frozen=True)
class Site:
    paths: Paths
    engine: Engine
    stack: schema.Stack
    lock: schema.StackLock
    said: list[str]

    def image(self, *mods: str) -> render.RenderedImage:
        """Of a stage `base` with these mods on top of the stand-in."""
        project = self.paths.project
        found = community_mods.read_run_mods(project, mods, "recipes/made-up.yaml", "mods", self.lock)
        return render.render_chain(project, self.stack, self.lock, manifests.load_chain(project, "base"), found)[0]

    def build(self, *mods: str) -> str:
        return build_image(self.paths, self.engine, self.image(*mods), self.said.append).ref

    def run(self, ref: str, script: str) -> str:
        return output_of(self.engine, ref, ["python", "-c", script]).strip()


@pytest.fixture(scope="module")
def site(shared_project: Path) -> Iterator[Site]:
    """The cpu stack's own root file system, and one tiny distribution in the place of vLLM."""
    name, folder = f"test{uuid.uuid4().hex[:8]}", shared_project.parent
    paths = Paths(shared_project, Paths.from_env().cache, folder / "home")
    cpu = manifests.load_stack(shared_project, "cpu")
    debs = manifests.load_stack_lock(shared_project, cpu).debs
    files = {"standin/__init__.py": BEFORE, "standin/old.py": "OLD = 1\n"}
    wheel = make_wheel(folder, "standin", files=files)
    layers = [schema.PythonLayer(name="rest", packages=["*"])]
    python = cpu.python.model_copy(update={"requirements": [], "layers": layers})
    stack = cpu.model_copy(update={"name": name, "mods": [], "python": python})
    lock = schema.StackLock(stack=name, inputs="0" * 64, debs=debs, wheels=[wheel])
    store, engine = Store(paths.store), Engine.connect()
    store.add(folder / wheel.file, wheel)
    yield Site(paths, engine, stack, lock, [])
    remove_tags(engine, f"stack-{name}")
    store.path(wheel.sha256).unlink()


LOOK = """
import os, standin
print(standin.VALUE, open("/workspace/t.jinja").read(), sorted(os.listdir("/workspace")),
      os.path.lexists("/usr/local/lib/python3.12"), os.path.exists(standin.__path__[0] + "/old.py"))
try:
    import standin.old
except ImportError:
    print("gone")
"""


@pytest.mark.engine
def test_a_real_build_applies_them_in_order(site: Site) -> None:
    project = site.paths.project
    write_mod(project, "First", f"patch -p1 -d {SITE} < fix.patch\nrm {SITE}/standin/old.py", **{"fix.patch": PATCH})
    second = PATCH.replace(AFTER, "VALUE = 43\n").replace(BEFORE, AFTER)
    script = [
        "cd $PYTHON_ROOT",
        "git apply $HERE/b.patch",
        "cp $HERE/t.jinja $WORKSPACE_DIR",
        "python3 -c 'import standin'",
    ]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("top/run.sh", "\n".join(["#!/bin/bash", "HERE=$WORKSPACE_DIR/mods/second", *script, ""]))
        packed.writestr("top/b.patch", second)
        packed.writestr("top/t.jinja", "{{ 1 }}")
    (project / "community/second.zip").write_bytes(archive.getvalue())

    plain = site.build()
    assert site.run(plain, "import standin, standin.old; print(standin.VALUE)") == "41"
    ref = site.build("First", "mods/second")
    out = site.run(ref, LOOK).splitlines()
    assert out == ["43 {{ 1 }} ['t.jinja'] False False", "gone"], "bytecode of a patched file follows it"
    image = site.image("First", "mods/second")
    record = read_record(record_file(site.paths, image))
    assert [layer.name for layer in record.layers][-2:] == ["first", "second"]
    assert len({layer.diff_id for layer in record.layers}) == len(record.layers), "a layer each"
    before = site.engine.image(plain)
    after = site.engine.image(ref)
    assert before and after and after.diff_ids[: len(before.diff_ids)] == before.diff_ids
    assert next(row.what for row in record.context if row.path.startswith("runmods/")) == "community mod first"

    # From the record alone, without the project and without the engine's cache: the same bytes.
    away = project.rename(project.with_name("away"))
    build_image(site.paths, site.engine, record.rendered, site.said.append, fresh=True, wanted=after.config_digest)
    away.rename(project)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"patch -p1 -d {SITE} < fix.patch || echo 'Patch is not applicable, skipping...'", "-VALUE = 40"),
        (f"patch -p1 -d {SITE} < fix.patch || true; touch {SITE}/done", "a patch does not fit"),
        ("echo already there, skipping; touch $WORKSPACE_DIR/x", "it skipped something: already there, skipping"),
        ("python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 3)'", "Network is unreachable"),
        ("echo hello", "run.sh changed nothing"),
    ],
)
def test_a_mod_that_is_not_applied_stops_the_build(site: Site, script: str, said: str) -> None:
    patch = PATCH.replace(BEFORE, "VALUE = 40\n")
    write_mod(site.paths.project, "bad", script, **{"fix.patch": patch})
    with pytest.raises(BuildError) as caught:
        site.build("bad")
    assert said in caught.value.message and "community mod bad:" in caught.value.message, caught.value.message
    assert site.engine.image(site.image("bad").ref) is None
