"""The made-up project on a base by digest in place of Debian."""

from __future__ import annotations

from pathlib import Path

import tiny_images
import yaml

from sparkpin.build import render
from sparkpin.pins import manifests, schema

# The made-up images have no Python for install.py: a program of the base makes the home.
USER_TREE = """\
FROM {{ parent_ref }} AS user
RUN ["/bin/install", "-d", "-o", "10001", "-g", "10001", "/layer/home/sparkpin"]
FROM scratch AS user-tree
COPY --from=user /layer/ /
"""
TEMPLATE = (
    tiny_images.BASE.replace("FROM {{ parent_ref }} AS config", f"{USER_TREE}FROM {{{{ parent_ref }}}} AS config")
    + "COPY --from=user-tree / /\n"
)
DIGEST = "sha256:" + "0" * 64


def on_base(folder: Path, image: str = f"somebody/base@{DIGEST}", stack: str = "tiny", **keys: object) -> Path:
    """The made-up project with a base in place of Debian."""
    project = tiny_images.make_project(folder, stack)
    tiny_images.write(project / "dockerfiles/base.j2", TEMPLATE)
    tiny_images.write(project / "dockerfiles/base.py", "pass\n")
    file = project / f"pins/stacks/{stack}.yaml"
    data = yaml.safe_load(file.read_text())
    del data["debian"]
    data["python"]["layers"] = [{"name": "rest", "packages": ["*"]}]
    data |= {"base": {"image": image, "python": "3.11.9", "glibc": 39}, **keys}
    file.write_text(yaml.safe_dump(data))
    return project


def lock_of(stack: schema.Stack) -> schema.StackLock:
    assert stack.base
    inputs = manifests.stack_inputs(stack)
    return schema.StackLock(stack=stack.name, inputs=inputs, base=stack.base.image, debs=[], wheels=[])


def chain_of(project: Path, stack: str = "tiny") -> tuple[render.RenderedImage, ...]:
    loaded = manifests.load_stack(project, stack)
    return render.render_chain(project, loaded, lock_of(loaded), manifests.load_chain(project, "two"))
