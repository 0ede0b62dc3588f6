"""Images on a base by digest in place of a root file system: what is refused, what it changes, and a real one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import tiny_images
import yaml
from checkout import PROJECT
from private_engine import remove_tags
from tiny_registry import registry

from sparkpin.build import context_files, render, rootfs
from sparkpin.build.image import build_image, is_built
from sparkpin.build.record import check_form, layer_file, read_record, record_file
from sparkpin.commands import lint
from sparkpin.core.errors import BuildError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_stack as lock
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.wheels import target_of
from sparkpin.host.engine import Engine
from sparkpin.image import listing
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
SCRIPT = str(PROJECT / "dockerfiles/base.py")


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
    assert [name for name, _ in base.layers] == ["venv", "user"]
    assert target_of(first, []).platforms()[0] == "manylinux_2_39_x86_64"


def test_locking_asks_no_debian_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "index_closure", lambda *args: [])  # no index: wheels are locked as ever
    project = on_base(tmp_path)
    made = lock_stack(Paths(project, tmp_path / "cache", tmp_path / "home"), "tiny", lambda _: None)
    assert (made.base, made.debs) == (f"somebody/base@{DIGEST}", [])
    assert manifests.load_stack_lock(project, manifests.load_stack(project, "tiny")) == made


def test_the_user_is_the_one_of_our_own_root_file_systems(tmp_path: Path) -> None:
    script = rootfs.CUSTOMIZE.read_text()
    for kind, line in (("passwd", context_files.PASSWD), ("group", context_files.GROUP)):
        assert f"echo '{line}' >>\"$root/etc/{kind}\"" in script
    files = {file.path: file.text for file in chain_of(on_base(tmp_path))[0].context if "/user/" in file.path}
    assert files == {
        "wheels/user/requirements.txt": "",
        "wheels/user/passwd": f"{context_files.PASSWD}\n",
        "wheels/user/group": f"{context_files.GROUP}\n",
    }


@pytest.mark.parametrize(
    ("python", "glibc", "told"),
    [
        (sys.version.split()[0], "36", ""),
        ("3.11.99", "36", f"base.python of the stack says 3.11.99, and the image has {sys.version.split()[0]}"),
        (sys.version.split()[0], "12", "base.glibc of the stack says glibc 2.12, and the image has glibc 2.36"),
    ],
)
def test_a_base_that_is_not_what_the_stack_says_ends_the_build(python: str, glibc: str, told: str) -> None:
    """The script as the step runs it, in the Python here and a C library that calls itself 2.36."""
    code = f"import os, runpy; os.confstr = lambda _: 'glibc 2.36'; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, python, glibc], capture_output=True, text=True, check=False)
    assert (done.returncode, told in done.stderr) == (1 if told else 0, True)


def test_the_check_of_a_base_is_the_first_step(project: Path) -> None:
    """Of the project's own template, which hadolint finds clean."""
    file = project / "pins/stacks/cpu.yaml"
    data = yaml.safe_load(file.read_text())
    del data["debian"]
    file.write_text(yaml.safe_dump(data | {"base": {"image": f"a@{DIGEST}", "python": "3.11.2", "glibc": 36}}))
    stack = manifests.load_stack(project, "cpu")
    known = schema.StackLock.model_validate_json((project / "pins/stacks/cpu.lock").read_text())
    lock = known.model_copy(update={"base": f"a@{DIGEST}", "debs": []})
    (image,) = render.render_chain(project, stack, lock, manifests.load_chain(project, "base"))
    step = '["python3", "/tmp/tools/base.py", "3.11.2", "36"]'
    lines = [line.strip() for line in image.dockerfile.splitlines()]
    assert lines[lines.index(step) + 1] == "FROM known AS venv" and lines[lines.index(step) - 2].endswith("AS known")
    assert "tools/base.py" in [file.path for file in image.context]
    assert lint.hadolint(PROJECT, {"base.Dockerfile": image.dockerfile}) == []


ROOT_LINE, OTHER = "root:x:0:0:root:/root:/bin/bash", "vendor:x:10001:10001::/srv:/bin/sh"


@pytest.mark.parametrize(
    ("there", "comes"),
    [
        (f"{ROOT_LINE}\n", f"{ROOT_LINE}\n{context_files.PASSWD}\n"),
        (ROOT_LINE, f"{ROOT_LINE}\n{context_files.PASSWD}\n"),  # the last line is not ended
        (None, f"{context_files.PASSWD}\n"),
        (f"{ROOT_LINE}\n{OTHER}\n", None),  # the base has a user of that number: it stays as it is
    ],
)
def test_a_base_gets_the_user_and_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str | None, comes: str | None
) -> None:
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *arguments: given.append(arguments))  # only root may
    install = runpy.run_path(str(PROJECT / "dockerfiles/install.py"))
    lines, etc, layer = tmp_path / "lines", tmp_path / "etc", tmp_path / "layer"
    tiny_images.write(lines / "passwd", f"{context_files.PASSWD}\n")
    tiny_images.write(lines / "group", f"{context_files.GROUP}\n")
    if there is not None:
        tiny_images.write(etc / "passwd", there)
    install["add_user"](lines, str(layer), etc)
    home, made = layer / "home/sparkpin", layer / "etc/passwd"
    assert home.is_dir() and given == [(str(home), 10001, 10001)]
    assert (made.read_text() if made.exists() else None) == comes
    assert (layer / "etc/group").read_text() == f"{context_files.GROUP}\n"


def test_a_base_with_another_user_of_that_name_is_refused(tmp_path: Path) -> None:
    install = runpy.run_path(str(PROJECT / "dockerfiles/install.py"))
    for folder, line in (("lines", context_files.PASSWD), ("etc", context_files.PASSWD.replace("10001", "999"))):
        tiny_images.write(tmp_path / folder / "passwd", f"{line}\n")
    with pytest.raises(SystemExit, match="has a 'sparkpin' with another number than 10001"):
        install["add_user"](tmp_path / "lines", str(tmp_path / "layer"), tmp_path / "etc")


@pytest.mark.engine
def test_images_stand_on_what_the_engine_has_under_the_digest(tmp_path: Path) -> None:
    engine, name, said = Engine.connect(), f"test{uuid.uuid4().hex[:8]}", [""]
    with registry(tiny_images.make_rootfs(tmp_path / "base.tar", ["install"])) as image:
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
        listed = listing.read_contents(layer_file(paths, below.diff_ids[0]))
        assert "bin/sh" in {entry.path for entry in listed}
        added = listing.read_contents(layer_file(paths, built[0].diff_ids[-1]))
        (home,) = [entry for entry in added if entry.path == "home/sparkpin"]
        assert (home.kind, home.uid, home.gid, home.mode) == ("dir", 10001, 10001, 0o755)
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
