"""Images on a base by digest in place of a root file system: what is refused, and what it changes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_images
import yaml
from based_images import DIGEST, chain_of, on_base
from checkout import PROJECT

from sparkpin.build import context, render, rootfs
from sparkpin.commands import lint
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch import stack as lock
from sparkpin.fetch.stack import lock_stack
from sparkpin.fetch.wheels import target_of
from sparkpin.pins import manifests, schema

SCRIPT = str(PROJECT / "dockerfiles/base.py")


@pytest.mark.parametrize(
    "image", ["somebody/base:24.04", f"somebody/base@{DIGEST[:-1]}", f"somebody/base@{DIGEST} AS x"]
)
def test_a_tag_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack(on_base(tmp_path, image), "tiny")
    assert (caught.value.key, caught.value.got) == ("base.image", image)


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


def test_the_user_is_the_one_of_our_own_root_file_systems() -> None:
    script = rootfs.CUSTOMIZE.read_text()
    for kind, line in (("passwd", context.PASSWD), ("group", context.GROUP)):
        assert f"echo '{line}' >>\"$root/etc/{kind}\"" in script


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
        (f"{ROOT_LINE}\n", f"{ROOT_LINE}\n{context.PASSWD}\n"),
        (ROOT_LINE, f"{ROOT_LINE}\n{context.PASSWD}\n"),  # the last line is not ended
        (f"{ROOT_LINE}\n{OTHER}\n", None),  # the base has a user of that number: it stays as it is
    ],
)
def test_a_base_gets_the_user_and_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, comes: str | None
) -> None:
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *arguments: given.append(arguments))  # only root may
    install = runpy.run_path(str(PROJECT / "dockerfiles/install.py"))
    lines, etc, layer = tmp_path / "lines", tmp_path / "etc", tmp_path / "layer"
    tiny_images.write(lines / "passwd", f"{context.PASSWD}\n")
    tiny_images.write(lines / "group", f"{context.GROUP}\n")
    tiny_images.write(etc / "passwd", there)
    install["add_user"](lines, str(layer), etc)
    home, made = layer / "home/sparkpin", layer / "etc/passwd"
    assert home.is_dir() and given == [(str(home), 10001, 10001)]
    assert (made.read_text() if made.exists() else None) == comes
    assert (layer / "etc/group").read_text() == f"{context.GROUP}\n"


def test_a_base_with_another_user_of_that_name_is_refused(tmp_path: Path) -> None:
    install = runpy.run_path(str(PROJECT / "dockerfiles/install.py"))
    for folder, line in (("lines", context.PASSWD), ("etc", context.PASSWD.replace("10001", "999"))):
        tiny_images.write(tmp_path / folder / "passwd", f"{line}\n")
    with pytest.raises(SystemExit, match="has a 'sparkpin' with another number than 10001"):
        install["add_user"](tmp_path / "lines", str(tmp_path / "layer"), tmp_path / "etc")
