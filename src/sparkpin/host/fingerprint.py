"""The machine that made a release, for its record: the kind of machine, and nothing that distinguishes one from another
of its kind (no serial numbers, names or addresses)."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from sparkpin.core.models import StrictModel
from sparkpin.host import machine as hosts

Text = Annotated[str, Field(max_length=200)]


class GpuKind(StrictModel):
    name: Text
    compute_capability: Text
    driver: Text


class Fingerprint(StrictModel):
    """machine: the firmware's product name, "" where there is none; memory in bytes; docker: the engine's version, ""
    where it was not asked."""

    machine: Text
    arch: Text
    cpu: Text
    cores: Annotated[int, Field(ge=0)]
    memory: Annotated[int, Field(ge=0)]
    gpus: Annotated[tuple[GpuKind, ...], Field(strict=False, max_length=64)]
    kernel: Text
    os: Text
    docker: Text

    @property
    def line(self) -> str:
        cpu = f"{self.cpu or self.arch}, {self.cores} cores, {self.memory / 1e9:.0f} GB"
        gpus = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in self.gpus) or "no GPU"
        docker = f"Docker {self.docker}" if self.docker else ""
        return "; ".join(filter(None, (self.machine, cpu, gpus, self.os, f"Linux {self.kernel}", docker)))


def read_fingerprint(docker: str, gpus: Sequence[hosts.Gpu] | None = None) -> Fingerprint:
    """Of this machine, whether or not the engine runs on it. gpus: where they have been read already."""
    host, gpus = hosts.read_host(), hosts.read_gpus() if gpus is None else gpus
    return Fingerprint(
        machine=next(iter(hosts.product_names()), ""),
        arch=host.arch,
        cpu=cpu_model(hosts.text("proc/cpuinfo")),
        cores=os.cpu_count() or 0,
        memory=host.memory_total,
        gpus=tuple(GpuKind(name=g.name, compute_capability=g.compute_capability, driver=g.driver) for g in gpus),
        kernel=platform.release(),
        os=host.distribution,
        docker=docker,
    )


def cpu_model(cpuinfo: str) -> str:
    """The first `model name`; Arm's CPUs have none there, only the numbers of their makers."""
    rows = dict(line.split(":", 1) for line in reversed(cpuinfo.splitlines()) if ":" in line)
    values = {key.strip(): value.strip() for key, value in rows.items()}
    parts = [values[key] for key in ("CPU implementer", "CPU part") if key in values]
    return values.get("model name") or (f"Arm {' '.join(parts)}" if parts else "")
