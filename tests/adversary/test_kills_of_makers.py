"""`build`, `rollback`, `import` and `fetch` killed at any moment: what is there afterwards is whole or is not trusted,
and the same command again succeeds. And where the secrets of their environment go: nowhere.

A small project, with real builds in engines of the tests' own; its root file system alone has no packages.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stack_samples
from carried_release import NAME, Source, carried_release, engine_with_url
from checkout import PROJECT
from kills import Victim
from tiny_images import whole
from wheelhouse import Index, make_wheel

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.build.record import read_record
from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths
from sparkpin.core.tags import UNSEALED
from sparkpin.distribute.transfer import export
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.releases.current import promote
from sparkpin.releases.record import Release, Releases

pytestmark = pytest.mark.slow

KILLS = 5
SETUP = "sparkpin_hello-0.1.0.dist-info"  # a folder of the mod, in its wheel
SECRET = hashlib.sha256(b"a secret of the environment").hexdigest()
SECRETS = dict.fromkeys(
    ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"), SECRET
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with carried_release(tmp_path_factory.mktemp("source")) as source:
        shutil.copy(PROJECT / "tasks.py", source.paths.project)
        stacks = source.paths.project / "pins/stacks"
        shutil.copy(stacks / f"{NAME}.yaml", stacks / "cpu.yaml")  # a checkout has a stack for this machine
        records = Releases(source.paths)
        for release in source.releases:
            checkpoint_of(source.paths, release)
            records.smoked(release.tag, {"passed": True, "seconds": 1.0, "checks": []})
        yield source


def command(paths: Paths, engine: Engine, *line: str) -> Victim:
    env = {"SPARKPIN_PROJECT": paths.project, "SPARKPIN_HOME": paths.home, "SPARKPIN_CACHE": paths.cache}
    return Victim(line, {name: str(path) for name, path in env.items()} | SECRETS | dict(engine.host))


def require_coherent(paths: Paths, engine: Engine) -> list[Release]:
    """Each record can be read, is of what was built, and its image is there."""
    records = Releases(paths)
    for path in paths.images.glob("[!.]*.json"):
        read_record(path)
    found = records.all()
    for release in found:
        require_consistent(paths, release)
        image = engine.image(release.tag)
        assert image and image.config_digest == release.image
    assert not engine.client.containers.list(all=True)
    return found


def left(folder: Path) -> list[Path]:
    return list(folder.rglob(f"{PARTIAL}*"))


def changed_mod(source: Source) -> None:
    """Another source than anybody has had: two stages are built anew."""
    module = source.paths.project / "mods/hello/sparkpin_hello/__init__.py"
    module.write_text(f'"""Made up."""\nVALUE = {time.time_ns()}\n')


def test_build(source: Source, record_property: Callable[[str, object], None]) -> None:
    paths, engine = source.paths, source.engine
    build = command(paths, engine, "build", "--recipe", NAME)
    changed_mod(source)
    build.done()
    known = len(Releases(paths).all())
    for _ in build.kills(KILLS, lambda: changed_mod(source)):
        require_coherent(paths, engine)
        build.done()
        found = require_coherent(paths, engine)
        assert len(found) > known and found[-1].stage == "two"
        known = len(found)
        assert not left(paths.home) and not list(paths.images.glob("*.begun"))
        assert not [tag for image in engine.client.images.list() for tag in image.tags if UNSEALED in tag]
    record_property("trials", KILLS)


def test_rollback(source: Source, record_property: Callable[[str, object], None]) -> None:
    """Where it lands is not the question: what is current is a release that passed, and the engine says the same."""
    paths, engine, records = source.paths, source.engine, Releases(source.paths)
    good = [release.tag for release in records.of_recipe(NAME) if release.is_good]
    back = command(paths, engine, "rollback", "--recipe", NAME)

    def forward() -> None:
        promote(paths, engine, records.get(good[-1]))

    forward()
    back.done()
    for _ in back.kills(KILLS, forward):
        require_coherent(paths, engine)
        assert records.current_tag(NAME) in good
        if records.current_tag(NAME) == good[-1]:  # else it was killed when all was done
            back.done()
        current = records.current(NAME)
        image = engine.image(str(records.current_tag(NAME)))
        assert current and current.tag in good and image and image.config_digest == current.image
        assert [release.tag for release in records.of_recipe(NAME) if release.state == "current"] == [current.tag]
        assert not left(paths.home)
    record_property("trials", KILLS)


def test_import(source: Source, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    bundle, paths = tmp_path / "release.tar", source.elsewhere(tmp_path)
    export(source.paths, source.engine, source.release, bundle, store=True)
    with engine_with_url() as (engine, _):

        def nothing_here() -> None:
            for folder in (paths.home, paths.cache):
                shutil.rmtree(folder, ignore_errors=True)
            for image in engine.client.images.list():
                engine.client.images.remove(image.id, force=True)

        taken_in = command(paths, engine, "import", str(bundle))
        taken_in.done()
        for _ in taken_in.kills(KILLS, nothing_here):
            require_coherent(paths, engine)
            taken_in.done()
            [release] = require_coherent(paths, engine)
            assert (release.tag, release.image) == (source.release.tag, source.release.image)
    record_property("trials", KILLS)


def test_fetch(source: Source, tmp_path: Path, index: Index, record_property: Callable[[str, object], None]) -> None:
    name = "fetched"
    paths = whole(tmp_path, name, b"no package")
    shutil.copy(PROJECT / "tasks.py", paths.project)
    wheels = [make_wheel(index.folder, f"w{number}", size=300_000) for number in range(6)]
    debs = stack_samples.locked(paths).debs
    lock = manifests.load_stack_lock(paths.project, manifests.load_stack(paths.project, name))
    path = paths.project / f"pins/stacks/{name}.lock"
    path.write_text(manifests.lock_text(lock.model_copy(update={"debs": debs, "wheels": wheels})))
    store = Store(paths.store)
    fetch = command(paths, source.engine, "build", "--fetch-only", "--recipe", name)

    def nothing_here() -> None:
        index.slow = {wheel.file: 0.3 for wheel in wheels}
        for wheel in wheels:
            store.path(wheel.sha256).unlink(missing_ok=True)
        shutil.rmtree(paths.store / "incoming", ignore_errors=True)

    nothing_here()
    fetch.done()
    for _ in fetch.kills(KILLS, nothing_here):
        there = [wheel for wheel in wheels if store.path(wheel.sha256).exists()]
        assert all(store.verified(wheel) for wheel in there), "under its name a file is whole"
        index.slow = {}
        fetch.done()
        assert all(store.verified(wheel) for wheel in wheels)
        assert not left(paths.cache) and not list(paths.store.rglob("*.part"))
    record_property("trials", KILLS)


def test_the_secrets_of_the_environment_go_nowhere(
    source: Source, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Image, its layers and labels, records, evidence, bundle, and what the commands say."""
    paths, engine, bundle = source.paths, source.engine, tmp_path / "release.tar"
    changed_mod(source)
    said = command(paths, engine, "build", "--recipe", NAME).done()
    tag = Releases(paths).of_recipe(NAME)[-1].tag
    said += command(paths, engine, "export", tag, str(bundle), "--with-store").done()
    image = engine.client.images.get(tag)
    saved = tmp_path / "image.tar"
    subprocess.run(["docker", "save", "-o", saved, tag], env=dict(engine.host), check=True)
    places = {"output": said, "inspect": json.dumps(image.attrs), "history": json.dumps(image.history())}
    for file in (saved, bundle, *(path for root in (paths.home, paths.cache) for path in root.rglob("*"))):
        if file.is_file():
            places[str(file)] = readable(file).decode("latin-1")
    module = (paths.project / "mods/hello/sparkpin_hello/__init__.py").read_text().splitlines()[1]
    found = {word: [place for place, text in places.items() if word in text] for word in (SECRET, module, SETUP)}
    assert found[SECRET] == []
    assert str(saved) in found[SETUP] and str(bundle) in found[module], "what is there is found"
    print(f"looked for in {len(places)} places")
    record_property("trials", len(SECRETS))


def readable(file: Path) -> bytes:
    """With what is packed in it."""
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if zipfile.is_zipfile(file) and data[:2] == b"PK":
        with zipfile.ZipFile(file) as packed:
            return data + b"".join(map(packed.read, packed.namelist()))
    return data
