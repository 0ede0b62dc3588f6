"""The image of a lock with kept layers: what it costs, what it shows, on every engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from in_container import output_of
from kept_layer_samples import LAYERS, a_stack, versions_of
from newer_engine import NEWER, newer_engine
from newer_engine import newer_root as newer_root
from places import PROJECT
from private_engine import remove_tags

from sparkpin.build import render
from sparkpin.build.image import BuiltImage, Maker, build_image
from sparkpin.build.record import layer_file
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.host.disk_usage import inventory
from sparkpin.host.engine import Engine
from sparkpin.image.listing import PathEntry, image_contents, read_contents
from sparkpin.pins import manifests, wheel_layers
from sparkpin.pins.manifests import load_chain, load_stack, load_stack_lock
from sparkpin.pins.schema import Stack, StackLock


class Bench:
    """A made-up stack on the cpu stack's real root file system."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        real = Paths.from_env()
        self.engine = engine
        self.paths = Paths(PROJECT, folder / "cache", folder / "home")
        (folder / "cache").mkdir()
        (folder / "cache/rootfs").symlink_to(real.cache / "rootfs")
        self.name = f"test{uuid.uuid4().hex[:8]}"
        self.stack = a_stack(self.name)
        self.debs = load_stack_lock(PROJECT, load_stack(PROJECT, "cpu")).debs
        for deb in self.debs:
            Store(real.store).link(deb, Store(self.paths.store).path(deb.sha256))
        (folder / "house").mkdir()
        self.wheels = versions_of(folder / "house")
        for wheel in self.wheels.values():
            Store(self.paths.store).add(folder / "house" / wheel.file, wheel)
        self.said: list[str] = []

    def lock(self, *names: str) -> StackLock:
        inputs = manifests.stack_inputs(self.stack)
        wheels = [self.wheels[name] for name in names]
        return StackLock(stack=self.name, inputs=inputs, debs=self.debs, wheels=wheels)

    def build(self, lock: StackLock, stack: Stack | None = None, *, fresh: bool = False) -> BuiltImage:
        (image,) = render.render_chain(PROJECT, stack or self.stack, lock, load_chain(PROJECT, "base"))
        return build_image(self.paths, self.engine, image, self.said.append, fresh=fresh)

    def contents(self, image: BuiltImage) -> dict[str, PathEntry]:
        listed = [read_contents(layer_file(self.paths, diff_id)) for diff_id in image.diff_ids]
        return {
            path: replace(entry, owner="") for path, (_, entry) in image_contents(listed).items() if entry.kind != "dir"
        }

    def run(self, image: BuiltImage, program: str) -> object:
        return json.loads(output_of(self.engine, image.ref, ["python", "-c", program]))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, Engine.connect())
    yield bench
    remove_tags(bench.engine, f"stack-{bench.name}")


PROGRAM = """
import importlib.metadata, importlib.util, json, os
print(json.dumps([
    [__import__("dep").VERSION, importlib.metadata.version("dep"), importlib.metadata.version("app")],
    sorted(d.name for d in importlib.metadata.distributions()),
    [name for name in ("dep.old", "dep.part", "dep.new", "gone", "shared.dep", "shared.both", "shared.other.yours")
     if importlib.util.find_spec(name)],
    sorted(os.listdir("/opt/vllm/bin")),
]))
"""


def test_an_image_costs_what_changed_and_shows_nothing_else(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.lock("app", "dep", "gone", "other")
    flat = bench.lock("app2", "dep2", "other")
    old = bench.build(first)
    bench.said.clear()
    new = bench.build(wheel_layers.keep_layers(first, flat))
    below = len(old.diff_ids) - 1  # the layer of the stack's mods lies on top
    assert new.diff_ids[:below] == old.diff_ids[:below] and len(new.diff_ids) == len(old.diff_ids) + 1
    assert not any("[low" in line or "[rest" in line for line in bench.said), "what stays is not built again"
    versions, names, found, scripts = bench.run(new, PROGRAM)  # type: ignore[misc]
    assert versions == [2, "2.0", "2.0"]
    assert names == ["app", "dep", "other", "sparkpin-modkit"]
    assert found == ["dep.new", "shared.both", "shared.other.yours"]
    assert {"dep", "both", "tool"} <= set(scripts) and "dep-old" not in scripts
    one_layer = bench.stack.model_copy(
        update={"python": bench.stack.python.model_copy(update={"layers": a_stack("s", LAYERS[1:]).python.layers})}
    )
    plain = bench.build(flat, one_layer)
    assert bench.contents(new) == bench.contents(plain)
    own = {image.config_digest: image for image in inventory(bench.engine)}
    sizes = own[new.config_digest].layers
    assert sizes is not None and sum(list(sizes.values())[below:-1]) < 20_000, "without the stack's mods, on top"
    monkeypatch.setattr(bench, "paths", Paths(PROJECT, bench.paths.cache, tmp_path / "other"))
    assert bench.build(wheel_layers.keep_layers(first, flat), fresh=True).config_digest == new.config_digest


def test_engines_that_build_whole_images_give_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wheel in which no file takes a folder's name: Dockerfiles cannot copy one over the other."""
    kept = wheel_layers.keep_layers(bench.lock("app", "dep", "gone", "other"), bench.lock("app2", "dep", "other"))
    trees = bench.build(kept, fresh=True)
    monkeypatch.setattr(Maker, "run", Maker.whole)
    monkeypatch.setattr(bench, "paths", Paths(PROJECT, bench.paths.cache, tmp_path / "other"))
    whole = bench.build(kept, fresh=True)
    assert not whole.cached and whole.config_digest == trees.config_digest
    assert bench.run(whole, "import json, importlib.util as u; print(json.dumps(u.find_spec('gone') is None))") is True


@pytest.mark.parametrize("name", list(NEWER))
def test_newer_engines_give_the_same(bench: Bench, newer_root: Path, tmp_path: Path, name: str) -> None:
    """Docker's own storage and containerd's both follow the deletion marks."""
    first, flat = bench.lock("app", "dep", "gone", "other"), bench.lock("app2", "dep2", "other")
    kept = wheel_layers.keep_layers(first, flat)
    here = bench.build(kept)
    with newer_engine(newer_root, NEWER[name]) as engine:
        (tmp_path / "there").mkdir()
        there = Bench(tmp_path / "there", engine)
        there.stack, there.name = bench.stack, bench.name
        there.build(first)
        built = there.build(kept)
        assert (built.config_digest, built.diff_ids) == (here.config_digest, here.diff_ids)
        assert there.run(built, PROGRAM) == bench.run(here, PROGRAM)
