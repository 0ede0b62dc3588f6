"""A small mod's kernels, compiled for SM121 where no GPU is, and found again by the same Triton.

Each step is a process of its own, as in an image: Triton keeps what it has compiled. It also hashes 500 MB of itself in
each, so the tests share one image.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sparkpin_modkit.testing import parse_reports

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x, out, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < N, other=0.0)
    tl.store(out + places, value * 2.0, mask=places < N)
"""
AHEAD = """
from sample_mod.kernel import scale
from triton import language as tl
from triton.runtime.jit import MockTensor

def warm_up(blocks=(128, 256)):
    for block in blocks:
        for dtype in (tl.float16, tl.bfloat16):
            scale.warmup(MockTensor(dtype), MockTensor(dtype), 4096, BLOCK=block, grid=(1,))
"""
# What a server does, with the GPU that its first argument names.
START = """
import sys
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from sparkpin_modkit.ahead import AbsentGpu
from sparkpin_modkit.kernels import warm
from sample_mod.ahead import warm_up

driver.set_active(AbsentGpu(GPUTarget("cuda", int(sys.argv[1]), 32)))
for _ in range(2):  # as for two heads of one model
    warm("sample", warm_up, Path(sys.argv[2]))
if sys.argv[3:]:
    warm_up([int(block) for block in sys.argv[3:]])
"""
# A server whose mod makes a cubin itself: one in its warm-up, one after it.
OWN = """
import sys
from pathlib import Path
from sparkpin_modkit.kernels import cubin_of, warm

image = Path(sys.argv[1])
make = lambda: b"\\x7fELF"
warm("sample", lambda: cubin_of("sample", "own", "0123", make, image), image)
assert cubin_of("sample", "own", sys.argv[2], make, image) == make()
"""
PTXAS = """#!/bin/sh
# Answers for its version, which is a part of every key, and compiles nothing.
[ "$1" = --version ] && exec {real} --version
exit 77
"""


class Sample:
    """The mod as it lies in an image, and the cache volume beside it."""

    def __init__(self, folder: Path) -> None:
        self.image, self.volume, self.site = folder / "image", folder / "volume", folder / "site"
        (self.site / "sample_mod").mkdir(parents=True)
        for name, text in (("__init__", ""), ("kernel", KERNEL), ("ahead", AHEAD)):
            (self.site / f"sample_mod/{name}.py").write_text(text)
        info = self.site / "sample_mod-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample-mod\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[sparkpin.kernels]\nsample = sample_mod.ahead:warm_up\n")
        import triton

        self.real = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
        self.broken = folder / "ptxas"
        self.broken.write_text(PTXAS.format(real=self.real))
        self.broken.chmod(0o755)

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.site), *filter(None, sys.path)])
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            "TRITON_CACHE_DIR": str(self.volume),
            "TRITON_INTERPRET": "0",
            **env,
        }
        return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False)

    def build(self, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "sparkpin_modkit.ahead", "sample", "12.1", str(self.image / "sample"), **env)

    def start(self, sm: int, *blocks: int, ptxas: Path | None = None) -> list[dict[str, object]]:
        env = {"TRITON_PTXAS_BLACKWELL_PATH": str(ptxas)} if ptxas else {}
        done = self.run("-c", START, str(sm), str(self.image), *map(str, blocks), **env)
        assert done.returncode == 0, done.stderr[-3000:]
        return self.reports(done)

    @staticmethod
    def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
        return parse_reports(done.stdout + done.stderr)

    def files(self) -> dict[str, bytes]:
        found = (path for path in sorted(self.image.rglob("*")) if path.is_file())
        return {path.relative_to(self.image).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    sample = Sample(tmp_path_factory.mktemp("sample"))
    done = sample.build()
    assert (done.returncode, done.stdout) == (0, "sample: 4 kernels for sm_121\n"), done.stderr[-3000:]
    return sample


@pytest.fixture
def built(image: Sample, tmp_path: Path) -> Sample:
    """With a volume of its own."""
    image.volume = tmp_path / "volume"
    return image


@contextmanager
def hidden(path: Path) -> Iterator[None]:
    aside = path.rename(path.with_name("aside"))
    try:
        yield
    finally:
        aside.rename(path)


def kernels(image: int = 0, cached: int = 0, compiled: int = 0) -> dict[str, object]:
    total = image + cached + compiled
    return {"mod": "sample", "event": "kernels", "total": total, "image": image, "cached": cached,
            "compiled": ["scale"] * compiled}  # fmt: skip


def test_all_come_from_the_image_and_none_is_compiled(built: Sample) -> None:
    """With a ptxas that compiles nothing."""
    assert built.start(121, ptxas=built.broken) == [kernels(image=4)]
    assert {path.name for path in built.volume.rglob("*") if path.is_file()} == {"__grp__scale.json"}


def test_the_same_bytes_twice(built: Sample) -> None:
    """Also when the mod was installed at another time, which ptxas would write into the line table."""
    first = built.files()
    os.utime(built.site / "sample_mod/kernel.py")
    with hidden(built.image):
        try:
            assert built.build(PYTHONHASHSEED="1").returncode == 0
            assert built.files() == first
        finally:
            shutil.rmtree(built.image)
    listed = json.loads(first["sample/kernels.json"])
    assert listed["sm"] == "12.1" and len(listed["kernels"]) == 4
    assert sorted(name.rpartition(".")[2] for name in first if name.endswith(("cubin", "ptx", "ttir"))) == ["cubin"] * 4


def test_another_gpu_compiles_and_says_so(built: Sample) -> None:
    assert built.start(120) == [kernels(compiled=4)]
    assert built.start(120) == [kernels(cached=4)]


def test_a_kernel_that_the_warm_up_forgot_is_told(built: Sample) -> None:
    assert built.start(121, 128, 512) == [
        kernels(image=4),
        {"mod": "sample", "event": "compiled", "kernel": "scale"},
        {"mod": "sample", "event": "compiled", "kernel": "scale"},
    ]


def test_a_cubin_that_the_mod_makes_itself(sample: Sample) -> None:
    def start(key: str) -> list[dict[str, object]]:
        return sample.reports(sample.run("-c", OWN, str(sample.image), key))

    own = kernels() | {"total": 1}
    late = {"mod": "sample", "event": "compiled", "kernel": "own"}
    assert start("4567") == [own | {"compiled": ["own"]}, late]
    assert start("0123") == [own | {"cached": 1}]
    assert (sample.volume / "own-0123.cubin").stat().st_mode & 0o444 == 0o444  # an image runs as another user
    shutil.copytree(sample.volume, sample.image / "sample")
    assert start("4567") == [own | {"image": 1}]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def warm_up(): pass\n", "sample: sample_mod.ahead:warm_up compiled no kernel"),
        ("def warm_up(): raise RuntimeError('no')\n", "RuntimeError: no"),
    ],
)
def test_a_build_without_kernels_fails(sample: Sample, text: str, error: str) -> None:
    (sample.site / "sample_mod/ahead.py").write_text(text)
    done = sample.build()
    assert done.returncode == 1 and error in done.stderr
    assert not (sample.image / "sample/kernels.json").exists()


def test_what_lies_in_the_folder_is_not_taken_for_compiled_now(built: Sample) -> None:
    done = built.build()
    assert done.returncode == 1 and "is not empty" in done.stderr


def test_an_entry_point_that_is_not_called_as_its_mod_is_named(sample: Sample) -> None:
    (sample.site / "sample_mod-1.dist-info/entry_points.txt").write_text("[sparkpin.kernels]\nx = sample_mod.ahead:w\n")
    done = sample.build()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "x = sample_mod.ahead:w; expected one that is called as its mod's folder, sample" in done.stderr
