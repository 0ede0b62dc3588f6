"""The task `client`: find what runs or what a recipe says, print a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sparkpin.build.pair import pair
from sparkpin.core import terminal
from sparkpin.core.errors import EngineError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.families import family_of
from sparkpin.pins.schema import Family
from sparkpin.pins.vllm_command import flag_value
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import keys, served
from sparkpin.serve import service as serve
from sparkpin.serve.address import Address
from sparkpin.serve.client_facts import ServerFacts, facts_of
from sparkpin.serve.client_formats import FORMATS
from sparkpin.smoke.replies import Fault


@dataclass(frozen=True)
class FoundServer:
    """A server, or the one that there would be. context: what it says itself; None where it does not run. keyed: it
    wants an API key."""

    argv: tuple[str, ...]
    family: Family | None
    url: str
    label: str
    origin: str
    context: int | None = None
    keyed: bool = False


def client(tool: str, *, recipe: str | None, url: str, key: str) -> None:
    if tool not in FORMATS:
        raise InputError(f"no tool {tool!r}", next_step=f"choose one of: {', '.join(FORMATS)}")
    if key and not key.isidentifier():
        raise InputError(
            f"--key-env: saw {key!r}, wanted the name of a variable of the environment",
            next_step="for example --key-env SPARKPIN_API_KEY: the key itself belongs into no configuration",
        )
    paths = Paths.from_env()
    terminal.show(FORMATS[tool](facts(paths, recipe, url=url, key=key)))


def facts(paths: Paths, recipe: str | None, *, url: str = "", key: str = "") -> ServerFacts:
    found = running(paths, recipe) or written(paths, recipe)
    if found.context is None:
        start = machine.serve_command(paths.project, found.label)
        terminal.say(f"note: {found.label} does not run; this is what its recipe says ({start} starts it)")
    if found.keyed and not key:
        file = keys.path_of(paths, found.label)
        where = f", as after: export SPARKPIN_API_KEY=$(cat {file})" if file.is_file() else ""
        terminal.say(
            f"note: {found.label} wants an API key: --key-env SPARKPIN_API_KEY names the variable that has it{where}"
        )
    return facts_of(
        found.argv,
        found.family,
        url=url or found.url,
        label=found.label,
        origin=found.origin,
        context=found.context,
        key=key,
    )


def running(paths: Paths, recipe: str | None) -> FoundServer | None:
    """The service of this home that answers; of `recipe`, or the only one. None where there is none, or no engine."""
    try:
        engine = Engine.connect()
    except EngineError:
        return None
    here = [s for s in served.status(engine) if s.home == str(paths.home) and s.ready and recipe in (None, s.recipe)]
    if len(here) > 1:
        names = ", ".join(service.recipe for service in here)
        raise InputError(f"{len(here)} recipes are served", next_step=f"--recipe, one of: {names}")
    if not here or (release := Releases(paths).find(here[0].release)) is None:
        return None
    service = here[0]
    return FoundServer(
        argv=release.argv,
        family=family_of_release(paths, release),
        url=service.url,
        label=service.recipe,
        origin=release.tag,
        context=told_context(paths, service, release),
        keyed=bool(service.key),
    )


def family_of_release(paths: Paths, release: Release) -> Family | None:
    """By the model of the recipe as it was then; None where that is nowhere any more."""
    try:
        with project_of(paths, release) as project:
            model = manifests.load_recipe(project, release.recipe).model
    except SparkpinError:
        return None
    return family_of(manifests.load_families(paths.project), model)


def told_context(paths: Paths, service: served.Served, release: Release) -> int | None:
    """Tokens, from the server's list of models: it knows what `--max-model-len auto` came to."""
    with served.client_of(service, serve.key_of(paths, release, service.host)) as asked:
        try:
            reply = asked.get("/v1/models")
            entries = json.loads(reply.body)["data"]
            return next(int(entry["max_model_len"]) for entry in entries if entry["id"] == service.model)
        except (Fault, ValueError, KeyError, TypeError, StopIteration):
            raise InputError(
                f"{service.url} answers, and its list of models has no length for {service.model}",
                next_step=f"invoke smoke {release.tag}",
            ) from None


def written(paths: Paths, recipe: str | None) -> FoundServer:
    """What the recipe, or the default one of this machine's stack, says."""
    name = recipe or machine.default_recipe(paths.project)
    last = pair(paths.project, name)[-1]
    return FoundServer(
        argv=last.argv,
        family=family_of(manifests.load_families(paths.project), last.recipe.model),
        url=f"http://{reached(last.argv)}:{flag_value(last.argv, '--port') or Address.port}/v1",
        label=name,
        origin=f"recipes/{name}.yaml",
    )


def reached(argv: Sequence[str]) -> str:
    return served.reachable(flag_value(argv, "--host") or "127.0.0.1")
