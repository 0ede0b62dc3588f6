"""What a build needs of a machine: what is missing of it, and what is run to get it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from heard import heard
from places import PROJECT
from test_machine import DEBIAN, GB, root_with

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import buildkit, daemon, machine, preflight
from sparkpin.host.machine import Host
from sparkpin.host.preflight import Needs, Requirement
from sparkpin.pins.manifests import load_stack
from sparkpin.pins.schema import Stack

IPTABLES = Requirement("iptables", False, "not found", "apt-get install iptables", runnable=True)
FULL = Requirement("disk space", False, "1 GB free", "free space")
CPU, SPARK = load_stack(PROJECT, "cpu"), load_stack(PROJECT, "spark")


def lacks(paths: Paths, host: Host, stack: Stack = CPU) -> dict[str, str]:
    """Name -> packages. But for disk and memory, of which this machine may have less."""
    found = [one for one in preflight.missing(paths, host, stack) if one.name not in ("disk space", "memory")]
    return {one.name: one.fix.partition("--no-install-recommends ")[2] for one in found}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A machine without any of the programs, certificates or an engine, as far as `requirements` can see."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("DOCKER_HOST", "")
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    monkeypatch.setattr(daemon, "ask", lambda *_, **__: None)
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)
    buildkit.builder.cache_clear()
    yield Paths(tmp_path, tmp_path / "cache", tmp_path / "home")  # type: ignore[misc]
    buildkit.builder.cache_clear()


def test_what_a_bare_debian_lacks(bare: Paths) -> None:
    """A GPU that the stack does not use needs no runtime."""
    lacking = {"docker engine": "docker.io", "docker client": "docker.io", "ca-certificates": "ca-certificates"}
    assert lacks(bare, dataclasses.replace(DEBIAN, has_gpu=True)) == lacking
    spark = dataclasses.replace(DEBIAN, is_root=False, is_spark=True)
    assert lacks(bare, spark) == {**lacking, "GPU runtime": ""}
    emulated = lacks(bare, DEBIAN, SPARK)["aarch64 emulation"]
    assert emulated == "qemu-user-static binfmt-support && update-binfmts --enable qemu-aarch64"
    missing = preflight.missing(bare, dataclasses.replace(DEBIAN, family=("fedora",)), CPU)
    assert not any(one.runnable for one in missing)


@pytest.mark.parametrize(
    ("distribution", "family", "wanted"),
    [
        ("debian 12", ("debian",), ("docker.io",)),
        ("debian 13", ("debian",), ("docker-cli", "docker-buildx")),
        ("ubuntu 24.04", ("ubuntu", "debian"), ("docker.io", "docker-buildx")),
    ],
)
def test_packages_of_the_client(
    bare: Paths, tmp_path: Path, distribution: str, family: tuple[str, ...], wanted: object
) -> None:
    machine = dataclasses.replace(DEBIAN, distribution=distribution, family=family)
    assert preflight.client_packages(machine) == wanted
    root_with(tmp_path, {"var/lib/dpkg/info/docker-ce-cli.list": ""})
    assert preflight.client_packages(machine) == ("docker-buildx-plugin",)


def test_a_stopped_engine_is_no_lack_for_root(bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dockerd = tmp_path / "bin/dockerd"
    root_with(tmp_path, {"bin/dockerd": ""})
    dockerd.chmod(0o755)
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(dockerd.parent))
    found = preflight.engine(DEBIAN)
    assert found.ok and "not running" in found.detail
    user = preflight.engine(dataclasses.replace(DEBIAN, is_root=False, has_systemd=True))
    assert not user.ok and user.fix == "sudo systemctl start docker"


@pytest.mark.parametrize("by_context", [False, True])
def test_a_named_engine_that_does_not_answer_is_a_lack(
    bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_context: bool
) -> None:
    """Although there is a dockerd here, which root could start."""
    root_with(tmp_path, {"bin/dockerd": ""})
    (tmp_path / "bin/dockerd").chmod(0o755)
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(tmp_path / "bin"))
    socket = "unix:///nowhere/docker.sock"
    if by_context:
        monkeypatch.delenv("DOCKER_HOST")
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        meta = f"contexts/meta/{hashlib.sha256(b'dead').hexdigest()}/meta.json"
        endpoints = json.dumps({"Name": "dead", "Metadata": {}, "Endpoints": {"docker": {"Host": socket}}})
        root_with(tmp_path, {"config.json": '{"currentContext": "dead"}', meta: endpoints})
    else:
        monkeypatch.setenv("DOCKER_HOST", socket)
    assert daemon.named_engine() == socket
    found = preflight.engine(DEBIAN)
    assert not found.ok and found.fix and not found.runnable


def test_emulation_that_is_switched_on(bare: Paths, tmp_path: Path) -> None:
    root_with(tmp_path, {"proc/sys/fs/binfmt_misc/qemu-aarch64": "enabled\ninterpreter /usr/bin/qemu-aarch64\n"})
    assert preflight.emulation(DEBIAN, "aarch64").ok


def test_what_is_missing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the test's own in the place of apt-get, which would change this machine."""
    called = tmp_path / "called"
    program = tmp_path / "apt-get"
    program.write_text(f'#!/bin/sh\necho "$*" >>{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines = heard()
    lack = preflight.lacking(DEBIAN, "docker engine", "none", "docker.io")
    preflight.install([lack, lack], DEBIAN)
    assert [line.split()[2] for line in called.read_text().splitlines()] == ["update", "install"]
    assert lines == [lack.fix]
    preflight.install([], DEBIAN)


def test_a_stack_with_a_gpu_takes_more_disk_and_only_a_spark_its_memory() -> None:
    cpu, spark = CPU, SPARK
    here, there = DEBIAN, dataclasses.replace(DEBIAN, is_spark=True)
    assert preflight.needs_for(here, cpu) == Needs()
    assert preflight.needs_for(here, spark) == preflight.GPU_NEEDS
    assert preflight.GPU_NEEDS.engine > Needs().engine and preflight.GPU_NEEDS.memory == Needs().memory
    assert preflight.needs_for(there, spark) == dataclasses.replace(preflight.GPU_NEEDS, memory=preflight.SPARK_MEMORY)


def test_disk_space_is_summed_per_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    paths = Paths(tmp_path, tmp_path / "a/b/cache", tmp_path / "home")
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=10 * GB))
    (fits,) = preflight.disk(paths, Needs(cache=4 * GB, home=6 * GB, engine=99 * GB))
    assert fits.ok
    (short,) = preflight.disk(paths, Needs(cache=5 * GB, home=6 * GB))
    assert not short.ok and "SPARKPIN_CACHE" in short.fix and not short.runnable
    paths.store.mkdir(parents=True)
    with (paths.store / "fetched").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    (filled,) = preflight.disk(paths, Needs(cache=4 * GB + (1 << 20), home=6 * GB))
    assert filled.ok, "what is there already needs no space again"


def never(*_: object, **__: object) -> None:
    raise AssertionError("nothing may be run")


@pytest.mark.parametrize(
    ("machine", "lacking"),
    [
        (dataclasses.replace(DEBIAN, is_root=False), [IPTABLES]),
        (DEBIAN, [IPTABLES, FULL]),
    ],
)
def test_where_installing_cannot_help_nothing_is_changed(
    machine: Host, lacking: list[Requirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(HostError) as caught:
        preflight.install(lacking, machine)
    assert caught.value.exit_code == 3 and all(one.fix in caught.value.next_step for one in lacking)


def test_a_command_that_fails_ends_the_installation() -> None:
    failing = Requirement("x", False, "none", "echo planted; false", runnable=True)
    lines = heard()
    with pytest.raises(HostError, match="planted") as caught:
        preflight.install([failing, IPTABLES], DEBIAN)
    assert caught.value.exit_code == 3 and lines == [failing.fix]
