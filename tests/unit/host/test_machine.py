"""Facts about machines, read from made-up roots, and what is told and done where something is lacking."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import buildkit, daemon, endpoint, preflight
from sparkpin.host import machine as host
from sparkpin.host.machine import Host, Needs, Requirement
from sparkpin.pins.manifests import load_stack

GB = 10**9
DEBIAN = Host(False, "x86_64", "debian 12", ("debian",), True, False, False, 16 * GB, 12 * GB)
KEYS = Requirement(
    "Debian's keys", False, "not found", "apt-get install debian-archive-keyring", ("debian-archive-keyring",)
)
FULL = Requirement("disk space", False, "1 GB free", "free space")

SPARK = {
    "etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "proc/meminfo": "MemTotal:       125000000 kB\nMemAvailable:   100000000 kB\nHugePages_Total:       0\n",
    "run/systemd/system/x": "",
}


def root_with(tmp_path: Path, *parts: dict[str, str]) -> Path:
    for name, text in ((name, text) for part in parts for name, text in part.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sys/class/dmi/id/product_name", "NVIDIA DGX Spark\n"),
        ("sys/firmware/devicetree/base/model", "NVIDIA DGX Spark\0"),
        ("etc/dgx-release", 'DGX_NAME="DGX Spark"\n'),
        ("proc/driver/nvidia/gpus/000f:01:00.0/information", "Model: \t\t NVIDIA GB10\nIRQ: 1\n"),
    ],
)
def test_a_spark_is_known_by_any_of_its_signs(tmp_path: Path, name: str, text: str) -> None:
    assert host.read_host(root_with(tmp_path, SPARK, {name: text})).is_spark


def test_facts(tmp_path: Path) -> None:
    gpu = {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\n"}
    found = host.read_host(root_with(tmp_path, SPARK, gpu))
    assert not found.is_spark
    assert (found.has_gpu, found.has_systemd, found.has_apt) == (True, True, True)
    assert (found.distribution, found.family) == ("ubuntu 24.04", ("ubuntu", "debian"))
    assert (found.memory_total, found.memory_available) == (128_000_000_000, 102_400_000_000)


def test_default_stack(tmp_path: Path) -> None:
    spark = dataclasses.replace(DEBIAN, is_spark=True)
    with pytest.raises(HostError, match="a DGX Spark, and this version of sparkpin pins no stack"):
        host.default_stack(tmp_path, spark)
    root_with(tmp_path, {"pins/stacks/spark.yaml": ""})
    assert host.default_stack(tmp_path, spark) == "spark"
    root_with(tmp_path, {"pins/stacks/cpu.yaml": ""})
    assert host.default_stack(tmp_path, DEBIAN) == "cpu"
    with pytest.raises(HostError, match="an aarch64 machine"):
        host.default_stack(tmp_path, dataclasses.replace(DEBIAN, arch="aarch64"))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A machine without any of the programs, certificates or an engine, as far as `requirements` can see."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("DOCKER_HOST", "")
    monkeypatch.setattr(daemon, "SYSTEM_PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(endpoint, "ask", lambda *_, **__: None)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda _: None)
    buildkit.builder.cache_clear()
    yield Paths(tmp_path, tmp_path / "cache", tmp_path / "home")  # type: ignore[misc]
    buildkit.builder.cache_clear()


def test_what_a_bare_debian_lacks(bare: Paths) -> None:
    """A GPU that the stack does not use needs no runtime."""
    lacking = {r.name: r for r in host.missing(bare, dataclasses.replace(DEBIAN, has_gpu=True), Needs(0, 0, 0, 0))}
    assert {name: r.packages for name, r in lacking.items()} == {
        "docker engine": ("docker.io",),
        "docker client": ("docker.io",),
        "iptables": ("iptables",),
        "ca-certificates": ("ca-certificates",),
        "Debian's keys": ("debian-archive-keyring",),
        "python venv": ("python3-venv",),
    }
    spark = dataclasses.replace(DEBIAN, is_root=False, is_spark=True)
    assert {r.name for r in host.missing(bare, spark, Needs(0, 0, 0, 0))} == {*lacking, "GPU runtime"}


@pytest.mark.parametrize(
    ("distribution", "family", "wanted"),
    [
        ("debian 12", ("debian",), ("docker.io",)),
        ("debian 13", ("debian",), ("docker-cli", "docker-buildx")),
        ("ubuntu 24.04", ("ubuntu", "debian"), ("docker.io", "docker-buildx")),
    ],
)
def test_packages_of_the_client(tmp_path: Path, distribution: str, family: tuple[str, ...], wanted: object) -> None:
    machine = dataclasses.replace(DEBIAN, distribution=distribution, family=family)
    assert host.client_packages(machine, tmp_path) == wanted
    root_with(tmp_path, {"var/lib/dpkg/info/docker-ce-cli.list": ""})
    assert host.client_packages(machine, tmp_path) == ("docker-buildx-plugin",)


def test_a_stopped_engine_is_no_lack_for_root(bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dockerd = tmp_path / "bin/dockerd"
    root_with(tmp_path, {"bin/dockerd": ""})
    dockerd.chmod(0o755)
    monkeypatch.setattr(daemon, "SYSTEM_PATH", str(dockerd.parent))
    found = host.engine_requirement(bare, DEBIAN)
    assert found.ok and "not running" in found.detail
    user = host.engine_requirement(bare, dataclasses.replace(DEBIAN, is_root=False, has_systemd=True))
    assert not user.ok and user.fix == "sudo systemctl start docker"


@pytest.mark.parametrize("by_context", [False, True])
def test_a_named_engine_that_does_not_answer_is_a_lack(
    bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_context: bool
) -> None:
    """Although there is a dockerd here, which root could start."""
    root_with(tmp_path, {"bin/dockerd": ""})
    (tmp_path / "bin/dockerd").chmod(0o755)
    monkeypatch.setattr(daemon, "SYSTEM_PATH", str(tmp_path / "bin"))
    named = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}
    if by_context:
        monkeypatch.setattr(endpoint, "environment", lambda: named)
    else:
        monkeypatch.setenv("DOCKER_HOST", named["DOCKER_HOST"])
    found = host.engine_requirement(bare, DEBIAN)
    assert not found.ok and found.fix and found.packages == ()


def test_another_architecture_needs_emulation(bare: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = host.emulation(DEBIAN, "aarch64", tmp_path)
    assert lacking.packages == ("qemu-user-static", "binfmt-support")
    assert lacking.fix.endswith(" binfmt-support && update-binfmts --enable qemu-aarch64")
    root_with(tmp_path, {"proc/sys/fs/binfmt_misc/qemu-aarch64": "enabled\ninterpreter /usr/bin/qemu-aarch64\n"})
    monkeypatch.setattr(host, "find_program", lambda name: None)
    assert not host.emulation(DEBIAN, "aarch64", tmp_path).ok
    monkeypatch.setattr(host, "find_program", lambda name: f"/usr/bin/{name}")
    assert host.emulation(DEBIAN, "aarch64", tmp_path).ok
    (tmp_path / "proc/sys/fs/binfmt_misc/qemu-aarch64").unlink()
    off = host.emulation(dataclasses.replace(DEBIAN, is_root=False), "aarch64", tmp_path)
    assert not off.ok and off.packages == () and off.fix == "sudo update-binfmts --enable qemu-aarch64"


def test_what_is_installed_and_switched_off_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the test's own in the place of update-binfmts, which would change this machine's kernel."""
    called = tmp_path / "called"
    program = tmp_path / "update-binfmts"
    program.write_text(f'#!/bin/sh\necho "$*" >{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    enable = ("update-binfmts", "--enable", "qemu-aarch64")
    off = host.Requirement("emulation", False, "off", "update-binfmts --enable qemu-aarch64", then=enable)
    said: list[str] = []
    host.install([off], DEBIAN, said.append)
    assert called.read_text() == "--enable qemu-aarch64\n" and said == [off.fix]
    with pytest.raises(HostError, match="only root") as refused:
        host.install([off], dataclasses.replace(DEBIAN, is_root=False), said.append)
    assert refused.value.next_step == "sudo update-binfmts --enable qemu-aarch64"


def test_a_stack_with_a_gpu_takes_more_disk_and_only_a_spark_its_memory() -> None:
    project = PROJECT
    cpu, spark = (load_stack(project, name) for name in ("cpu", "spark"))
    here, there = DEBIAN, dataclasses.replace(DEBIAN, is_spark=True)
    assert host.needs_for(here, cpu) == host.needs_for(here, None) == Needs()
    assert host.needs_for(here, spark) == host.GPU_NEEDS
    assert host.GPU_NEEDS.engine > Needs().engine and host.GPU_NEEDS.memory == Needs().memory
    assert host.needs_for(there, spark) == dataclasses.replace(host.GPU_NEEDS, memory=host.SPARK_MEMORY)


def test_disk_space_is_summed_per_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    paths = Paths(tmp_path, tmp_path / "a/b/cache", tmp_path / "home")
    usage = host.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage._replace(free=10 * GB))
    (fits,) = host.disk(paths, Needs(cache=4 * GB, home=6 * GB, engine=99 * GB))
    assert fits.ok and "10 GB wanted for cache, home" in fits.detail
    (short,) = host.disk(paths, Needs(cache=5 * GB, home=6 * GB))
    assert not short.ok and "SPARKPIN_CACHE" in short.fix and short.packages == ()
    (paths.cache).mkdir(parents=True)
    with (paths.cache / "fetched").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    (filled,) = host.disk(paths, Needs(cache=4 * GB + (1 << 20), home=6 * GB))
    assert filled.ok, "what is there already needs no space again"


def never(*_: object, **__: object) -> None:
    raise AssertionError("nothing may be run")


USER = dataclasses.replace(DEBIAN, is_root=False)
DOCKER = Requirement("docker engine", False, "none", "", ("docker.io",))


@pytest.mark.parametrize(
    ("machine", "lacking", "command"),
    [
        (USER, [KEYS, DOCKER, DOCKER], " debian-archive-keyring docker.io"),
        (dataclasses.replace(DEBIAN, family=("fedora",)), [KEYS], KEYS.fix),
        (DEBIAN, [KEYS, FULL], " debian-archive-keyring; then free space"),
    ],
)
def test_where_installing_cannot_help_nothing_is_changed(
    machine: Host, lacking: list[Requirement], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(HostError) as caught:
        host.install(lacking, machine, never)
    assert caught.value.exit_code == 3 and caught.value.next_step.endswith(command)


def test_preflight_says_that_nothing_was_changed_only_if_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(preflight.machine, "default_stack", lambda *_: "cpu")
    monkeypatch.setattr(preflight.machine, "read_host", lambda: DEBIAN)
    for lacking, unchanged in ((KEYS, False), (FULL, True)):
        monkeypatch.setattr(preflight.machine, "missing", lambda *_, lacking=lacking, **__: [lacking])
        assert preflight.main([]) == 3
        assert ("Nothing was changed" in capsys.readouterr().err) == unchanged


def test_a_hint_to_serve_names_every_recipe_but_the_default_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "default_stack", lambda project: "cpu")
    assert host.serve_command(project, "scripted-tiny") == "invoke serve"
    assert host.serve_command(project, "another") == "invoke serve --recipe another"
    (project / "pins/stacks/cpu.yaml").unlink()
    assert host.serve_command(project, "scripted-tiny") == "invoke serve --recipe scripted-tiny"
