"""What a build needs of a machine: what is missing of it, and what is run to get it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
from heard import heard
from places import PROJECT
from test_machine import DEBIAN, GB, root_with

from sparkpin.core.errors import EngineError, HostError
from sparkpin.core.paths import Paths
from sparkpin.host import buildkit, daemon, machine, preflight
from sparkpin.host.machine import Host, Requirement
from sparkpin.host.preflight import Needs
from sparkpin.pins.manifests import load_stack
from sparkpin.pins.schema import Stack

IPTABLES = Requirement("iptables", "MISSING", "not found", "apt-get install iptables", runnable=True)
FULL = Requirement("disk space", "MISSING", "1 GB free", "free space")
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
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(preflight.Engine, "connect", Mock(side_effect=EngineError("none answers")))
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)
    monkeypatch.setattr(buildkit, "builder", buildkit.builder.__wrapped__)
    return Paths(tmp_path, tmp_path / "cache", tmp_path / "home")


def test_what_a_bare_debian_lacks(bare: Paths, tmp_path: Path) -> None:
    lacking = {"docker engine": "docker.io", "docker client": "docker.io", "ca-certificates": "ca-certificates"}
    assert lacks(bare, DEBIAN) == lacking
    spark = dataclasses.replace(DEBIAN, is_root=False, is_spark=True, arch="aarch64")
    assert lacks(bare, spark, SPARK) == {**lacking, "NVIDIA driver": "", "GPU in containers": ""}
    emulated = lacks(bare, DEBIAN, SPARK)["aarch64 emulation"]
    assert emulated == "qemu-user-static binfmt-support && update-binfmts --enable qemu-aarch64"
    missing = preflight.missing(bare, dataclasses.replace(DEBIAN, family=("fedora",)), CPU)
    assert not any(one.runnable for one in missing)
    assert "skopeo" in {one.name for one in preflight.missing(bare, DEBIAN, CPU, published=True)}
    root_with(tmp_path, {"proc/sys/fs/binfmt_misc/qemu-aarch64": "enabled\ninterpreter /usr/bin/qemu-aarch64\n"})
    assert preflight.emulation(DEBIAN, "aarch64").state == "ok"


def test_packages_of_the_client(bare: Paths, tmp_path: Path) -> None:
    for distribution, family, wanted in (
        ("debian 12", ("debian",), ("docker.io",)),
        ("debian 13", ("debian",), ("docker-cli", "docker-buildx")),
        ("ubuntu 24.04", ("ubuntu", "debian"), ("docker.io", "docker-buildx")),
    ):
        assert (
            preflight.client_packages(dataclasses.replace(DEBIAN, distribution=distribution, family=family)) == wanted
        )
    root_with(tmp_path, {"var/lib/dpkg/info/docker-ce-cli.list": ""})
    assert preflight.client_packages(DEBIAN) == ("docker-buildx-plugin",)


def test_a_stopped_engine_is_no_lack_for_root(bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dockerd = root_with(tmp_path, {"bin/dockerd": ""}) / "bin/dockerd"
    dockerd.chmod(0o755)
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(dockerd.parent))
    user = dataclasses.replace(DEBIAN, is_root=False)
    assert preflight.engine(DEBIAN)[0].state == "ok"
    row, _ = preflight.engine(user)
    assert (row.state, row.fix) == ("MISSING", daemon.start_command())


def test_what_is_missing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the test's own in the place of apt-get, which would change this machine."""
    called, program = tmp_path / "called", root_with(tmp_path, {"apt-get": ""}) / "apt-get"
    program.write_text(f'#!/bin/sh\necho "$*" >>{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines = heard()
    lack = preflight.lacking(DEBIAN, "docker engine", "none", "docker.io")
    preflight.install([lack, lack], DEBIAN)
    assert [line.split()[2] for line in called.read_text().splitlines()] == ["update", "install"]
    assert lines == [lack.fix]
    preflight.install([], DEBIAN)


def test_disk_space_is_summed_per_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    paths = Paths(tmp_path, tmp_path / "a/b/cache", tmp_path / "home")
    usage = preflight.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=10 * GB))

    def short(cache: int, model: int = 0) -> int:
        folders = preflight.folders_of(paths, Needs(cache=cache, home=6 * GB, engine=99 * GB))
        (row,) = preflight.disk_rows(folders, [(paths.models, model)])
        return row.short

    assert (short(4 * GB), short(5 * GB), short(4 * GB, 2 * GB)) == (0, GB, 2 * GB)
    paths.store.mkdir(parents=True)
    with (paths.store / "fetched").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    assert short(4 * GB + (1 << 20)) == 0, "what is there already needs no space again"
    assert 0 < short(4 * GB, 4 << 20) < 4 << 20, "but a model does"


def test_the_stack_decides_how_much_disk(bare: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = preflight.shutil.disk_usage(bare.cache.parent)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage._replace(free=30 * GB))
    lacking = [{one.name for one in preflight.missing(bare, DEBIAN, stack)} for stack in (CPU, SPARK)]
    assert ["disk space" in names for names in lacking] == [False, True]


def test_where_installing_cannot_help_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # nothing may be run
    for host, lacking in ((dataclasses.replace(DEBIAN, is_root=False), [IPTABLES]), (DEBIAN, [IPTABLES, FULL])):
        with pytest.raises(HostError) as caught:
            preflight.install(lacking, host)
        assert caught.value.exit_code == 3 and all(one.fix in caught.value.next_step for one in lacking)


def test_a_command_that_fails_ends_the_installation() -> None:
    failing = Requirement("x", "MISSING", "none", "echo planted; false", runnable=True)
    lines = heard()
    with pytest.raises(HostError, match="planted") as caught:
        preflight.install([failing, IPTABLES], DEBIAN)
    assert caught.value.exit_code == 3 and lines == [failing.fix]


@pytest.mark.parametrize(("info", "state"), [({"MemoryLimit": True, "SwapLimit": True}, "ok"), ({}, "advice")])
def test_an_engine_that_cannot_limit_memory_is_advice(info: dict[str, bool], state: str) -> None:
    assert preflight.memory_guard(info).state == state
