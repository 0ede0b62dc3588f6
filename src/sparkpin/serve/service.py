"""A release as a service: one container for each recipe of a home, its port published on this machine only unless the
user says otherwise (docs/serving.md)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins import weight_loaders
from sparkpin.pins.vllm_command import drop_flags, flag_value, served_name
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, keys, launch, memory_limit, waiting
from sparkpin.serve.launch import Health, LaunchOrder
from sparkpin.serve.ports import require_free
from sparkpin.serve.served import (
    COMMAND_LABEL,
    DEFAULT_PORT,
    LABEL,
    RELEASE_LABEL,
    Served,
    describe,
    find,
    is_running,
    name_of,
    services,
)
from sparkpin.serve.status import how_to_serve
from sparkpin.serve.switching import DRAIN_SECONDS, FORMER, NEXT, STOP_SECONDS, launched, replaced, taken_over


def start(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    port: int | None = None,
    host: str | None = None,
    say: Say,
    gpus: bool = False,
    health: Health | None = None,
    beside: bool | None = None,
    drain: float | None = None,
) -> Served:
    """Serve a release and return once it answers a real request. One that already runs at this address is left alone.

    Another release of the home's recipe goes on answering until the new one does, where memory is enough for both; else
    it is stopped first. When the new one does not become ready, the former one answers again, or still.

    Args:
        port, host: on this machine; None takes those of what runs, else the recipe's own port (`--port` of its command,
            else 8000) and 127.0.0.1.
        gpus: give the container all GPUs.
        beside: start it while the former one runs; None: if memory allows.
        drain: seconds to wait for a moment without requests before the former one gives way; None: DRAIN_SECONDS.

    Raises:
        BusyError: someone else has the port; another home's server, too.
        SmokeError: the server did not become ready; with a post-mortem.
        Detached: Ctrl-C while it started; it goes on. (Not beside a former one: that is what goes on then.)
    """
    running.require_readable(checkpoint)
    running.require_here(engine)
    running.require_image(engine, release)
    with files.lock(
        paths.home / "serve" / f".{release.recipe}.lock",
        on_wait=lambda: say(f"waiting for another `invoke serve` of {release.recipe}"),
    ):
        name, drain = name_of(paths, release.recipe), DRAIN_SECONDS if drain is None else drain
        old = tidy(engine, name)
        known = describe(old) if old is not None and is_running(old) else None
        if port is None:
            port = known.port if known else int(flag_value(release.argv, "--port") or DEFAULT_PORT)
        host = host or (known.host if known else "127.0.0.1")
        keys.is_local(host)  # InputError for what is no address
        if known is None or (known.host, known.port) != (host, port):
            require_free(engine, host, port)
        key = key_of(paths, release, host)  # may make one, which a command that is refused is not to leave
        same = (release.tag, host, port, key_label(key))
        if old is not None and known and (known.release, known.host, known.port, known.key) == same:
            if old.labels.get(COMMAND_LABEL) != command_mark(release):
                say(f"{old.name} runs {release.tag} with another command or environment than its record has")
            else:
                return resumed(paths, old, release, checkpoint, health or Health(), say)
        space = memory_limit.room_for(paths, engine, release, checkpoint)
        if space.why:
            say(f"no memory plan ({space.why}): its limit is an estimate")
        wanted = LaunchOrder(
            release=release,
            checkpoint=checkpoint,
            host=host,
            port=port,
            memory=space.limit,
            gpus=gpus,
            labels={
                HOME_LABEL: str(paths.home),
                LABEL: release.recipe,
                RELEASE_LABEL: release.tag,
                COMMAND_LABEL: command_mark(release),
                f"{LABEL}.host": host,
                f"{LABEL}.port": str(port),
                f"{LABEL}.model": served_name(release.argv),
                f"{LABEL}.key": key_label(key),
            },
            timeout=running.ready_timeout(checkpoint),
            key=key,
            health=health or Health(),
        )
        both = known is not None and known.ready and (memory_limit.fits_beside(space) if beside is None else beside)
        with engine_errors():
            if both and old is not None:
                return taken_over(paths, engine, name, old, wanted, drain, say)
            with replaced(engine, name, old, release, drain, say):
                if gpus:
                    memory_limit.drop_page_cache(say)
                    memory_limit.require_room(space, release)
                return launched(paths, engine, name, wanted, say)


def key_of(paths: Paths, release: Release, host: str) -> str | None:
    """The recipe's own key, if it brings one, else the home's for a server that others can reach."""
    own = flag_value(release.argv, "--api-key") or release.env.get("VLLM_API_KEY")
    return own or keys.key_for(paths, release.recipe, host)


def key_label(key: str | None) -> str:
    """Tells one key from another, and of the key no more than that it is the same."""
    return keys.mark(key) if key else ""


def command_mark(release: Release) -> str:
    """Tells one command, environment and image from another; not the loader, which is chosen anew for each start."""
    text = json.dumps([release.image, drop_flags(release.argv, weight_loaders.FLAG), release.env], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tidy(engine: Engine, name: str) -> Container | None:
    """The recipe's container, after what a killed run left between two of them: the one that was there counts."""
    with engine_errors():
        old, former, began = (find(engine, name + end) for end in ("", FORMER, NEXT))
        if old is None and (left := began if former is None else former) is not None:
            left.rename(name)
            old = find(engine, name)
        else:
            left = None
        for container in (former, began):
            if container is not None and container is not left:
                launch.remove(container)
    if old is not None and is_running(old) and not any(old.ports.values()):
        served = describe(old)
        launch.connect(engine, old, served.host, served.port)
        old.reload()
    return old


def resumed(paths: Paths, old: Container, release: Release, checkpoint: Path, health: Health, say: Say) -> Served:
    say(f"{release.tag} already runs as {old.name}")
    if not launch.asks(old)[0]:
        folder = crash_facts.folder_of(paths, release.recipe, release.name)
        waiting.until_ready(old, release, running.ready_timeout(checkpoint), folder, say, fresh=False)
    launch.keep_up(old, health)  # a run that was killed while it waited did not get to it
    old.reload()
    return describe(old)


def stop(paths: Paths, engine: Engine, recipe: str | None, say: Say) -> tuple[str, ...]:
    """Stop and remove the container of a recipe of this home, or all of this home; returns their names.

    InputError for a recipe of which nothing is served.
    """
    with engine_errors():
        every = [container for container in services(engine) if container.labels.get(HOME_LABEL) == str(paths.home)]
        chosen = [c for c in every if recipe in (None, c.labels[LABEL])]
        if recipe is not None and not chosen:
            known = ", ".join(sorted({c.labels[LABEL] for c in every}))
            raise InputError(
                f"no service of recipe {recipe!r} runs",
                next_step=f"choose one of: {known}" if known else f"{how_to_serve(paths, recipe)} (nothing is served)",
            )
        for container in chosen:
            say(f"stopping {container.name}")
            container.stop(timeout=STOP_SECONDS)
            launch.remove(container)
    return tuple(str(container.name) for container in chosen)
