"""`docker build` through a CLI that can use BuildKit, with its output made readable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from sparkpin.core.errors import BuildError, DiskError, EngineError, HostError
from sparkpin.core.terminal import detail, say, tame

LAST_LINES = 40  # of a build that fails BuildKit repeats the failing step's own lines at the end
STEP = re.compile(r"^#\d+ (\[(?!internal\])[^]]+\] (?!FROM ).+)$")  # "#5 [torch 2/3] RUN ..."


# For clients with BuildKit inside and for buildx: the engine's own builder, an image without attestations.
ENVIRONMENT = {
    "DOCKER_BUILDKIT": "1",
    "BUILDX_BUILDER": "default",
    "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
    "DOCKER_CLI_HINTS": "false",
}


@cache
def builder() -> str:
    """The first `docker` on PATH that can use BuildKit: from 18.09 to 22 it can by itself, later ones need buildx."""
    folders = dict.fromkeys(os.environ.get("PATH", os.defpath).split(os.pathsep))
    commands = [command for folder in folders if (command := shutil.which("docker", path=folder))]
    for command in commands:
        argv, env = [command, "build", "--help"], {**os.environ, **ENVIRONMENT}
        if subprocess.run(argv, env=env, capture_output=True, check=False).returncode == 0:
            return command
    raise HostError(
        f"no docker command that can use BuildKit on PATH ({', '.join(commands) or 'none found'})",
        next_step="install docker-buildx-plugin (Docker's packages) or docker-buildx (Ubuntu's), then `invoke doctor`",
    )


def build(
    context: Path, *words: str, report: Callable[[str], None] = say, host: Mapping[str, str] | None = None
) -> None:
    """Build context/Dockerfile without network. words: further options of `docker build`, as what becomes of it.

    report: takes one line of progress for each step; the BuildError has a failing step's last lines. host: of an
    engine, the environment that leads there.
    """
    argv = [builder(), "build", "--network", "none", "--pull=false", "--progress", "plain", *words, str(context)]
    env, nothing = {**os.environ, **(host or {}), **ENVIRONMENT}, subprocess.DEVNULL
    with subprocess.Popen(
        argv, env=env, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            last = follow(process.stderr, report)
        except BaseException:
            process.terminate()
            raise
        if process.wait() != 0:
            raise failure(last)


def follow(lines: Iterable[str], report: Callable[[str], None]) -> str:
    """Report each step once. Returns what to show if the build fails."""
    shown: set[str] = set()
    last: deque[str] = deque(maxlen=LAST_LINES)
    for raw in lines:
        line = raw.rstrip()
        last.append(f"    {line}")
        if not (step := STEP.match(line)):
            detail(f"  {tame(line)}")
        elif step[1] not in shown:
            shown.add(step[1])
            report(re.sub(r"--mount=\S+\s+", "", step[1]))
    return "\n".join(last)


def disk_full(words: str) -> DiskError:
    return DiskError(
        f"the Docker engine's disk is full:{words}",
        next_step="`invoke prune --keep 2` removes old releases, `docker builder prune` the build cache",
    )


def failure(report: str) -> BuildError | DiskError | EngineError:
    if "no space left on device" in report:
        return disk_full(f"\n{report}")
    if re.search(r"cannot connect to the docker daemon|permission denied while trying to connect", report, re.I):
        return EngineError(f"the docker command does not reach the engine:\n{report}", next_step="invoke doctor")
    return BuildError(
        f"the build failed; its last lines:\n{report}", next_step="fix what the last lines name, then the same command"
    )
