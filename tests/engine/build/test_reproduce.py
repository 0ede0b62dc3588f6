"""Releases of a made-up project, built again in an engine of their own. Only the root file system is replaced."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_images
from heard import heard
from in_container import output_of
from private_engine import remove_built, tags_in

from sparkpin.build import image as build
from sparkpin.build import make, rootfs
from sparkpin.build.pair import pair
from sparkpin.build.record import BuildRecord, layer_file, records_of, write_record
from sparkpin.build.reproduce import StageResult, reproduce, restore
from sparkpin.core import progress
from sparkpin.core.errors import DifferenceError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.host.daemon import ask
from sparkpin.host.engine import Engine
from sparkpin.host.machine import SYSTEM_PATH
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd", path=SYSTEM_PATH) is None,
    reason="needs root and dockerd (apt-get install docker.io) to start an engine of its own",
)

READ = "while read line; do echo $line; done </opt/extra"  # the image has a shell and nothing else


@dataclass(frozen=True)
class Site:
    paths: Paths
    engine: Engine
    recipe: str
    said: list[str]

    def build(self) -> tuple[Release, ...]:
        with make.at_work(self.paths) as engine:
            return tuple(make.build_releases(self.paths, engine, pair(self.paths.project, self.recipe)))

    def reproduce(self, release: Release) -> tuple[StageResult, ...]:
        return reproduce(self.paths, release)

    def edit_record(self, release: Release, stage: str, old: str, new: str) -> BuildRecord:
        """As if the step had run otherwise then: the record's Dockerfile is made to do something else now."""
        record = next(record for record in records_of(self.paths, release) if record.stage == stage)
        assert old in record.dockerfile
        edited = record.model_copy(update={"dockerfile": record.dockerfile.replace(old, new)})
        write_record(self.paths, edited)
        return edited


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    name = f"test{uuid.uuid4().hex[:8]}"
    paths = tiny_images.whole(tmp_path, name, name.encode())
    tar = tiny_images.make_rootfs(tmp_path / "rootfs.tar")
    monkeypatch.setattr(rootfs, "build_rootfs", lambda *args: tar)
    site = Site(paths, Engine.connect(), name, heard())
    yield site
    remove_built(site.engine, paths, name)


def test_the_same_images_come_out_when_the_project_has_moved_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    release = site.build()[-1]
    tiny_images.write(site.paths.project / "mods/hello/sparkpin_hello/__init__.py", '"""Made up."""\nVALUE = 3\n')
    shutil.rmtree(site.paths.project / "stages")
    layer_file(site.paths, release.diff_ids[-1]).unlink()  # which only a comparison of files would read
    results = site.reproduce(release)
    assert {result.stage: result.verdict for result in results} == dict.fromkeys(("base", "one", "two"), "identical")
    assert results[-1].got == release.image
    assert list(site.paths.work.iterdir()) == [], "the engine's data was not removed"
    for start, far in (
        ("loading the root", " MB: the engine unpacks them"),
        ("base: sealing and loading", " MB: the engine unpacks them"),
    ):
        place = next(at for at, line in enumerate(site.said) if line.startswith(start))
        assert far in "".join(site.said[place:]), start
    assert Releases(site.paths).get(release.tag) == release


def add_file(site: Site, command: str) -> None:
    """Let the first stage write /opt/extra with a shell command (built-in commands only)."""
    template = site.paths.project / "dockerfiles/base.j2"
    text = template.read_text().replace(">/tmp/net", f">/tmp/net; {command} >/tmp/extra")
    copy = "COPY --from=venv /tmp/net /opt/net"
    template.write_text(text.replace(copy, f"{copy}\nCOPY --from=venv /tmp/extra /opt/extra"))


def test_what_differs_is_told_with_both_values(site: Site) -> None:
    add_file(site, "umask 077; read id </proc/sys/kernel/random/uuid; echo $id")
    release = site.build()[0]
    site.edit_record(release, "base", "umask 077", "umask 022")
    site.edit_record(release, "base", "ENV GREETING=hello", "ENV GREETING=bye")
    (result,) = site.reproduce(release)
    assert result.verdict == "different"
    *settings, content, mode = result.lines
    changed = [line for line in settings if "GREETING" in line]
    assert [line.partition("GREETING=")[2][:3] for line in changed] == ["hel", "bye"]
    recorded = output_of(site.engine, release.tag, ["/bin/sh", "-c", READ], user="0").encode()
    assert content.startswith(f"/opt/extra: content {hashlib.sha256(recorded).hexdigest()} -> ")
    assert mode == "/opt/extra: mode 0600 -> 0644"


def test_a_release_whose_image_is_gone_is_made_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint, which takes a model, is left out here."""
    monkeypatch.setattr("sparkpin.build.reproduce.checkpoint_of", lambda *args: None)
    release = site.build()[-1]
    shutil.rmtree(site.paths.project)
    for tag in [tag for tag in tags_in(site.engine) if site.recipe in tag]:
        site.engine.untag(tag)
    assert site.engine.image(release.tag) is None
    restore(site.paths, release)
    image = site.engine.image(release.tag)
    assert image is not None and image.config_digest == release.image


def test_other_bytes_than_recorded_are_not_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin.build.reproduce.checkpoint_of", lambda *args: None)
    release = site.build()[0]
    site.engine.untag(release.tag)
    edited = site.edit_record(release, "base", "ENV GREETING=hello", "ENV GREETING=bye")
    site.engine.untag(edited.ref)
    with pytest.raises(DifferenceError, match="expected sha256:"):
        restore(site.paths, release)
    assert site.engine.image(edited.ref) is None and site.engine.image(release.tag) is None
    assert records_of(site.paths, release)[0] == edited


def test_a_record_of_other_bytes_is_not_taken_for_the_release(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a step that depends on chance had been built again, for another recipe."""
    release = site.build()[0]
    edited = site.edit_record(release, "base", "ENV GREETING=hello", "ENV GREETING=bye")
    site.engine.untag(edited.ref)
    build.build_image(site.paths, site.engine, edited.rendered)
    for task in (site.reproduce, lambda release: restore(site.paths, release)):
        with pytest.raises(IntegrityError, match="is of another image"):
            task(release)
    image = site.engine.image(release.tag)
    assert image is not None and image.config_digest == release.image


def test_lost_and_damaged_inputs_are_told_and_come_back_with_the_next_build(site: Site) -> None:
    release = site.build()[-1]
    inputs = KeptInputs.of(site.paths)
    wheel = next(file for file in records_of(site.paths, release)[1].context if file.path.endswith(".whl"))
    paths = [inputs.store.path(release.inputs[f"recipes/{release.recipe}.yaml"]), inputs.store.path(wheel.sha256)]
    contents = [path.read_bytes() for path in paths]
    paths[1].unlink()
    with pytest.raises(IntegrityError, match=r"1 inputs of .* are gone .* mod hello 0\.1\.0") as lost:
        site.reproduce(release)
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(b"X" + content[1:])
    with pytest.raises(IntegrityError, match="expected size=") as damaged:
        site.reproduce(release)
    assert all("invoke import FILE" in caught.value.next_step for caught in (damaged, lost))
    for file in site.paths.images.iterdir():
        file.unlink()
    assert site.build()[-1] == release
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths] == [path.name for path in paths]


def run_reproduce(site: Site, release: Release, log: Path) -> None:
    def act(line: str) -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    heard(act)
    reproduce(site.paths, release)


def test_a_killed_rebuild_takes_its_engine_with_it_and_the_next_removes_its_folders(site: Site, tmp_path: Path) -> None:
    release, log = site.build()[-1], tmp_path / "log"
    process = multiprocessing.get_context("fork").Process(target=run_reproduce, args=(site, release, log))
    process.start()
    end = time.monotonic() + 400
    while not (log.exists() and "base: " in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    (left,) = site.paths.work.glob("reproduce-*")
    sockets = Path("/tmp", left.name)
    assert ask(f"unix://{sockets}/docker.sock") is not None
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    while subprocess.run(["pgrep", "-f", left.name], stdout=subprocess.DEVNULL).returncode == 0:
        assert time.monotonic() < end, "the engine outlives its killed parent"
        time.sleep(0.02)
    assert {result.verdict for result in site.reproduce(release)} == {"identical"}
    assert list(site.paths.work.iterdir()) == [] and not sockets.exists()
