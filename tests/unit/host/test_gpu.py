"""What a Spark lacks to serve. No Spark is available: its facts are made up here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from places import PROJECT
from test_machine import GB10, root_with

from sparkpin.host import machine
from sparkpin.host.gpu import GpuFacts, gpu_requirements, read_gpu_facts
from sparkpin.host.machine import Gpu
from sparkpin.pins import manifests

CDI = """cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  mounts:
  - hostPath: /usr/lib/aarch64-linux-gnu/libcuda.so.580.95.05
"""
SPARK = GpuFacts((Gpu("NVIDIA GB10", "12.1", "580.159.04"),), "580.159.04", ("the runtime nvidia",))


@pytest.mark.parametrize(
    ("changes", "cuda", "lacks"),
    [
        ({}, "13.0", {}),
        ({"gpus": (), "driver": ""}, "13.0", {"NVIDIA driver": "MISSING"}),
        ({"gpus": ()}, "13.0", {"GPU": "MISSING"}),
        ({"gpus": (Gpu("NVIDIA H200", "9.0", "580.159.04"),)}, "13.0", {"GPU": "advice"}),
        ({"ways": ()}, "13.0", {"GPU in containers": "MISSING"}),
        ({"cdi": {"/etc/cdi/nvidia.yaml": "580.159.04"}}, "13.0", {}),
        ({"cdi": {"/etc/cdi/nvidia.yaml": "580.95.05"}}, "13.0", {"CDI specification": "advice"}),
        ({"driver": "580.65.05"}, "13.0", {"NVIDIA driver": "MISSING"}),
        ({"driver": "575.57.08"}, "12.9", {}),
        ({"driver": "575.57.08"}, "13.1", {"NVIDIA driver": "MISSING"}),
    ],
)
def test_each_lack_has_the_command_that_meets_it(changes: dict[str, object], cuda: str, lacks: dict[str, str]) -> None:
    found = list(gpu_requirements(dataclasses.replace(SPARK, **changes), cuda))  # type: ignore[arg-type]
    assert {one.name: one.state for one in found if one.state != "ok"} == lacks
    assert all(bool(one.fix) == (one.state != "ok") for one in found if one.name != "GPU" or one.state == "MISSING")


@pytest.mark.parametrize(("version", "by_cdi"), [("24.0.9", False), ("25.0.1", True)])
def test_what_is_read_of_a_spark(version: str, by_cdi: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "sys/module/nvidia/version": "580.159.04\n",
        "etc/cdi/nvidia.yaml": CDI,
        "etc/cdi/other.yaml": "kind: example.com/nic\n",
    }
    monkeypatch.setattr(machine, "ROOT", root_with(tmp_path, files))
    monkeypatch.setattr(machine, "output", lambda argv: GB10 if argv == machine.QUERY else None)
    seen = read_gpu_facts({"ServerVersion": version, "Runtimes": {"runc": {}}}, machine.read_gpus())
    assert (seen.gpus, seen.driver) == ((dataclasses.replace(SPARK.gpus[0], utilization=0),), "580.159.04")
    assert ("CDI" in seen.ways) == by_cdi and "the runtime nvidia" not in seen.ways
    assert list(seen.cdi.values()) == ["580.95.05"] * by_cdi
    assert "the runtime nvidia" in read_gpu_facts({"Runtimes": {"nvidia": {}}}, ()).ways


def test_the_cuda_release_of_each_stack_is_that_of_its_lock() -> None:
    stacks = [manifests.load_stack(PROJECT, path.stem) for path in (PROJECT / "pins/stacks").glob("*.lock")]
    told = {stack.name: stack.gpu.cuda for stack in stacks if stack.gpu}
    assert told["spark"] == "13.0"
    for stack in stacks:
        wheels = manifests.load_stack_lock(PROJECT, stack).wheels
        runtimes = {wheel.version for wheel in wheels if wheel.name.startswith("nvidia-cuda-runtime")}
        assert {".".join(version.split(".")[:2]) for version in runtimes} == set(filter(None, [told.get(stack.name)]))
