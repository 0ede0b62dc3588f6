"""Facts about machines, read from made-up roots."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sparkpin.core.errors import HostError
from sparkpin.host import machine as host
from sparkpin.host.machine import Host

GB = 10**9
DEBIAN = Host(False, "x86_64", "debian 12", ("debian",), True, 16 * GB, 12 * GB)
SPARK = {
    "etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=\'debian\'\nVERSION_ID="24.04"\n',
    "proc/meminfo": "MemTotal:       125000000 kB\nMemAvailable:   100000000 kB\nHugePages_Total:       0\n",
}
# nvidia-smi's row: what driver 580.159.04 wrote on an H200, with a GB10's name and capability, as users report them.
GB10 = "NVIDIA GB10, 12.1, 580.159.04, 0" + ", Not Active" * 4 + "\n"
GPU = "proc/driver/nvidia/gpus/000f:01:00.0/information"


def root_with(tmp_path: Path, *parts: dict[str, str]) -> Path:
    for name, text in ((name, text) for part in parts for name, text in part.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "is_spark"),
    [
        ("sys/class/dmi/id/product_name", "NVIDIA DGX Spark\n", True),
        ("sys/firmware/devicetree/base/model", "NVIDIA DGX Spark\0", True),
        ("etc/dgx-release", 'DGX_NAME="DGX Spark"\n', True),
        (GPU, "Model: \t\t NVIDIA GB10\nIRQ: 1\n", True),
        ("sys/class/dmi/id/product_name", "Dell Pro Max with GB10 FCM1253\n", True),
        (GPU, "Model: \t\t NVIDIA H200\n", False),
    ],
)
def test_facts(name: str, text: str, is_spark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROOT", root_with(tmp_path, SPARK, {name: text}))
    found = host.read_host()
    assert found.is_spark == is_spark
    assert (found.distribution, found.family) == ("ubuntu 24.04", ("ubuntu", "debian"))
    assert (found.memory_total, found.memory_available) == (128_000_000_000, 102_400_000_000)


@pytest.mark.parametrize(
    ("arch", "capability", "is_spark"),
    [("aarch64", "12.1", True), ("x86_64", "12.1", False), ("aarch64", "9.0", False)],
)
def test_a_maker_s_own_name_of_the_gpu_hides_no_spark(
    arch: str, capability: str, is_spark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = GB10.replace("NVIDIA GB10, 12.1", f"NVIDIA JMJWOA-Generic-GPU, {capability}")
    monkeypatch.setattr(host, "ROOT", root_with(tmp_path, SPARK, {GPU: "Model: \t\t NVIDIA JMJWOA-Generic-GPU\n"}))
    monkeypatch.setattr(host, "output", lambda argv: row if argv == host.QUERY else None)
    monkeypatch.setattr(host.platform, "machine", lambda: arch)
    assert host.read_host().is_spark == is_spark


def test_default_stack(tmp_path: Path) -> None:
    spark = dataclasses.replace(DEBIAN, is_spark=True)
    with pytest.raises(HostError):
        host.default_stack(tmp_path, spark)
    root_with(tmp_path, {"pins/stacks/spark.yaml": "", "pins/stacks/cpu.yaml": ""})
    assert [host.default_stack(tmp_path, one) for one in (spark, DEBIAN)] == ["spark", "cpu"]
    with pytest.raises(HostError):
        host.default_stack(tmp_path, dataclasses.replace(DEBIAN, arch="aarch64"))
