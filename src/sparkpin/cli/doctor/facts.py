"""What is so on this machine, read once. Nothing is changed or started, and the network is not asked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import EngineError
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import Gpu, Run, read_gpus
from sparkpin.serve import ports

HOOK = "nvidia-container-runtime-hook"


@dataclass(frozen=True)
class Docker:
    version: str = ""  # "" where no engine answers
    elsewhere: str = ""  # its machine, "" for this one
    runtimes: tuple[str, ...] = ()  # their names


@dataclass(frozen=True)
class MachineFacts:
    host: machine.Host
    gpus: tuple[Gpu, ...]
    module: str  # version of the loaded NVIDIA driver, "" for none
    toolkit: str  # the version that nvidia-ctk tells, or ""
    hook: bool  # whether Docker finds the toolkit's hook, as it does for `--gpus`
    cdi: tuple[str, ...]  # specifications that name NVIDIA's GPUs
    docker: Docker
    memory: Mapping[str, int]  # /proc/meminfo in bytes
    port: int
    holder: str  # who listens at the port, "" for nobody
    kernel: str = ""  # its release


def read_facts(host: machine.Host, port: int, *, root: Path = machine.ROOT, run: Run = machine.output) -> MachineFacts:
    engine = None
    with contextlib.suppress(EngineError):
        engine = Engine.connect()
    return MachineFacts(
        host=host,
        gpus=read_gpus(run),
        module=machine.text(root / "sys/module/nvidia/version").strip(),
        toolkit=toolkit_version(run),
        hook=machine.find_program(HOOK) is not None,
        cdi=cdi_files(root),
        docker=docker_of(engine),
        memory=machine.meminfo(root / "proc/meminfo"),
        port=port,
        holder=holder_of(engine, port),
        kernel=machine.text(root / "proc/sys/kernel/osrelease").strip(),
    )


def docker_of(engine: Engine | None) -> Docker:
    if engine is None:
        return Docker()
    with engine_errors():
        found = engine.client.info()
    return Docker(
        version=str(found.get("ServerVersion", "")),
        elsewhere=engine.elsewhere,
        runtimes=tuple(sorted(name for name in found.get("Runtimes") or {} if not name.startswith("io.containerd"))),
    )


def holder_of(engine: Engine | None, port: int) -> str:
    if not ports.listeners(port):
        return ""
    return (ports.port_holder(engine, port)[0] if engine else "") or "a process"


def toolkit_version(run: Run) -> str:
    """The last word of `NVIDIA Container Toolkit CLI version 1.18.0`, the first of its lines."""
    lines = (run(("nvidia-ctk", "--version")) or "").splitlines()
    return lines[0].split()[-1] if lines and lines[0].split() else ""


def cdi_files(root: Path) -> tuple[str, ...]:
    """Absolute paths of the specifications that offer nvidia.com/gpu, where Docker looks for them."""
    found = [path for folder in ("etc/cdi", "var/run/cdi") for path in sorted((root / folder).glob("*"))]
    return tuple(f"/{path.relative_to(root)}" for path in found if "nvidia.com/gpu" in machine.text(path))
