"""The cpu stack's image, inspected: vLLM's own libraries and our plugins, in a container; and Triton's cuobjdump.

What runs is what runs under emulation, natively: CI has no emulation, and the image for a Spark is large.
"""

from __future__ import annotations

import dataclasses
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import PROJECT
from heard import heard
from inspected_sites import server
from made_releases import release
from places import DATA, SUPPORT

from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release
from sparkpin.smoke.inspect import inside
from sparkpin.smoke.inspect.run import inspect
from sparkpin.smoke.server import LABEL, owner

MODS = ("guard", "hybrid-int4-fp8", "int8-lm-head", "turboquant", "vllm-cpu")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(PROJECT, tmp_path / "cache", tmp_path / "home")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.connect()


@pytest.fixture(scope="module")
def image(engine: Engine) -> Release:
    last = pair(PROJECT, "scripted-tiny")[-1]
    info = engine.image(last.rendered.ref)
    assert info
    image = {"tag": last.rendered.ref, "image": info.config_digest}
    return dataclasses.replace(release(1), demands=last.demands, stack="cpu", env={}, **image)


def left_over(engine: Engine, paths: Paths) -> list[object]:
    mine = engine.client.containers.list(all=True, filters={"label": f"{LABEL}={owner(paths)}"})
    return [*mine, *(paths.work.iterdir() if paths.work.is_dir() else ())]


def test_the_image_of_the_cpu_stack_passes(paths: Paths, engine: Engine, image: Release) -> None:
    lines = heard()
    result = inspect(paths, engine, image)
    assert (result.errors, result.sm, result.emulated) == ([], None, False)
    assert all(finding.why for finding in result.findings if finding.severity == "allowed")
    done = {(row.kind, row.name.rpartition("/")[2]): row for row in result.facts.steps if row.state != "begin"}
    flags = set(Path("/proc/cpuinfo").read_text().split())
    # Each defines the same operators, for another CPU.
    for name, needs in (("_C_AVX2", "avx2"), ("_C_AVX512", "avx512f"), ("_C", "avx512_bf16")):
        row = done["library", f"{name}.abi3.so"]
        assert row.state == "ok" or needs not in flags, row
    assert {("plugin", mod) for mod in MODS} <= set(done)
    assert done["platform", "vllm.platforms"].detail == "CpuPlatform, device 'cpu'"
    assert any(line.startswith("  library vllm/_C_AVX2.abi3.so: loaded in") for line in lines)
    assert left_over(engine, paths) == []


def test_an_inspection_that_takes_too_long_is_ended_and_says_where_it_was(
    paths: Paths, engine: Engine, image: Release
) -> None:
    result = inspect(paths, engine, image, limit=0.5)
    (error,) = result.errors
    assert error.rule == "run" and "was ended after 0.5 s" in error.text
    assert left_over(engine, paths) == []


@pytest.mark.slow
def test_cuobjdump_lists_what_nvcc_wrote(tmp_path: Path) -> None:
    """It comes with Triton, which the stack for a Spark has."""
    site, uv = server(tmp_path), Path(sys.executable).with_name("uv")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    subprocess.run([*install, "--target", site, "-r", SUPPORT / "triton.lock"], check=True, timeout=1800)
    library = site / "vllm/kernels.so"
    library.write_bytes(lzma.decompress((DATA / "inspection/kernels.so.xz").read_bytes()))
    cubins = ("sm_90a", "sm_120", "sm_120a", "sm_121", "sm_121a")
    assert inside.gpu_code([str(site)], [str(library)]) == {
        str(library): dict.fromkeys((*cubins, "compute_80", "compute_120f"), 1)
    }
