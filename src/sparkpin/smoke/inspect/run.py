"""The image in a container: closed in as a smoke test's, for a limited time, emulated for an image of another CPU.

In place of a server that cannot run here the record keeps what it says, which is never "passed". The evidence comes to
lie where a smoke test's would: inspection.json (that of `invoke smoke TAG --inspect --json`), load.log (all that the
container wrote) and result.json.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable, say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import stack_of
from sparkpin.smoke.evidence import CheckResult, Evidence
from sparkpin.smoke.inspect import inside
from sparkpin.smoke.inspect.facts import ImageFacts, read_steps
from sparkpin.smoke.inspect.report import Result, show
from sparkpin.smoke.inspect.rules import Wanted, findings
from sparkpin.smoke.server import container_of, exclusive_run, private_folder

LIMIT_SECONDS = 30 * 60.0
MEMORY = 12 * running.GIB
FOLDER = "/run/sparkpin"
CPUS = "/sys/devices/system/cpu"
# In place of the host's under emulation: PyTorch for aarch64 crashes on an x86-64 machine's (xbyak_aarch64 wants the
# number, cpuinfo the lists). The number is that of a Cortex-X925, the larger core of a Spark.
EMULATED_CPU = {
    "cpu0/regs/identification/midr_el1": "0x00000000410fd851\n",
    "cpu1/regs/identification/midr_el1": "0x00000000410fd851\n",
    **dict.fromkeys(("online", "possible", "present"), "0-1\n"),
}
ASKED = {"kernels": "/opt/sparkpin/kernels", "imports": ("vllm", "vllm._custom_ops"), "plugins": "vllm.general_plugins"}


def inspect(
    paths: Paths, engine: Engine, release: Release, *, sm: int | None = None, limit: float = LIMIT_SECONDS
) -> Result:
    """Examine a release's image and load its libraries and plugins, without a GPU. No record changes.

    sm: 121; None for what the stack says. limit: seconds.

    Raises HostError where this machine cannot run the image's programs or the engine is on another; EngineError,
    IntegrityError as the smoke test does.
    """
    running.require_here(engine)
    running.require_image(engine, release)
    info, stack = engine.image(release.tag), stack_of(paths, release)
    assert info
    platform = f"{info.os}/{info.architecture}"
    if stack and stack.gpu and not sm:
        sm = int(stack.gpu.sm.replace(".", ""))
    emulated = platform != engine.platform
    how = f"under emulation of {platform}" if emulated else "natively"
    say(f"{release.tag}: its libraries and plugins are loaded {how}, at most {limit / 60:.0f} minutes")
    begin = time.monotonic()
    log, ending = run(paths, engine, release, json.dumps(ASKED | {"gpu": bool(sm)}), platform, emulated, limit)
    facts = ImageFacts.read(log, ending)
    if not facts.steps and b"exec format error" in log:
        raise HostError(
            f"this machine runs no programs for {platform}, also not under emulation",
            next_step=f"invoke doctor --stack {release.stack} --fix",
        )
    accepted = dict(stack.python.exclude) if stack else {}
    accepted |= {Requirement(name).name: why for name, why in (stack.python.overrides.items() if stack else ())}
    accepted = {canonicalize_name(name): why for name, why in accepted.items()}
    wanted = Wanted(stack.platform if stack else platform, sm, release.demands.mods, accepted)
    seconds = round(time.monotonic() - begin, 1)
    return Result(release.tag, platform, sm, facts, findings(facts, wanted, platform), log, seconds, emulated)


def run(
    paths: Paths, engine: Engine, release: Release, asked: str, platform: str, emulated: bool, limit: float
) -> tuple[bytes, str]:
    """All that the container wrote, and how it ended."""
    with exclusive_run(paths, engine):
        settings: dict[str, Any] = running.apart(running.sandbox(release.env, memory=MEMORY))
        home = f"rw,nosuid,nodev,size={running.GIB},uid={running.UID},gid={running.UID}"
        settings["tmpfs"] |= {running.HOME: home}  # what is written without a server serves nobody
        settings |= {"entrypoint": ["python"], "command": [f"{FOLDER}/inside.py", asked], "platform": platform}
        with (
            mounted(paths, emulated) as volumes,
            container_of(paths, engine, release, "inspect", volumes=volumes, **settings) as container,
        ):
            ending = watch(container, limit)
            with engine_errors():
                return running.log_of(container), ending


@contextmanager
def mounted(paths: Paths, emulated: bool) -> Iterator[dict[str, dict[str, str]]]:
    """The script, with pip beside it."""
    with private_folder(paths) as folder:
        (folder / "script").mkdir()
        shutil.copy(inside.__file__, folder / "script")
        pip = importlib.util.find_spec("pip")
        assert pip and pip.origin
        shutil.copytree(Path(pip.origin).parent, folder / "script/pip")
        for name, text in EMULATED_CPU.items():
            (folder / "cpu" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "cpu" / name).write_text(text)
        for path in folder.rglob("*"):
            path.chmod(0o755)
        places = {"script": FOLDER} | ({"cpu": CPUS} if emulated else {})
        yield {str(folder / name): {"bind": place, "mode": "ro"} for name, place in places.items()}


def watch(container: Container, limit: float) -> str:
    """Tell of each step as it ends, of libraries only vLLM's and those that do not load, until all have or the time is
    over. How the process ended, in words."""
    begin, count = time.monotonic(), 0
    while True:
        with engine_errors():
            reason = running.exit_reason(container)
            rows = read_steps(running.log_of(container))
        for row in rows[count:]:
            is_quiet = row.kind == "library" and row.state == "ok" and "-packages/vllm/" not in row.name
            if row.state != "begin" and row.kind != "end" and not is_quiet:
                say(f"  {printable(row.text)}")
        count = len(rows)
        if reason or (rows and rows[-1].kind == "end"):  # a large process takes long to leave
            return reason or "is done"
        if time.monotonic() - begin > limit:
            with engine_errors():
                container.kill()
            return f"was ended after {limit:g} s, the time that it may take"
        time.sleep(1)


def run_inspection(paths: Paths, engine: Engine, release: Release, why: str) -> Evidence:
    """why: no server ran. Raises as `inspect` does."""
    say(f"inspected, not served: {why}")
    examined = inspect(paths, engine, release)
    show(examined)
    files = {"inspection.json": examined.as_json(), "load.log": examined.log}
    return Evidence.of(result_of(examined, why), release, read_fingerprint(engine.version), files)


def result_of(examined: Result, why: str) -> dict[str, Any]:
    """inspected: whether nothing was found. It never passed: a server has to."""
    found = [CheckResult(one.rule, False, f"{one.subject}: {one.text}", 0.0) for one in examined.errors]
    return {
        "passed": False,
        "inspected": not found,
        "how": "inspected, emulated" if examined.emulated else "inspected",
        "why": why,
        "seconds": examined.seconds,
        "checks": [asdict(one) for one in found or [CheckResult("inspection", True, examined.verdict, 0.0)]],
    }
