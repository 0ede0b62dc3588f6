"""Which loader reads the weights, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import made_releases
import pytest
from doc_tables import table
from places import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.pins import manifests
from sparkpin.pins.weight_loaders import GIB, WeightBytes, choose, seconds
from sparkpin.serve import choose_loader

ARGV = ["vllm", "serve", "/model"]
SPARK = {"fastsafetensors": "0.5.0", "instanttensor": "0.2.2"}
ALONE = {"fastsafetensors": "0.5.0"}
INT4 = WeightBytes(int(62.65 * GIB), 5 * GIB, int(1.42 * GIB))  # 14 files, as published
NVFP4 = WeightBytes(73 * GIB, 37 * GIB, int(1.42 * GIB))  # 2 files


@pytest.mark.parametrize(
    ("file", "head"),
    [("2026-11-27-h200.json", "loader | weights, s"), ("2026-11-28-h200-warm.json", "loader, warm | weights, s")],
)
def test_the_tables_of_the_docs_are_what_was_kept(file: str, head: str) -> None:
    kept = json.loads((PROJECT / "benchmarks/loaders/data" / file).read_text())
    rows = [[float(cell.strip("*")) for cell in cells] for _, *cells in table("docs/memory.md", head)]
    wanted = []
    for start in kept["starts"]:
        weights, first = start["weights_s"], start["first_token_s"]
        wanted.append([round(weights, 1), round(kept["bytes"] / weights / 1e9, 1), first, round(first - weights)])
    assert rows == wanted


@pytest.mark.parametrize(
    ("weights", "versions", "free", "wanted"),
    [
        (INT4, SPARK, 110, "fastsafetensors"),
        (INT4, SPARK, 79, "fastsafetensors"),
        (INT4, SPARK, 78, "instanttensor"),
        (INT4, SPARK, 70, "auto"),
        (INT4, ALONE, 78, "auto"),
        (NVFP4, SPARK, 110, "instanttensor"),
        (NVFP4, ALONE, 110, "auto"),
        (INT4, {}, 110, "auto"),
    ],
)  # fmt: skip
def test_the_fastest_that_fits(weights: WeightBytes, versions: dict[str, str], free: int, wanted: str) -> None:
    loader = choose(ARGV, versions, weights, free * GIB)
    assert loader.format == wanted and loader.chosen
    assert loader.applied(ARGV) == (ARGV if wanted == "auto" else [*ARGV, "--load-format", wanted])


def test_the_reason_has_the_numbers() -> None:
    assert choose(ARGV, SPARK, INT4, 110 * GIB).line == (
        "loader: fastsafetensors: 78.6 GiB for a moment, for files of up to 5.0 GiB, and 110.0 GiB are free"
    )
    assert choose(ARGV, SPARK, NVFP4, 110 * GIB).line == (
        "loader: instanttensor: 87.5 GiB for a moment, for tensors of up to 1.4 GiB, and 110.0 GiB are free"
    )


def test_what_is_told_stays() -> None:
    for told, said in (
        ("fastsafetensors", "loader: as told, fastsafetensors: WARNING, it needs 153.0 GiB for a moment"),
        ("instanttensor", "loader: as told, instanttensor: 87.5 GiB for a moment"),
        ("safetensors", "loader: as told, safetensors: of the command line"),
    ):
        argv = [*ARGV, "--load-format", told]
        loader = choose(argv, SPARK, NVFP4, 110 * GIB)
        assert loader.line.startswith(said) and loader.applied(argv) == argv


def test_the_stack_has_what_is_offered() -> None:
    wheels = manifests.load_stack_lock(PROJECT, manifests.load_stack(PROJECT, "spark")).wheels
    assert {w.name: w.version for w in wheels if w.name in SPARK} == SPARK


def write_safetensors(path: Path, **sizes: int) -> None:
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def test_a_release_is_started_with_it(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, said = Paths(project, tmp_path / "cache", tmp_path / "home"), list[str]()
    release = dataclasses.replace(made_releases.release(1), stack="spark", argv=tuple(ARGV))
    monkeypatch.setattr(choose_loader, "versions_of", lambda *args: SPARK)
    here = dataclasses.replace(machine.read_host(), memory_available=9 * GIB)
    monkeypatch.setattr(machine, "read_host", lambda: here)
    write_safetensors(tmp_path / "a.safetensors", x=100, y=50)
    write_safetensors(tmp_path / "b.safetensors", z=120)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert choose_loader.weights_of(tmp_path) == WeightBytes(sum(sizes), max(sizes), 120)
    started = choose_loader.with_loader(paths, release, tmp_path, said.append, gpus=True)
    assert started.argv == (*ARGV, "--load-format", "fastsafetensors") and len(said) == 1
    assert choose_loader.with_loader(paths, release, tmp_path, said.append, gpus=False) is release and len(said) == 1


def test_what_loading_took_is_read_from_the_log() -> None:
    log = b"INFO [default_loader.py:507] Loading weights took 60.25 seconds\nx\nLoading weights took 3.10 seconds\n"
    assert seconds(log) == 63.35
    assert seconds(b"nothing") is None
