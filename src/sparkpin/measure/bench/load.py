"""The load generator's container: the release's own image in the server's network, for one run of steps."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkpin.core.errors import SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container, Mount
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.measure.bench import driver
from sparkpin.measure.bench.plan import SLACK, BenchPlan, Step
from sparkpin.measure.bench.target import BenchTarget
from sparkpin.pins.vllm_flags import MODEL_PATH, served_name
from sparkpin.releases import container as running
from sparkpin.releases import postmortem
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, socket_port
from sparkpin.serve.launch import FOLDER, SOCKETS
from sparkpin.smoke.server import LABEL, owner

TOOL = "vllm bench serve"
PLAN = "plan.json"
MEMORY = 8 * running.GIB
ENDING_SECONDS = 10.0
LEAST_LIMIT, SLOW_PREFILL, SLOW_DECODE = 600.0, 10, 2
"""Seconds that any step may take, and tokens a second of one request at a time: a step that is slower hangs."""


def plan_text(release: Release, steps: Sequence[Step], plan: BenchPlan, socket: str) -> bytes:
    value = {
        "socket": socket,
        "model": served_name(release.argv),
        "tokenizer": MODEL_PATH,
        "room": plan.context - SLACK,
        "steps": [
            {
                **asdict(step.cell),
                "number": number,
                "requests": step.requests,
                "output_tokens": step.output_tokens,
                "seed": step.seed,
                "limit": limit_of(step),
            }
            for number, step in enumerate(steps)
        ],
    }
    return json.dumps(value).encode()


def limit_of(step: Step) -> float:
    """Seconds after which it is broken off."""
    return LEAST_LIMIT + step.requests * (step.cell.input_tokens / SLOW_PREFILL + step.output_tokens / SLOW_DECODE)


def run_steps(
    paths: Paths, engine: Engine, target: BenchTarget, steps: Sequence[Step], plan: BenchPlan
) -> Iterator[dict[str, Any]]:
    """What the driver writes, as it happens: its vLLM once, then of each step that it begins, and what came of it.

    The container is gone in the end, however it ends.

    Raises:
        SmokeError: the tool ended before its last step; with its last words, or the post-mortem of the server.
    """
    release, server, subject = target.subject.release, target.container, target.subject
    with engine_errors():
        cache = running.cache_volume(engine, release)
        settings = running.options(release, subject.checkpoint, memory=MEMORY, gpus=subject.gpus, cache=cache)
        container = engine.client.containers.create(
            release.tag,
            name=f"sparkpin-bench-load-{secrets.token_hex(3)}",
            entrypoint=["python", "-I"],
            command=[f"{FOLDER}/{Path(driver.__file__).name}", f"{FOLDER}/{PLAN}"],
            labels={LABEL: owner(paths)},
            mounts=[
                Mount(target=FOLDER, source=None, type="volume"),
                Mount(target=SOCKETS, source=sockets_of(server), type="volume", read_only=True),
            ],
            **running.apart(settings),
        )
    try:
        files = {file.name: file.read_bytes() for file in map(Path, (driver.__file__, socket_port.__file__))}
        running.put(container, FOLDER, files | {PLAN: plan_text(release, steps, plan, launch.SOCKET_PATH)})
        with engine_errors():
            container.start()
        done = 0
        for value in values(output(container)):
            done += "result" in value
            yield value
        if done < len(steps):
            raise gone(paths, container, server, release)
    finally:
        launch.remove(container)


def sockets_of(server: Container) -> str:
    """The volume where its socket lies."""
    return str(next(mount["Name"] for mount in server.attrs["Mounts"] if mount["Destination"] == SOCKETS))


def output(container: Container) -> Iterator[bytes]:
    """Its standard output to the end, as it comes.

    With Docker 20.10 the end of a container can cut short what follows its log, so only a reading that began after the
    end counts as the last.
    """
    seen, ended = 0, False
    while not ended:
        with engine_errors():
            container.reload()
            ended = container.status not in ("created", "running")
            place = 0
            for chunk in container.logs(stream=True, follow=True, stdout=True, stderr=False):
                new = chunk[max(0, seen - place) :]
                place += len(chunk)
                if new:
                    seen = place
                    yield new


def values(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each line, however the engine cuts the stream."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines if line.startswith(b"{"))


def gone(paths: Paths, container: Container, server: Container, release: Release) -> SmokeError:
    """Why the tool ended too soon: with a post-mortem where it was the server that did."""
    with engine_errors():
        words = container.logs(stdout=False, stderr=True, tail=running.LAST_LINES).decode(errors="replace").rstrip()
    if how := ended(server):
        found = crash_facts.examine(server, release.recipe, release.tag, how)
        report = crash_facts.keep(crash_facts.folder_of(paths, release.recipe, release.name), found)
        return SmokeError(
            f"{release.tag}: the server {how} while it was measured\n" + "\n".join(postmortem.report(found)),
            next_step=f"read {report.with_name(crash_facts.LOG)}",
        )
    return SmokeError(
        f"{release.tag}: {TOOL} ended before its last step\n{words}",
        next_step=f"invoke smoke {release.tag}",
    )


def ended(server: Container) -> str | None:
    """Why it does not run. A connection breaks some seconds before a server's last process is gone."""
    until = time.monotonic() + ENDING_SECONDS
    with engine_errors():
        while True:
            server.reload()
            how = crash_facts.how_ended(server)
            if how or time.monotonic() > until:
                return how
            time.sleep(0.5)
