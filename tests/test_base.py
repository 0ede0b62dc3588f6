"""Images on a base by digest in place of a root file system: what is refused, what it changes, and a real one."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import tiny_images
import yaml
from private_engine import remove_tags
from tiny_registry import registry

from sparkpin import contents, lock, manifests, render, schema
from sparkpin.build import build_image, is_built
from sparkpin.buildrecord import check_form, layer_file, read_record, record_file
from sparkpin.engine import Engine
from sparkpin.errors import BuildError, ManifestError
from sparkpin.lock import lock_stack
from sparkpin.paths import Paths
from sparkpin.wheels import target_of

DIGEST = "sha256:" + "0" * 64


def on_base(folder: Path, image: str = f"somebody/base@{DIGEST}", stack: str = "tiny", **keys: object) -> Path:
    """The made-up project with a base in place of Debian."""
    project = tiny_images.make_project(folder, stack)
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


def chain_of(project: Path, stack: str = "tiny") -> tuple[render.Rendered, ...]:
    loaded = manifests.load_stack(project, stack)
    return render.render_chain(project, loaded, lock_of(loaded), manifests.load_chain(project, "two"))


@pytest.mark.parametrize(
    "image", ["somebody/base:24.04", "somebody/base", f"somebody/base@{DIGEST[:-1]}", f"somebody/base@{DIGEST} AS x"]
)
def test_a_tag_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack(on_base(tmp_path, image), "tiny")
    assert (caught.value.key, caught.value.seen) == ("base.image", image)
    assert "tiny.yaml" in str(caught.value) and "wanted an image by its digest" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"debian": {"suite": "bookworm", "packages": []}}, "either `debian` or `base`"),
        ({"build_on": {"linux/amd64": "cpu"}}, "`build_on` only with `debian`"),
        ({"base": {"image": f"a@{DIGEST}", "python": "3.12.1", "glibc": 36}}, "one Python"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, keys: dict[str, object], wanted: str) -> None:
    with pytest.raises(ManifestError, match=wanted):
        manifests.load_stack(on_base(tmp_path, **keys), "tiny")


def test_the_digest_is_part_of_lock_and_keys(tmp_path: Path) -> None:
    one, other = on_base(tmp_path / "1"), on_base(tmp_path / "2", f"somebody/base@{DIGEST[:-1]}1")
    first, second = manifests.load_stack(one, "tiny"), manifests.load_stack(other, "tiny")
    assert manifests.stack_inputs(first) != manifests.stack_inputs(second)
    base = chain_of(one)[0]
    assert base.parent_ref == f"somebody/base@{DIGEST}" and base.rootfs is None and base.parent_key is None
    assert f"FROM somebody/base@{DIGEST} AS config" in base.dockerfile
    assert all(a.key != b.key for a, b in zip(chain_of(one), chain_of(other), strict=True))
    assert target_of(first, []).platforms()[0] == "manylinux_2_39_x86_64"


def test_locking_asks_no_debian_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "downloaded", lambda *args: [])  # no index: wheels are locked as ever
    project = on_base(tmp_path)
    made = lock_stack(Paths(project, tmp_path / "cache", tmp_path / "home"), "tiny", lambda _: None)
    assert (made.base, made.debs) == (f"somebody/base@{DIGEST}", [])
    assert manifests.load_stack_lock(project, manifests.load_stack(project, "tiny")) == made


@pytest.mark.engine
def test_images_stand_on_what_the_engine_has_under_the_digest(tmp_path: Path) -> None:
    engine, name, said = Engine.connect(), f"test{uuid.uuid4().hex[:8]}", [""]
    with registry(tiny_images.make_rootfs(tmp_path / "base.tar")) as image:
        project = on_base(tmp_path / "project", image, name)
        paths = Paths(project, tmp_path / "cache", tmp_path / "home")
        chain = chain_of(project, name)
        with pytest.raises(BuildError, match="the engine has no") as caught:
            build_image(paths, engine, chain[0], said.append)
        assert caught.value.next_step == f"docker pull --platform linux/amd64 {image}"
        engine.client.api.pull(image)
    try:  # the registry is gone: nothing is asked of it
        built = [build_image(paths, engine, stage, said.append) for stage in chain]
        below = engine.image(image)
        assert below is not None
        assert built[0].diff_ids[: len(below.diff_ids)] == below.diff_ids
        made = engine.image(built[-1].ref)
        assert made is not None and {"FROM_BASE=yes", "GREETING=hello"} <= set(made.config["Env"])
        assert all(is_built(paths, engine, stage) for stage in chain)
        check_form([read_record(record_file(paths, stage)) for stage in chain])
        listed = contents.read_contents(layer_file(paths, below.diff_ids[0]))
        assert "bin/sh" in {entry.path for entry in listed}
    finally:
        remove_tags(engine, f"stack-{name}")
        engine.client.api.remove_image(image)


@pytest.mark.engine
def test_a_base_for_another_platform_is_refused(tmp_path: Path) -> None:
    engine = Engine.connect()
    with registry(tiny_images.make_rootfs(tmp_path / "base.tar"), architecture="arm64") as image:
        project = on_base(tmp_path / "project", image)
        engine.client.api.pull(image, platform="linux/arm64")
        try:
            with pytest.raises(BuildError, match="is for linux/arm64, the stack for linux/amd64"):
                build_image(
                    Paths(project, tmp_path / "cache", tmp_path / "home"), engine, chain_of(project)[0], lambda _: None
                )
        finally:
            engine.client.api.remove_image(image)
