"""A real build with a chat template."""

from __future__ import annotations

import uuid
from pathlib import Path

from chat_templates import add_template
from in_container import output_of
from private_engine import remove_tags

from sparkpin.build import render
from sparkpin.build.image import build_image
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests, schema
from sparkpin.pins.mods import read_templates


def test_a_template_lies_in_the_workspace_and_nobody_may_write_to_it(shared_project: Path) -> None:
    """In the cpu stack's own root file system, without wheels."""
    project, engine = shared_project, Engine.connect()
    paths = Paths(project, Paths.from_env().cache, project.parent / "home")
    cpu = manifests.load_stack(project, "cpu")
    layers = [schema.PythonLayer(name="rest", packages=["*"])]
    python = cpu.python.model_copy(update={"requirements": [], "layers": layers})
    stack = cpu.model_copy(update={"name": f"test{uuid.uuid4().hex[:8]}", "mods": [], "python": python})
    debs = manifests.load_stack_lock(project, cpu).debs
    lock = schema.StackLock(stack=stack.name, inputs="0" * 64, debs=debs, wheels=[])
    add_template(project, "fix-own", "{{ 2 }}\n")
    templates = read_templates(project, ["mods/fix-own"], "recipes/r.yaml", "0.32.0")
    image = render.render_chain(project, stack, lock, manifests.load_chain(project, "base"), templates)[0]
    try:
        build_image(paths, engine, image)
        ref = image.ref
        look = "p = '/workspace/fix-own.jinja'; print(open(p).read(), os.access(p, os.W_OK), oct(os.stat(p).st_mode))"
        found = output_of(engine, ref, ["python", "-c", f"import os; {look}"])
        assert found.split() == ["{{", "2", "}}", "False", "0o100644"]
    finally:
        remove_tags(engine, f"stack-{stack.name}")
