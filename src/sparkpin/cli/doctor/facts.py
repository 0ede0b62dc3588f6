"""What is so on this machine, read once. Nothing is changed or started, and the network is not asked."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import EngineError
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import Gpu, Run, read_gpus
from sparkpin.serve import ports


@dataclass(frozen=True)
class MachineFacts:
    """module: version of the loaded NVIDIA driver, "" for none; ways: by which Docker hands out the GPU; docker: the
    engine's version, "" where none answers; elsewhere: its machine, "" for this one; holder: who listens at the port,
    "" for nobody; kernel: its release."""

    host: machine.Host
    gpus: tuple[Gpu, ...]
    module: str
    ways: tuple[str, ...]
    docker: str
    elsewhere: str
    port: int
    holder: str
    kernel: str


def read_facts(host: machine.Host, port: int, *, root: Path = machine.ROOT, run: Run = machine.output) -> MachineFacts:
    engine, docker, ways = None, "", []
    with contextlib.suppress(EngineError):
        engine = Engine.connect()
        with engine_errors():
            info = engine.client.info()
        docker = str(info["ServerVersion"])
        ways += ["the runtime nvidia"] if "nvidia" in info["Runtimes"] else []
    ways += ["the toolkit's hook"] if machine.find_program("nvidia-container-runtime-hook") else []
    # Docker Engine 25.0 release notes: devices of the Container Device Interface.
    if docker.split(".")[0].isdecimal() and int(docker.split(".")[0]) >= 25:
        specifications = [path for folder in ("etc/cdi", "var/run/cdi") for path in (root / folder).glob("*")]
        ways += ["CDI"] if any("nvidia.com/gpu" in machine.text(path) for path in specifications) else []
    return MachineFacts(
        host=host,
        gpus=read_gpus(run),
        module=machine.text(root / "sys/module/nvidia/version").strip(),
        ways=tuple(ways),
        docker=docker,
        elsewhere=engine.elsewhere if engine else "",
        port=port,
        holder=holder_of(engine, port),
        kernel=machine.text(root / "proc/sys/kernel/osrelease").strip(),
    )


def holder_of(engine: Engine | None, port: int) -> str:
    if not ports.listeners(port):
        return ""
    return (ports.port_holder(engine, port)[0] if engine else "") or "a process"
