"""Bundles of real images: read by other tools, taken in without a network, never half."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from carried_release import CHECKOUT, Source, carried_release, engine_with_url
from private_engine import file_layer, load_image, quiet

from sparkpin import importing
from sparkpin.bundle import EXPORTS, IMPORTS
from sparkpin.engine import Engine
from sparkpin.errors import DiskError, EngineError, IntegrityError
from sparkpin.exporting import Wanted, export
from sparkpin.importing import IMPORTED, import_bundle
from sparkpin.inputs import Inputs
from sparkpin.jobs import checkpoint_of
from sparkpin.paths import Paths
from sparkpin.releases import STATEMENT, Release, Releases
from sparkpin.transfer import copy

pytestmark = pytest.mark.engine
INVOKE = Path(sys.executable).parent / "invoke"
CHECKPOINT = """
from pathlib import Path
from sparkpin.jobs import checkpoint_of
from sparkpin.paths import Paths
from sparkpin.releases import Releases
paths = Paths.from_env()
print(checkpoint_of(paths, Releases(paths).all()[0]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with carried_release(tmp_path_factory.mktemp("source")) as source:
        smoke = Releases(source.paths).evidence(source.release) / "smoke"
        smoke.mkdir()
        (smoke / "server.log").write_text("ready\n")
        yield source


def write(source: Source, target: Path, release: Release | None = None, **wanted: bool) -> Path:
    export(source.paths, lambda: source.engine, release or source.release, target, Wanted(**wanted), quiet)
    return target


@pytest.fixture(scope="module")
def bundle(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(source, tmp_path_factory.mktemp("bundle") / "release.tar", store=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Engine, str]]:
    with engine_with_url() as found:
        yield found


@pytest.fixture
def empty(engine: tuple[Engine, str]) -> Iterator[Engine]:
    """One engine for all tests, each of which finds it empty."""
    yield engine[0]
    for image in engine[0].client.images.list():
        engine[0].client.images.remove(image.id, force=True)


def offline(url: str, folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run something in a network namespace without interfaces, with state folders of its own."""
    env = {**os.environ, "DOCKER_HOST": url, "SPARKPIN_HOME": str(folder / "home")}
    env |= {"SPARKPIN_CACHE": str(folder / "cache"), "PYTHONPATH": str(CHECKOUT / "src")}
    argv = ["unshare", "--net", *map(str, command)]
    return subprocess.run(argv, cwd=CHECKOUT, env=env, capture_output=True, text=True)


def files_of(paths: Paths) -> dict[str, bytes]:
    roots = [root for root in (paths.home, paths.cache) if root.exists()]
    return {
        str(p): p.read_bytes()
        for root in roots
        for p in root.rglob("*")
        if p.is_file() and not p.name.endswith(".lock")
    }


def test_other_tools_read_it(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("needs skopeo (apt-get install skopeo)")
    (tmp_path / "tmp").mkdir()
    skopeo = ["skopeo", "--tmpdir", str(tmp_path / "tmp")]
    where = f"oci-archive:{bundle}:{source.release.tag}"
    seen = json.loads(subprocess.check_output([*skopeo, "inspect", where]))
    assert seen["Layers"] == list(source.release.diff_ids) and seen["Architecture"] == "amd64"
    assert json.loads(subprocess.check_output([*skopeo, "inspect", f"oci-archive:{bundle}"])) == seen
    policy = ["--insecure-policy"]
    subprocess.run([*skopeo, *policy, "copy", "-q", where, f"dir:{tmp_path / 'copied'}"], check=True)
    assert (tmp_path / "copied" / source.release.image.removeprefix("sha256:")).is_file()
    with bundle.open("rb") as file:
        empty.load(file)  # `docker load` takes it, too
    image = empty.image(source.release.tag)
    assert image and image.config_digest == source.release.image


def test_same_bytes_each_time(source: Source, bundle: Path, tmp_path: Path) -> None:
    assert write(source, tmp_path / "again.tar", store=True).read_bytes() == bundle.read_bytes()
    rows = json.loads((Releases(source.paths).evidence(source.release) / EXPORTS).read_text())
    assert {(row["file"], row["with_store"]) for row in rows} >= {(str(bundle), True)}


def test_taken_in_without_network(
    source: Source, bundle: Path, tmp_path: Path, engine: tuple[Engine, str], empty: Engine
) -> None:
    """By the tasks, in a checkout without such a recipe: imported, listed, and its checkpoint made."""
    url = engine[1]
    tag = source.release.tag
    done = offline(url, tmp_path, INVOKE, "import", bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"next: invoke smoke --release {tag}" in done.stdout and "sending 3 of 3 layers" in done.stderr
    (row,) = json.loads(offline(url, tmp_path, INVOKE, "images", "--json").stdout)
    assert (row["tag"], row["state"], row["image"]) == (tag, "built", source.release.image)
    made = offline(url, tmp_path, sys.executable, "-c", CHECKPOINT)
    assert made.returncode == 0, made.stderr
    assert "fetching" not in made.stderr
    assert (Path(made.stdout.strip()) / "model.safetensors.index.json").is_file()
    verified = offline(url, tmp_path, INVOKE, "verify", tag)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    for task in (["reproduce", "--release"], ["rebuild"]):
        refused = offline(url, tmp_path, INVOKE, *task, tag)
        assert refused.returncode == 2 and "came from another machine" in refused.stderr, refused.stderr
    assert offline(url, tmp_path, INVOKE, "rebuild", tag, "--trust").returncode == 0
    again = offline(url, tmp_path, INVOKE, "import", bundle)
    assert again.returncode == 0 and "the engine has the image" in again.stderr
    paths = source.elsewhere(tmp_path)
    release = Releases(paths).get(tag)
    assert dataclasses.replace(release, state="built") == source.release
    evidence = Releases(paths).evidence(release)
    assert (evidence / STATEMENT).is_file() and not (evidence / "smoke").exists()
    assert (evidence / IMPORTED / "smoke/server.log").read_text() == "ready\n"
    (note,) = json.loads((evidence / IMPORTS).read_text())
    assert note["file"] == str(bundle)


def test_what_was_imported_can_be_exported_again(source: Source, tmp_path: Path, empty: Engine) -> None:
    paths = source.elsewhere(tmp_path)
    first = write(source, tmp_path / "first.tar", source.releases[0], store=True)
    release = import_bundle(paths, empty, first, quiet).release
    export(paths, lambda: empty, release, tmp_path / "second.tar", Wanted(store=True), quiet)
    assert (tmp_path / "second.tar").read_bytes() == first.read_bytes()


def test_with_its_checkpoint(source: Source, tmp_path: Path, empty: Engine) -> None:
    base = source.releases[0]
    made = checkpoint_of(source.paths, base)
    bundle = write(source, tmp_path / "served.tar", base, checkpoint=True)
    paths = source.elsewhere(tmp_path)
    import_bundle(paths, empty, bundle, quiet)
    folder = Releases(paths).checkpoint(base)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in made.iterdir()}
    assert not paths.models.exists()
    (folder / "config.json").unlink()
    import_bundle(paths, empty, bundle, quiet)
    assert (folder / "config.json").is_file(), "a checkpoint with a hole is made whole"


def test_what_the_engine_has_is_not_sent(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    paths = source.elsewhere(tmp_path)
    first = import_bundle(paths, empty, write(source, tmp_path / "base.tar", source.releases[0]), quiet).sent
    second = import_bundle(paths, empty, bundle, quiet).sent
    assert first and second and (first.layers, second.layers, second.skipped) == (2, 1, 2)
    assert [release.stage for release in Releases(paths).all()] == ["base", "two"]


def test_records_alone_need_the_image(
    source: Source, tmp_path: Path, engine: tuple[Engine, str], empty: Engine
) -> None:
    bundle = write(source, tmp_path / "records.tar", image=False)
    paths = source.elsewhere(tmp_path)
    with pytest.raises(EngineError, match="holds no image") as caught:
        import_bundle(paths, empty, bundle, quiet)
    assert "invoke copy" in caught.value.next_step and files_of(paths) == {}
    copy(source.paths, source.engine, source.release, engine[1], quiet)
    assert import_bundle(paths, empty, bundle, quiet).sent is None
    assert Releases(paths).get(source.release.tag).image == source.release.image


@pytest.mark.parametrize("step", ["load_image", "keep_files", "keep_evidence", "write_record"])
def test_killed_anywhere_it_goes_on(
    source: Source, bundle: Path, tmp_path: Path, empty: Engine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The steps are interrupted from within: a signal would come too early or too late."""

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    paths = source.elsewhere(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(importing, step, killed)
        with pytest.raises(KeyboardInterrupt):
            import_bundle(paths, empty, bundle, quiet)
    assert Releases(paths).all() == []
    import_bundle(paths, empty, bundle, quiet)
    fresh = source.elsewhere(tmp_path / "fresh")
    import_bundle(fresh, empty, bundle, quiet)
    ours = {name.replace(str(tmp_path), ""): data for name, data in files_of(paths).items()}
    theirs = {name.replace(str(tmp_path / "fresh"), ""): data for name, data in files_of(fresh).items()}
    assert {name for name in ours if IMPORTS not in name} == {name for name in theirs if IMPORTS not in name}
    assert all(ours[name] == theirs[name] for name in ours if IMPORTS not in name)


def test_a_damaged_input_is_mended(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    paths = source.elsewhere(tmp_path)
    import_bundle(paths, empty, bundle, quiet)
    path = Inputs.of(paths).kept.path(next(iter(source.release.inputs.values())))
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    import_bundle(paths, empty, bundle, quiet)
    assert path.read_bytes() == data


def test_another_release_under_the_tag_stays(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    paths = source.elsewhere(tmp_path)
    Releases(paths).save(dataclasses.replace(source.release, image="sha256:" + "0" * 64))
    before = files_of(paths)
    with pytest.raises(IntegrityError, match=r"this machine made it with sha256:0000") as caught:
        import_bundle(paths, empty, bundle, quiet)
    assert "invoke reproduce" in caught.value.next_step
    assert files_of(paths) == before and not empty.client.images.list()


def test_another_image_under_the_tag_stays(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    image = load_image(empty, source.release.tag, [file_layer("x", b"x")])
    paths = source.elsewhere(tmp_path)
    with pytest.raises(IntegrityError, match="the engine has another image under"):
        import_bundle(paths, empty, bundle, quiet)
    assert files_of(paths) == {}
    assert [found.id for found in empty.client.images.list()] == [image.config_digest]


def test_a_small_disk_is_told_before_anything(
    source: Source, bundle: Path, tmpfs: Callable[[str], Path], tmp_path: Path, empty: Engine
) -> None:
    disk = tmpfs("20m")
    paths = Paths(CHECKOUT, tmp_path / "cache", disk / "home")
    with pytest.raises(DiskError, match="the bundle's files need"):
        import_bundle(paths, empty, bundle, quiet)
    assert files_of(paths) == {} and not empty.client.images.list()
    with pytest.raises(DiskError, match=r"need .* bytes"):
        write(source, tmpfs("1m") / "out.tar")
    assert not (disk / "out.tar").exists()
