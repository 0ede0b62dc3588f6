"""The cpu stack's image, inspected and loaded: vLLM's own libraries, our plugins, a stub of the driver, in a container.

What runs is what runs under emulation, natively: CI has no emulation, and the image for a Spark is large.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from checkout import PROJECT
from heard import heard
from made_releases import release

from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release
from sparkpin.smoke.inspect.elf import X86_64, Library
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect
from sparkpin.smoke.inspect.scan import ImageFacts
from sparkpin.smoke.load.run import run_load
from sparkpin.smoke.server import LABEL, owner

MODS = ("guard", "hybrid-int4-fp8", "int8-lm-head", "turboquant", "vllm-cpu")
WANTS_DRIVER = Library("opt/x.so", X86_64, True, needed=("libcuda.so.1",), undefined=frozenset({b"cuInit"}))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(PROJECT, tmp_path / "cache", tmp_path / "home")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.connect()


@pytest.fixture(scope="module")
def examined(engine: Engine, image: Release) -> Result:
    return inspect(Paths.from_env(PROJECT), engine, image.tag, sm=None)


@pytest.fixture(scope="module")
def image() -> Release:
    last = pair(PROJECT, "scripted-tiny")[-1]
    return dataclasses.replace(release(1), tag=last.rendered.ref, demands=last.demands)


def left_over(engine: Engine, paths: Paths) -> list[object]:
    mine = engine.client.containers.list(all=True, filters={"label": f"{LABEL}={owner(paths)}"})
    return [*mine, *(paths.work.iterdir() if paths.work.is_dir() else ())]


def test_the_image_of_the_cpu_stack_passes(examined: Result) -> None:
    assert examined.errors == [] and examined.sm is None
    assert len(examined.facts.libraries) > 500
    plugins = {package.name: package.accepts for package in examined.facts.packages if package.accepts}
    ours = ("guard", "hybrid-int4-fp8", "int8-lm-head", "turboquant")
    assert set(plugins) == {"vllm", *(f"sparkpin-{mod}" for mod in ours)}
    assert all(finding.why for finding in examined.findings if finding.severity == "allowed")


@pytest.mark.slow
def test_libraries_and_plugins_of_the_image_load(
    paths: Paths, engine: Engine, image: Release, examined: Result
) -> None:
    libraries = {**examined.facts.libraries, WANTS_DRIVER.path: WANTS_DRIVER}
    facts = dataclasses.replace(examined.facts, libraries=libraries)
    said = heard()
    loaded = run_load(paths, engine, image, facts, "linux/amd64")
    assert [row for row in loaded.rows if not row.passed] == []
    assert (loaded.emulated, loaded.stubbed) == (False, 1)
    done = {(row.kind, row.name.rpartition("/")[2]): row for row in loaded.rows}
    assert done["library", "libcuda.so.1"].word == "loaded"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    # Each defines the same operators, for another CPU.
    for name, needs in (("_C_AVX2", "avx2"), ("_C_AVX512", "avx512f"), ("_C", "avx512_bf16")):
        row = done["library", f"{name}.abi3.so"]
        assert row.state == "ok" or needs not in flags, row
        assert row.detail.endswith(" operators" if row.state == "ok" else "(SIGILL)")
    assert {("plugin", mod) for mod in MODS} <= set(done)
    assert done["platform", "vllm.platforms"].detail == "CpuPlatform, device 'cpu'"
    assert any(line.startswith("  library vllm/_C_AVX2.abi3.so: loaded in") for line in said)
    assert left_over(engine, paths) == []


def test_a_load_that_takes_too_long_is_ended_and_says_where_it_was(
    paths: Paths, engine: Engine, image: Release
) -> None:
    loaded = run_load(paths, engine, image, ImageFacts({}, {}), "linux/amd64", limit=0.5)
    assert any("was ended after 0.5 s, the time that it may take" in row.detail for row in loaded.rows)
    assert {row.name for row in loaded.rows if row.detail == "not reached"} == set(MODS)
    assert left_over(engine, paths) == []
