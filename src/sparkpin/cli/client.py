"""The task `client`: the tools of this machine; or find what runs or what a recipe says, and print a configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from sparkpin.build.pair import pair
from sparkpin.cli.choose import choose_known
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import EngineError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.schema import Family
from sparkpin.pins.vllm_command import family_of
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import keys, served
from sparkpin.serve import service as serve
from sparkpin.serve.address import Address, endpoint, reachable
from sparkpin.serve.client_facts import ServerFacts, facts_of
from sparkpin.serve.client_formats import CLIENTS, found_here
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


@task("serve")
def client(
    tool: Annotated[
        Literal["", "claude", "cline", "codex", "continue", "litellm", "llm", "open-webui", "openai", "opencode"],
        "claude, cline, codex, continue, litellm, llm, open-webui, openai or opencode (default: list them)",
        "TOOL",
    ] = "",
    *,
    recipe: Annotated[str | None, "recipe whose server is meant (default: the running one, else the stack's)"] = None,
    url: Annotated[
        str, "the server's URL for the client, such as http://spark.local:8000/v1 (default: as on this machine)"
    ] = "",
    key_env: Annotated[str, "environment variable that holds the API key at the client (default: none)", "NAME"] = "",
) -> None:
    """Print a configuration for a tool, or list the tools.

    invoke client claude --key-env SPARKPIN_API_KEY
    """
    if not tool:
        return tools()
    if key_env and not key_env.isidentifier():
        raise InputError(
            f"--key-env: got {key_env!r}, expected the name of a variable of the environment",
            next_step="for example --key-env SPARKPIN_API_KEY: the key itself belongs into no configuration",
        )
    written, chosen = facts(Paths.from_env(), recipe, url=url, key=key_env), CLIENTS[tool]
    if chosen.too_long_for(written):
        terminal.say(
            f"warning: a context of {written.context:,} tokens is too short for {tool}: its own instructions and tools "
            f"take about {chosen.prompt:,}, an answer up to {written.output:,} (a larger max_model_len in the recipe)"
        )
    if written.url.startswith("https:"):
        terminal.say(f"note: a certificate that no authority signed: its file belongs into {chosen.trust}")
    terminal.say(f"note: {f'goes into {chosen.file}; then' if chosen.file else 'lines for a shell'}: {chosen.use}")
    terminal.show(chosen.write(written))


def tools() -> None:
    """Those that are found on this machine first."""
    here = found_here()
    rows = [
        (name, "here" if name in here else "", CLIENTS[name].file or "lines for a shell", CLIENTS[name].use)
        for name in sorted(CLIENTS, key=lambda name: name not in here)
    ]
    terminal.table(("tool", "found", "file", "then"), rows)
    terminal.say(f"next: invoke client {here[0] if here else 'TOOL'}")


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
    """What the recipe says, or the only one with releases, or the default one of this machine's stack."""
    name = choose_known(paths, recipe)
    last = pair(paths.project, name)[-1]
    address = served.kept_address(paths, name) or Address.of_command(last.argv)  # kept by `stop` for the next `serve`
    return FoundServer(
        argv=last.argv,
        family=family_of(manifests.load_families(paths.project), last.recipe.model),
        url=endpoint(reachable(address.host), address.port, tls=bool(address.cert)),
        label=name,
        origin=f"recipes/{name}.yaml",
    )
