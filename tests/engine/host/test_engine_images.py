"""The engine behind its API and its CLI, with the machine's own; no network is used."""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_engine import content_of, file_layer
from tiny_images import make_rootfs

from sparkpin.core.errors import BuildError
from sparkpin.host import buildkit
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import read_layer


@pytest.fixture
def engine() -> Engine:
    return Engine.connect()


@pytest.fixture
def shell(engine: Engine, tmp_path: Path) -> Iterator[str]:
    """An image with a shell and nothing else."""
    ref = f"sparkpin-test/shell:{uuid.uuid4().hex[:12]}"
    engine.import_rootfs(make_rootfs(tmp_path / "rootfs.tar"), ref, architecture="amd64", labels={"made": "up"})
    yield ref
    engine.untag(ref)


@pytest.fixture
def ref(engine: Engine) -> Iterator[str]:
    name = f"sparkpin-test/image:{uuid.uuid4().hex[:12]}"
    yield name
    engine.untag(name)


def context(folder: Path, dockerfile: str) -> Path:
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "file").write_text("content\n")
    return folder


def built_file(folder: Path, name: str) -> bytes:
    """A file of what the Dockerfile of a folder makes."""
    out = folder.parent / "out.tar"
    buildkit.build(folder, f"--output=type=tar,dest={out}")
    with tarfile.open(out) as tar:
        return content_of(tar, name)


def test_a_source_that_fails_midway_leaves_no_tag(engine: Engine, ref: str) -> None:
    torn = read_layer(io.BytesIO(file_layer("opt/x", b"d" * 3_000_000)))
    torn.source.truncate(1_000_000)
    with pytest.raises(BuildError):
        engine.load_sealed([torn], {}, os="linux", architecture="amd64", tag=ref)
    assert engine.image(ref) is None


def test_a_failing_step_shows_its_output(engine: Engine, shell: str, tmp_path: Path, ref: str) -> None:
    dockerfile = f'FROM {shell} AS stage\nRUN ["/bin/sh", "-c", "echo the reason $((40 + 2)); exit 3"]\n'
    with pytest.raises(BuildError) as raised:
        buildkit.build(context(tmp_path / "c", dockerfile), "--tag", ref)
    assert "the reason 42" in raised.value.message and "exit 3" in raised.value.message
    assert engine.image(ref) is None


def test_a_build_step_has_no_network(engine: Engine, shell: str, tmp_path: Path) -> None:
    show = "while read line; do echo $line; done </proc/net/dev >/tmp/net"
    dockerfile = f'FROM {shell} AS a\nRUN ["/bin/sh", "-c", "{show}"]\nFROM scratch\nCOPY --from=a /tmp/net /net\n'
    lines = built_file(context(tmp_path / "c", dockerfile), "net").splitlines()
    names = [line.split(b":")[0].strip() for line in lines if b":" in line]
    assert b"lo" in names and not [name for name in names if name.startswith((b"eth", b"en"))]


def test_a_changed_file_of_equal_size_is_sent_again(engine: Engine, tmp_path: Path) -> None:
    """What `context.date` is for; the two folders differ in nothing but content and, through it, mtime."""
    from sparkpin.build.context import date

    seen = []
    for text in ("one", "two"):
        folder = tmp_path / text / "context"
        folder.mkdir(parents=True)
        for name, content in (("Dockerfile", "FROM scratch\nCOPY file /file\n"), ("file", text)):
            (folder / name).write_text(content)
            date(folder / name)
        seen.append(built_file(folder, "file"))
    assert seen == [b"one", b"two"]
