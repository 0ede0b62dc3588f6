"""When a machine's kernels are compared, and what becomes of it. What the mods compare: their own tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.logger  # noqa: F401  before Triton is a stand-in
from sparkpin_modkit import EXIT_CODE, ModError, selfcheck
from sparkpin_modkit.testing import parse_reports

GB10 = {"GPU": "NVIDIA GB10", "driver": "580.95.05"}
SOUND = ("attend", "3 tokens", 0.0034, 0.01)


class Mod:
    """Counts how often it is asked."""

    __module__ = "sparkpin_modkit.selfcheck"

    def __init__(self, *found: selfcheck.Compared) -> None:
        self.found, self.asked = found, 0

    def __call__(self) -> Iterator[selfcheck.Compared]:
        self.asked += 1
        yield from self.found


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What machine this is. Triton's cache is empty."""
    found = dict(GB10)
    monkeypatch.setitem(
        sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=tmp_path)))
    )
    monkeypatch.setattr(selfcheck, "machine", lambda: found)
    return found


def test_once_for_each_machine_and_case(here: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    mod = Mod(SOUND, ("store", "all", 0.0, 0.002))
    once = lambda case: selfcheck.once("turboquant", "0.1.0", {"format": case}, mod)  # noqa: E731
    once("4bit")
    once("4bit")
    first, again = parse_reports(capfd.readouterr().err)
    assert mod.asked == 1 and again["before"] is True
    assert (first["event"], first["comparisons"], first["worst"]) == ("checked", 2, 0.34) and "seconds" in first
    once("8bit")
    here["driver"] = "590.1"
    once("8bit")
    here["GPU"] = "NVIDIA H100"
    once("8bit")
    assert mod.asked == 4


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_what_is_wrong_stops_each_start(error: float) -> None:
    mod = Mod(SOUND, ("store", "all", error, 0.01))
    for start in (1, 2):
        with pytest.raises(
            ModError, match=r"NVIDIA GB10; driver 580.*store, all, .* 0\.01; set SPARKPIN_MOD_TURBOQUANT=0"
        ):
            selfcheck.once("turboquant", "0.1.0", {}, mod)
        assert mod.asked == start


def test_the_driver_s_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gpu = SimpleNamespace(name="NVIDIA GB10", major=12, minor=1, multi_processor_count=48)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    monkeypatch.setattr(selfcheck, "DRIVER", tmp_path / "version")
    assert "13000" in selfcheck.machine()["driver"]
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n"
    )
    assert selfcheck.machine()["driver"] == "580.95.05" and "12.1, 48" in selfcheck.machine()["GPU"]


def ended(monkeypatch: pytest.MonkeyPatch, mod: Mod | None, gpu: bool = True) -> int:
    point = SimpleNamespace(name="modkit", load=lambda: mod)
    monkeypatch.setattr(selfcheck.importlib.metadata, "entry_points", lambda group: [point] if mod else [])
    monkeypatch.setattr(selfcheck.importlib.metadata, "version", lambda name: "0.1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(SystemExit) as end:
        selfcheck.main()
    return int(end.value.code)


def test_the_table_has_each_comparison_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, Mod(SOUND)) == 0
    said = capfd.readouterr().out
    assert all(word in said for word in ("NVIDIA GB10", "580.95.05", "attend", "3 tokens", "0.0034", "0.01", "all ok"))
    assert ended(monkeypatch, Mod(SOUND, ("merge", "1 token", 0.5, 0.01))) == EXIT_CODE
    assert capfd.readouterr().out.count("FAILED") == 2


def test_where_there_is_nothing_to_compare_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, None) == ended(monkeypatch, Mod(SOUND), gpu=False) == selfcheck.UNAVAILABLE
