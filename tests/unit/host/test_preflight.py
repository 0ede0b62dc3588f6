"""What a build needs of a machine: what is missing of it, and what is run to get it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import PROJECT
from test_machine import DEBIAN, GB, root_with

from sparkpin.core.errors import HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host import buildkit, daemon, machine, preflight
from sparkpin.host.machine import Host
from sparkpin.host.preflight import Needs, Requirement, StackFacts
from sparkpin.pins.manifests import load_stack

IPTABLES = Requirement("iptables", False, "not found", "apt-get install iptables", ("iptables",))
FULL = Requirement("disk space", False, "1 GB free", "free space")
CPU = StackFacts("linux/amd64", gpu=False)


def lacks(paths: Paths, host: Host, stack: StackFacts = CPU) -> list[Requirement]:
    """But for disk and memory, of which this machine may have less."""
    return [one for one in preflight.missing(paths, host, stack) if one.packages or one.name == preflight.GPU_RUNTIME]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A machine without any of the programs, certificates or an engine, as far as `requirements` can see."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("DOCKER_HOST", "")
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(preflight, "ROOT", tmp_path)
    monkeypatch.setattr(daemon, "ask", lambda *_, **__: None)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)
    buildkit.builder.cache_clear()
    yield Paths(tmp_path, tmp_path / "cache", tmp_path / "home")  # type: ignore[misc]
    buildkit.builder.cache_clear()


def test_what_a_bare_debian_lacks(bare: Paths) -> None:
    """A GPU that the stack does not use needs no runtime."""
    lacking = {r.name: r for r in lacks(bare, dataclasses.replace(DEBIAN, has_gpu=True))}
    assert {name: r.packages for name, r in lacking.items()} == {
        "docker engine": ("docker.io",),
        "docker client": ("docker.io",),
        "iptables": ("iptables",),
        "ca-certificates": ("ca-certificates",),
        "python venv": ("python3-venv",),
    }
    spark = dataclasses.replace(DEBIAN, is_root=False, is_spark=True)
    assert {r.name for r in lacks(bare, spark)} == {*lacking, "GPU runtime"}


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
    assert preflight.client_packages(machine, tmp_path) == wanted
    root_with(tmp_path, {"var/lib/dpkg/info/docker-ce-cli.list": ""})
    assert preflight.client_packages(machine, tmp_path) == ("docker-buildx-plugin",)


def test_a_stopped_engine_is_no_lack_for_root(bare: Paths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dockerd = tmp_path / "bin/dockerd"
    root_with(tmp_path, {"bin/dockerd": ""})
    dockerd.chmod(0o755)
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(dockerd.parent))
    found = preflight.engine(bare, DEBIAN)
    assert found.ok and "not running" in found.detail
    user = preflight.engine(bare, dataclasses.replace(DEBIAN, is_root=False, has_systemd=True))
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
    if by_context:  # of the CLI, without the SDK, as before .venv exists
        monkeypatch.delenv("DOCKER_HOST")
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        monkeypatch.setitem(sys.modules, "docker", None)
        meta = f"contexts/meta/{hashlib.sha256(b'dead').hexdigest()}/meta.json"
        endpoints = json.dumps({"Name": "dead", "Endpoints": {"docker": {"Host": socket}}})
        root_with(tmp_path, {"config.json": '{"currentContext": "dead"}', meta: endpoints})
    else:
        monkeypatch.setenv("DOCKER_HOST", socket)
    assert daemon.named_engine() == socket
    found = preflight.engine(bare, DEBIAN)
    assert not found.ok and found.fix and found.packages == ()


def test_another_architecture_needs_emulation(bare: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = preflight.emulation(DEBIAN, "aarch64", tmp_path)
    assert lacking.packages == ("qemu-user-static", "binfmt-support")
    assert lacking.fix.endswith(" binfmt-support && update-binfmts --enable qemu-aarch64")
    root_with(tmp_path, {"proc/sys/fs/binfmt_misc/qemu-aarch64": "enabled\ninterpreter /usr/bin/qemu-aarch64\n"})
    assert preflight.emulation(DEBIAN, "aarch64", tmp_path).ok
    (tmp_path / "proc/sys/fs/binfmt_misc/qemu-aarch64").unlink()
    monkeypatch.setattr(preflight, "find_program", lambda name: f"/usr/bin/{name}")
    off = preflight.emulation(dataclasses.replace(DEBIAN, is_root=False), "aarch64", tmp_path)
    assert not off.ok and off.packages == () and off.fix == "sudo update-binfmts --enable qemu-aarch64"


def test_what_is_installed_and_switched_off_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the test's own in the place of update-binfmts, which would change this machine's kernel."""
    called = tmp_path / "called"
    program = tmp_path / "update-binfmts"
    program.write_text(f'#!/bin/sh\necho "$*" >{called}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    enable = ("update-binfmts", "--enable", "qemu-aarch64")
    off = Requirement("emulation", False, "off", "update-binfmts --enable qemu-aarch64", then=enable)
    said: list[str] = []
    preflight.install([off], DEBIAN, said.append)
    assert called.read_text() == "--enable qemu-aarch64\n" and said == [off.fix]
    with pytest.raises(HostError, match="only root") as refused:
        preflight.install([off], dataclasses.replace(DEBIAN, is_root=False), said.append)
    assert refused.value.next_step == "sudo update-binfmts --enable qemu-aarch64"


def test_a_stack_with_a_gpu_takes_more_disk_and_only_a_spark_its_memory() -> None:
    project = PROJECT
    cpu, spark = (load_stack(project, name) for name in ("cpu", "spark"))
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
    assert not short.ok and "SPARKPIN_CACHE" in short.fix and short.packages == ()
    (paths.cache).mkdir(parents=True)
    with (paths.cache / "fetched").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 << 20)
    (filled,) = preflight.disk(paths, Needs(cache=4 * GB + (1 << 20), home=6 * GB))
    assert filled.ok, "what is there already needs no space again"


def never(*_: object, **__: object) -> None:
    raise AssertionError("nothing may be run")


USER = dataclasses.replace(DEBIAN, is_root=False)
DOCKER = Requirement("docker engine", False, "none", "", ("docker.io",))


@pytest.mark.parametrize(
    ("machine", "lacking", "command"),
    [
        (USER, [IPTABLES, DOCKER, DOCKER], " docker.io iptables"),
        (dataclasses.replace(DEBIAN, family=("fedora",)), [IPTABLES], IPTABLES.fix),
        (DEBIAN, [IPTABLES, FULL], " iptables; then free space"),
    ],
)
def test_where_installing_cannot_help_nothing_is_changed(
    machine: Host, lacking: list[Requirement], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(HostError) as caught:
        preflight.install(lacking, machine, never)
    assert caught.value.exit_code == 3 and caught.value.next_step.endswith(command)


def test_installing_is_refused_before_or_fails_after_something_was_changed(
    bare: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root_with(tmp_path, {"bin/apt-get": "#!/bin/sh\nexit 100\n"})
    (tmp_path / "bin/apt-get").chmod(0o755)
    monkeypatch.setattr(machine, "SYSTEM_PATH", f"{tmp_path / 'bin'}:/bin")
    monkeypatch.setattr(preflight, "read_host", lambda: DEBIAN)
    for lack, unchanged in ((IPTABLES, False), (FULL, True)):
        monkeypatch.setattr(preflight, "missing", lambda *_, lack=lack, **__: [lack])
        assert preflight.main(["--stack", "cpu"]) == 3
        assert ("Nothing was changed" in capsys.readouterr().err) == unchanged


@pytest.mark.parametrize("words", [["--stack", "spark"], ["--recipe=qwen3.5-122b"]])
def test_what_is_looked_for_is_what_the_chosen_stack_needs(
    words: list[str], bare: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Requirement] = []
    paths, full = dataclasses.replace(bare, project=PROJECT), preflight.shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(preflight.Paths, "from_env", lambda: paths)
    monkeypatch.setattr(preflight, "read_host", lambda: DEBIAN)
    monkeypatch.setattr(preflight, "show", lambda lacks, _: shown.extend(lacks))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: full)
    monkeypatch.setattr(preflight, "size_of", lambda *_: 0)
    assert preflight.main([*words, "--dry-run"]) == 0
    assert "qemu-user-static" in {package for one in shown for package in one.packages}
    assert shown == preflight.missing(paths, DEBIAN, load_stack(PROJECT, "spark"))
    assert shown != preflight.missing(paths, DEBIAN, load_stack(PROJECT, "cpu"))


def test_a_stack_is_read_alike_with_and_without_yaml() -> None:
    for path in (PROJECT / "pins/stacks").glob("*.yaml"):
        stack = load_stack(PROJECT, path.stem)
        assert StackFacts.read(path) == StackFacts(stack.platform, gpu=stack.gpu is not None)
    with pytest.raises(InputError):
        preflight.stack_of(PROJECT, DEBIAN, stack="no-such", recipe=None, stage=None)
