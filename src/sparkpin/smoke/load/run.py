"""The load in a container: closed in as a smoke test's, for a limited time, emulated for an image of another CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.smoke.inspect.elf import AARCH64, X86_64
from sparkpin.smoke.inspect.packages import PLUGINS
from sparkpin.smoke.inspect.rules import PLATFORMS
from sparkpin.smoke.inspect.scan import ImageFacts
from sparkpin.smoke.load import inside
from sparkpin.smoke.load.rows import LoadRow, outcomes, read_rows
from sparkpin.smoke.load.stub import SONAME, is_wanted, stub, wanted_symbols
from sparkpin.smoke.server import alone, container_of, private_folder

LIMIT_SECONDS = 15 * 60.0
MEMORY = 12 * running.GIB
TRIPLETS = {X86_64: "x86_64-linux-gnu", AARCH64: "aarch64-linux-gnu"}
SCRIPT = "/run/sparkpin/inside.py"
CPUS = "/sys/devices/system/cpu"
# In place of the host's under emulation: PyTorch for aarch64 crashes on an x86-64 machine's (xbyak_aarch64 wants the
# number, cpuinfo the lists). The number is that of a Cortex-X925, the larger core of a Spark.
EMULATED_CPU = {
    "cpu0/regs/identification/midr_el1": "0x00000000410fd851\n",
    "cpu1/regs/identification/midr_el1": "0x00000000410fd851\n",
    **dict.fromkeys(("online", "possible", "present"), "0-1\n"),
}
IMPORTS = ("vllm", "vllm._custom_ops")


@dataclass(frozen=True)
class Loaded:
    rows: tuple[LoadRow, ...]
    log: bytes
    seconds: float
    emulated: bool  # whether another machine's code ran
    stubbed: int  # functions of the driver that the stub stood in for


def libraries_of(facts: ImageFacts, machine: int) -> list[str]:
    """Absolute paths of vLLM's shared libraries."""
    return sorted(
        f"/{path}"
        for path, library in facts.libraries.items()
        if library.dynamic and library.machine == machine and "-packages/vllm/" in path and ".so" in path
    )


def run_load(
    paths: Paths,
    engine: Engine,
    release: Release,
    facts: ImageFacts,
    platform: str,
    *,
    limit: float = LIMIT_SECONDS,
) -> Loaded:
    """facts: what `inspection` read of the image. platform: the image's. limit: seconds.

    Raises HostError where this machine cannot run the image's programs or the engine is on another, EngineError where
    the engine refuses.
    """
    running.require_here(engine)
    machine = PLATFORMS[platform]
    symbols = wanted_symbols(facts, machine)
    driver = stub(symbols, machine) if is_wanted(facts, machine, symbols) else b""
    libraries = [*([SONAME] if driver else ()), *libraries_of(facts, machine)]
    emulated = platform != engine.platform
    how = f"under emulation of {platform}" if emulated else "natively"
    say(f"loading {len(libraries)} libraries and the plugins {how}, at most {limit / 60:.0f} minutes")
    if driver:
        say(f"{SONAME}: a stub with {len(symbols)} functions, each of which says that there is no device")
    wanted = json.dumps({"libraries": libraries, "imports": IMPORTS, "group": PLUGINS})
    begin = time.monotonic()
    with alone(paths, engine):
        settings: dict[str, Any] = running.apart(running.sandbox(release.env, memory=MEMORY))
        home = f"rw,nosuid,nodev,size={running.GIB},uid={running.UID},gid={running.UID}"
        settings["tmpfs"] |= {running.HOME: home}  # what is written under emulation serves nobody
        settings |= {"entrypoint": ["python"], "command": [SCRIPT, wanted], "platform": platform}
        with (
            mounted(paths, driver, TRIPLETS[machine], emulated) as volumes,
            container_of(paths, engine, release, "load", volumes=volumes, **settings) as container,
        ):
            ending = watch(container, limit)
            with engine_errors():
                log = running.log_of(container)
    if b"exec format error" in log and not read_rows(log):
        raise HostError(
            f"this machine runs no programs for {platform}, also not under emulation",
            next_step=f"invoke doctor --stack {release.stack} --fix",
        )
    seconds = round(time.monotonic() - begin, 1)
    return Loaded(outcomes(log, libraries, release.demands.mods, ending), log, seconds, emulated, len(symbols))


@contextmanager
def mounted(paths: Paths, driver: bytes, triplet: str, emulated: bool) -> Iterator[dict[str, dict[str, str]]]:
    """The script, and the driver's stub where the container toolkit would mount the driver."""
    files = {"inside.py": Path(inside.__file__).read_bytes()}
    places = {"inside.py": SCRIPT}
    if driver:
        files[SONAME], places[SONAME] = driver, f"/usr/lib/{triplet}/{SONAME}"
    if emulated:
        files |= {f"cpu/{name}": text.encode() for name, text in EMULATED_CPU.items()}
        places["cpu"] = CPUS
    with private_folder(paths) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for path in folder.rglob("*"):
            path.chmod(0o755)
        yield {str(folder / name): {"bind": place, "mode": "ro"} for name, place in places.items()}


def watch(container: Container, limit: float) -> str:
    """Tell each step as it ends, until all have or the time is over. How the process ended, in words."""
    begin, count = time.monotonic(), 0
    while True:
        with engine_errors():
            reason = running.exit_reason(container)
            rows = read_rows(running.log_of(container))
        for row in rows[count:]:
            if row.state != "begin" and row.kind != "end":
                say(f"  {row.label}: {row.word} in {row.seconds:.1f} s{f', {row.detail}' if row.detail else ''}")
        count = len(rows)
        if reason or (rows and rows[-1].kind == "end"):  # a large process takes long to leave
            return reason or "is done"
        if time.monotonic() - begin > limit:
            with engine_errors():
                container.kill()
            return f"was ended after {limit:g} s, the time that it may take"
        time.sleep(0.5)
