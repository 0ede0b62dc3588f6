"""One digest from every engine: this machine's Docker and a newer one, with overlay2 and with containerd's store.

Each is an engine of the tests' own, empty at the start.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_images
from build_site import Site
from heard import heard
from in_container import output_of
from newer_engine import NEWER, newer_cli, newer_engine
from newer_engine import newer_root as newer_root
from private_engine import content_of, file_layer, private_engine, remove_tags

from sparkpin.build import rootfs
from sparkpin.build.image import build_image
from sparkpin.build.record import record_file
from sparkpin.core.errors import EngineError
from sparkpin.host import buildkit
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.saved import open_saved

REF = "sparkpin/test:1"
CONFIG = {
    "Cmd": ["serve", "--help"],
    "Entrypoint": ["/bin/sh"],
    "Env": ["B=2", "A=1"],
    "ExposedPorts": {"8000/tcp": {}},
    "Healthcheck": {"Test": ["CMD", "true"], "Interval": 30_000_000_000, "Retries": 3},
    "Labels": {"text": "ü <&> \u2028"},
    "Shell": ["/bin/sh", "-c"],
    "StopSignal": "SIGINT",
    "User": "10001:10001",
    "Volumes": {"/data": {}},
    "WorkingDir": "/opt",
}
CONFIG_DIGESTS = {
    "amd64": "sha256:39642cbe1c6b5702be7922e6bbd2b91c773762a082f48b12e74f167bb54bf97d",
    "arm64": "sha256:40ea9f311d1e101135177e2cd7c7df7303dd729789ad4afc00e30f18719e4abc",
}


@pytest.fixture(scope="module")
def make_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Engine], Site]]:
    tar = tiny_images.make_rootfs(tmp_path_factory.mktemp("engines") / "rootfs.tar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rootfs, "build_rootfs", lambda *args: tar)
        yield lambda engine: Site.make(tmp_path_factory.mktemp("site"), engine)


@pytest.fixture(scope="module")
def expected(make_site: Callable[[Engine], Site]) -> list[ImageInfo]:
    """What this machine's Docker makes."""
    with private_engine() as engine:
        return make_site(engine).build_all()


@pytest.fixture(scope="module", params=["own", *(pytest.param(name, marks=pytest.mark.slow) for name in NEWER)])
def site(request: pytest.FixtureRequest, make_site: Callable[[Engine], Site]) -> Iterator[Site]:
    if request.param == "own":
        with private_engine() as engine:
            yield make_site(engine)
    else:
        with newer_engine(request.param, request.getfixturevalue("newer_root")) as engine:
            yield make_site(engine)


@pytest.fixture
def engine(site: Site) -> Iterator[Engine]:
    """The engine; images that the test makes beside the project's are removed."""
    yield site.engine
    remove_tags(site.engine, "test")


def identity(images: list[ImageInfo]) -> list[tuple[str, tuple[str, ...]]]:
    return [(image.config_digest, image.diff_ids) for image in images]


def saved_config(engine: Engine, ref: str, archive: Path) -> str:
    """Digest of the configuration that an image really has, by the archive that the engine saves of it."""
    with archive.open("wb") as file:
        engine.save(ref, file)
    with tarfile.open(archive) as tar:
        (row,) = json.loads(content_of(tar, "manifest.json"))
        return "sha256:" + hashlib.sha256(content_of(tar, row["Config"])).hexdigest()


def nameless(engine: Engine) -> list[str]:
    return [image.id for image in engine.client.images.list() if not image.tags]


def test_every_engine_makes_the_same_images(
    site: Site, expected: list[ImageInfo], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["site"]
    if kind in NEWER:
        assert site.engine.version.split(".")[0] == kind.split("-")[1]
    assert site.engine.keeps_layers == ("containerd" not in kind)
    lines = heard()
    assert identity(site.build_all()) == identity(expected)
    made = [line for line in lines if re.search(r" in [\d.]+ s$", line)]
    assert len(made) == len(site.chain())
    lines.clear()
    assert identity(site.build_all()) == identity(expected)
    assert len(lines) == len(site.chain()), "each is there, and none is made again"
    assert identity(site.elsewhere(tmp_path / "fresh").build_all()) == identity(expected)
    assert nameless(site.engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("site", [*NEWER], indirect=True)
def test_buildx_builds_the_same_images(
    site: Site,
    expected: list[ImageInfo],
    newer_root: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    suite, _ = NEWER[request.node.callspec.params["site"]]
    folder = newer_cli(newer_root(suite), tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(buildkit, "builder", buildkit.builder.__wrapped__)
    assert buildkit.builder() == str(folder / "docker")
    assert identity(site.elsewhere(tmp_path / "trees").build_all()) == identity(expected)


def test_no_layer_is_sent_that_the_engine_has(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the notes of an earlier run nor without them."""
    first = site.build_all()
    sent: list[bool] = []
    load_sealed = Engine.load_sealed

    def load(*args: object, **options: object) -> object:
        sent.extend(not isinstance(part, str) for part in args[1])  # type: ignore[attr-defined]
        return load_sealed(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "load_sealed", load)
    record_file(site.paths, site.chain()[1]).unlink()
    assert identity(site.build_all()) == identity(first) and sent == [False] * 3
    again = site.elsewhere(tmp_path)
    sent.clear()
    built = build_image(again.paths, again.engine, again.chain()[1])
    assert identity([built]) == identity(first[1:2]) and sent == [False, False, True]


def test_an_image_is_whole_and_runs(site: Site, tmp_path: Path) -> None:
    two = site.build_all()[-1]
    command = ["/bin/sh", "-c", "echo $GREETING; for file in /opt/*; do echo $file; done"]
    assert output_of(site.engine, two.tags[0], command).split() == ["hello", "/opt/hello", "/opt/net"]
    assert saved_config(site.engine, two.tags[0], tmp_path / "two.tar") == two.config_digest
    with open_saved(tmp_path / "two.tar") as saved:
        assert tuple(saved.diff_ids) == two.diff_ids
        found = ["sha256:" + hashlib.sha256(layer.read()).hexdigest() for layer in saved.layers]
    assert tuple(found) == two.diff_ids


@pytest.mark.parametrize("architecture", [*CONFIG_DIGESTS])
def test_a_configuration_comes_through(engine: Engine, tmp_path: Path, architecture: str) -> None:
    layers = [file_layer("opt/one", b"1"), file_layer("opt/two", b"2")]
    parts = [read_layer(io.BytesIO(layer)) for layer in layers]
    sealed = engine.load_sealed(parts, CONFIG, os="linux", architecture=architecture, tag=REF)
    assert sealed.config_digest == CONFIG_DIGESTS[architecture]
    image = engine.image(REF)
    assert image is not None and (image.config_digest, image.diff_ids) == (sealed.config_digest, sealed.diff_ids)
    assert saved_config(engine, REF, tmp_path / "saved.tar") == sealed.config_digest
    upper = f"{REF}-upper"
    above = [*sealed.diff_ids, read_layer(io.BytesIO(layers[0]))]
    second = engine.load_sealed(above, image.config, os="linux", architecture=architecture, tag=upper)
    engine.untag(REF)
    assert saved_config(engine, upper, tmp_path / "upper.tar") == second.config_digest
    assert [image.config_digest for image in [engine.image(upper)] if image] == [second.config_digest]


def test_a_layer_that_the_engine_lacks_is_refused(engine: Engine) -> None:
    parts = ["sha256:" + "0" * 64, read_layer(io.BytesIO(file_layer("opt/x", b"1")))]
    before = nameless(engine)
    with pytest.raises(EngineError):
        engine.load_sealed(parts, {}, os="linux", architecture="amd64", tag=REF)
    assert engine.image(REF) is None and nameless(engine) == before
