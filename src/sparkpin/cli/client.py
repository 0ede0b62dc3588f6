"""`invoke client`: the tools of this machine, or the configuration of one for the server that runs."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Literal

from sparkpin.cli.options import ServedRecipe
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, table
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.pins.vllm_command import family_of
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import keys, served
from sparkpin.serve import service as serve
from sparkpin.serve.client_facts import ServerFacts, facts_of
from sparkpin.serve.client_formats import CLIENTS, found_here
from sparkpin.serve.status import service_of
from sparkpin.smoke.replies import Fault

Tool = Literal["", "claude", "cline", "codex", "continue", "litellm", "llm", "open-webui", "openai", "opencode"]


@task("serve")
def client(
    paths: Paths,
    tool: Annotated[Tool, "one of claude, cline, codex, continue, ... (default: list them)", "TOOL"] = "",
    *,
    recipe: ServedRecipe = None,
    url: Annotated[str, "the server's URL for the client, such as http://spark.local:8000 (default: as here)"] = "",
    key_env: Annotated[str, "environment variable that holds the API key at the client (default: none)", "NAME"] = "",
) -> None:
    """Print a configuration for a tool, or list the tools.

    invoke client claude --key-env SPARKPIN_API_KEY
    """
    if not tool:
        return list_tools()
    if key_env and not key_env.isidentifier():
        cause = f"--key-env: got {key_env!r}, expected the name of a variable of the environment"
        raise InputError(cause, next_step="--key-env SPARKPIN_API_KEY: the key itself belongs into no configuration")
    chosen, facts = CLIENTS[tool], facts_of_server(paths, recipe, url=url, key=key_env)
    if chosen.too_long_for(facts):
        say(
            f"warning: a context of {facts.context:,} tokens is too short for {tool}: its own instructions and tools "
            f"take about {chosen.prompt:,}, an answer up to {facts.output:,} (a larger max_model_len in the recipe)"
        )
    if facts.url.startswith("https:"):
        say(f"note: a certificate that no authority signed: its file belongs into {chosen.trust}")
    say(f"note: {f'goes into {chosen.file}; then' if chosen.file else 'lines for a shell'}: {chosen.use}")
    show(chosen.write(facts))


def list_tools() -> None:
    """Those that are found on this machine first."""
    here = found_here()
    names = [*here, *(name for name in CLIENTS if name not in here)]
    rows = [("here" * (name in here), CLIENTS[name].file or "lines for a shell", CLIENTS[name].use) for name in names]
    table(("tool", "found", "file", "then"), [(name, *row) for name, row in zip(names, rows, strict=True)])
    say(f"next: invoke client {here[0] if here else 'TOOL'}")


def facts_of_server(paths: Paths, recipe: str | None, *, url: str = "", key: str = "") -> ServerFacts:
    """Of the running server of `recipe`, or of the only one. InputError where there is none."""
    engine = engine_of(paths)
    container = service_of(paths, engine, recipe)
    service = served.describe(container, served.front_of(engine, container))
    release, file = Releases(paths).get(service.release), keys.path_of(paths, service.recipe)
    if service.key and not key:
        where = f", as after: export SPARKPIN_API_KEY=$(cat {file})" if file.is_file() else ""
        say(f"note: {service.recipe} requires an API key: --key-env SPARKPIN_API_KEY names the variable of it{where}")
    family = None
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:  # which may be nowhere any more
        family = family_of(manifests.load_families(paths.project), manifests.load_recipe(project, release.recipe).model)
    return facts_of(
        release.argv,
        family,
        url=url or service.url,
        label=service.recipe,
        origin=release.tag,
        context=told_context(paths, service, release),
        key=key,
    )


def told_context(paths: Paths, service: served.Served, release: Release) -> int | None:
    """Tokens, from the server's list of models, which knows what `--max-model-len auto` came to; None where it does
    not say."""
    with (
        served.client_of(service, serve.key_of(paths, release, service.host)) as asked,
        contextlib.suppress(Fault, ValueError, KeyError, TypeError),
    ):
        for entry in json.loads(asked.get("/v1/models").body)["data"]:
            if entry["id"] == service.model:
                return int(entry["max_model_len"])
    return None
