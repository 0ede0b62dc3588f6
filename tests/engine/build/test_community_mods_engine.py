"""A real build with community mods."""

from __future__ import annotations

import hashlib
import io
import json
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_images
from in_container import output_of
from private_engine import remove_tags
from run_mods import AFTER, BEFORE, PATCH, write_mod
from wheelhouse import make_wheel

from sparkpin.build import render
from sparkpin.build.image import build_image
from sparkpin.build.record import read_record, record_file
from sparkpin.core.errors import BuildError
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.pins import community_mods, manifests, schema

SITE = "/usr/local/lib/python3.12/dist-packages"  # as the community's scripts have it


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
    template = {"name": "u.jinja", "sha256": hashlib.sha256(b"{{ 2 }}").hexdigest(), "licence": "MIT", "mends": ["x"]}
    pin = {"description": "made up", "reason": "a test", "template": template}
    tiny_images.write(project / "pins/community/pinned.yaml", json.dumps(pin))
    tiny_images.write(project / "pins/community/pinned.jinja", "{{ 2 }}")
    ref = site.build("First", "mods/second", "pinned")
    out = site.run(ref, LOOK).splitlines()
    assert out == ["43 {{ 1 }} ['t.jinja', 'u.jinja'] False False", "gone"], "bytecode of a patched file follows it"
    image = site.image("First", "mods/second", "pinned")
    record = read_record(record_file(site.paths, image))
    assert [layer.name for layer in record.layers][-3:] == ["first", "second", "pinned"]
    assert len({layer.diff_id for layer in record.layers}) == len(record.layers), "a layer each"
    before = site.engine.image(plain)
    after = site.engine.image(ref)
    assert before and after and after.diff_ids[: len(before.diff_ids)] == before.diff_ids
    assert next(row.what for row in record.context if row.path.startswith("runmods/")) == "community mod first"

    # From the record alone, without the project and without the engine's cache: the same bytes.
    away = project.rename(project.with_name("away"))
    build_image(site.paths, site.engine, record.rendered, site.said.append, fresh=True, wanted=after.config_digest)
    away.rename(project)


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
