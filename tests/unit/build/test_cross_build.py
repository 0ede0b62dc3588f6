"""Images for another architecture than the building machine's: the steps run natively, and keys know nothing of it."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uv
from cross_images import chain_of, cross_paths, stand_in, write_stack
from places import PROJECT

from sparkpin.build import context, render, rootfs
from sparkpin.build.image import require_builder
from sparkpin.build.record import BuildRecord, LayerRecord, shared_fields
from sparkpin.build.reproduce import again
from sparkpin.checkpoint.repository import Places
from sparkpin.cli import build as commands_build
from sparkpin.core.errors import HostError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch import model
from sparkpin.fetch import stack as fetch
from sparkpin.pins import manifests, schema
from sparkpin.prune.unneeded_files import marks_of_record


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return cross_paths(tmp_path)


def test_the_stack_for_a_spark_can_be_built_on_x86_64() -> None:
    paths = Paths(PROJECT, Path(), Path())
    cpu = manifests.load_stack(PROJECT, "cpu")
    expected = rootfs.rootfs_spec(cpu, manifests.load_stack_lock(PROJECT, cpu))
    assert stand_in(paths, "spark", "linux/amd64") == expected


def test_fetch_brings_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a build without a network would lack it, and say that `fetch` brings it."""
    fetched: list[tuple[str, int, bool]] = []

    def fetch_stack(paths: Paths, stack: schema.Stack, lock: schema.StackLock, *_: object) -> int:
        fetched.append((stack.name, len(lock.debs), bool(lock.wheels)))
        return 0

    monkeypatch.setattr(fetch, "fetch_stack", fetch_stack)
    monkeypatch.setattr(model, "fetch_model", lambda *_: Places({}, {}))
    spark, cpu = (manifests.load_stack_lock(PROJECT, manifests.load_stack(PROJECT, name)) for name in ("spark", "cpu"))
    for machine, more in (("linux/amd64", [("cpu", len(cpu.debs), False)]), ("linux/arm64", []), ("riscv64", [])):
        monkeypatch.setattr(commands_build, "this_platform", lambda machine=machine: machine)
        commands_build.build(Paths(PROJECT, Path(), Path()), recipe="scripted-tiny-spark", fetch_only=True)
        assert fetched == [("spark", len(spark.debs), True), *more]
        fetched.clear()


def test_only_a_stack_for_the_machine_with_the_same_python_stands_in(paths: Paths) -> None:
    with pytest.raises(HostError):
        stand_in(paths, "native", "linux/arm64")
    write_stack(paths.project, "native", "3.11.2-7")
    with pytest.raises(ManifestError) as caught:
        stand_in(paths, "far", "linux/amd64")
    assert caught.value.key == "build_on.linux/amd64"
    assert "3.11.2-7" in str(caught.value.got) and "3.11.2-6" in caught.value.expected
    write_stack(paths.project, "far", platform="linux/arm64", build_on={"linux/amd64": "far"})
    with pytest.raises(ManifestError, match="far: linux/arm64"):
        stand_in(paths, "far", "linux/amd64")


def use_other_uv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same version of uv, for another architecture."""
    other = folder / "uv"
    other.write_text("other bytes")
    monkeypatch.setattr(uv, "find_uv_bin", lambda: str(other))
    return other


def test_keys_do_not_depend_on_the_machine(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chain_of(paths, "far")
    use_other_uv(tmp_path, monkeypatch)
    after = chain_of(paths, "far")
    assert uv_of(before[0]) != uv_of(after[0])
    old, new = ([(image.key, image.layers, image.dockerfile) for image in chain] for chain in (before, after))
    assert old == new


def test_links_of_the_stack_are_a_layer(paths: Paths, tmp_path: Path) -> None:
    links = {"/opt/cuda/lib64": "lib", "/opt/cuda/lib/stubs/libcuda.so": "/usr/lib/libcuda.so.1"}
    write_stack(paths.project, "far", platform="linux/arm64", image={"links": links})
    base = chain_of(paths, "far")[0]
    assert [name for name, _ in base.layers] == ["venv", "links"]
    (file,) = [file for file in base.context if file.path == "wheels/links/links.json"]
    written = tmp_path / "links.json"
    written.write_text(file.source)
    install = runpy.run_path(str(PROJECT / "dockerfiles/install.py"))
    install["link"](written, str(tmp_path / "layer"))
    found = {path: str((tmp_path / f"layer{path}").readlink()) for path in links}
    assert found == links == json.loads(file.source)


@pytest.mark.parametrize(
    ("image", "key"),
    [({"links": {"/a/../b": "x"}}, "image.links./a/../b.[key]"), ({"env": {"A": "x\nUSER 0:0"}}, "image.env.A")],
)
def test_what_would_not_stand_in_a_dockerfile_is_refused(paths: Paths, image: dict[str, object], key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        write_stack(paths.project, "far", image=image)
    assert caught.value.key == key


def recorded(image: render.RenderedImage, builder: rootfs.RootfsSpec | None) -> BuildRecord:
    return BuildRecord(
        **shared_fields(image),
        builder=builder,
        context=[context.row(replace(file, sha256=file.sha256 or "0" * 64)) for file in image.context],
        layers=[LayerRecord(name=name, key=key, diff_id=None) for name, key in image.layers],
        config="{}",
        config_digest=f"sha256:{'0' * 64}",
        diff_ids=[],
        size=0,
        seconds=0.0,
    )


def uv_of(image: render.RenderedImage) -> object:
    (file,) = [file for file in image.context if file.path == context.UV]
    return file.source


def test_a_recorded_build_runs_where_it_ran_though_the_pins_have_moved_on(paths: Paths) -> None:
    then = stand_in(paths, "far", "linux/amd64")
    record = recorded(chain_of(paths, "far")[0], then)
    write_stack(paths.project, "native", "3.11.2-7")
    image = again(record, "linux/amd64")
    assert (image.builder, uv_of(image)) == (then, uv_of(record.rendered))
    assert BuildRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
    assert record.rootfs
    both = {key[:12] for key in (record.rootfs.key, then.key)}
    assert both <= marks_of_record(record), "prune keeps what both are made from"


def test_a_build_that_ran_on_its_own_architecture_runs_where_today_s_pins_say(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkpin.build.image.require_rootfs", lambda *_: None)
    image = again(recorded(chain_of(paths, "far")[0], None), "linux/amd64")
    engine: Any = SimpleNamespace(platform="linux/amd64")
    assert require_builder(paths, engine, image) == stand_in(paths, "far", "linux/amd64")
    (paths.project / "pins/stacks/far.yaml").unlink()
    with pytest.raises(InputError):
        require_builder(paths, engine, image)


def test_on_the_images_own_architecture_its_own_uv_runs(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recorded(chain_of(paths, "far")[0], stand_in(paths, "far", "linux/amd64"))
    other = use_other_uv(tmp_path, monkeypatch)
    image = again(record, "linux/arm64")
    engine: Any = SimpleNamespace(platform="linux/arm64")
    assert (require_builder(paths, engine, image), uv_of(image), image.key) == (None, other, record.key)


def test_an_engine_of_another_architecture_gets_no_uv_of_this_one(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be told as `exec format error`, in the middle of a build."""
    monkeypatch.setattr(context, "this_platform", lambda: "linux/amd64")
    image = chain_of(paths, "far")[0]
    context.require_own_uv(image, "linux/amd64")
    with pytest.raises(HostError, match=r"uv, which is here for linux/amd64, and the engine's machine is linux/arm64"):
        context.require_own_uv(image, "linux/arm64")
    context.require_own_uv(recorded(image, None).rendered, "linux/arm64")  # with the uv of its record
