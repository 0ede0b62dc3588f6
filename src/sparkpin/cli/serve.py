"""`invoke serve`, `stop` and `client`: a release answers, and tools are told how to reach it."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Literal

from sparkpin.build.make import checkpoint_of
from sparkpin.cli.notes import require_runnable
from sparkpin.cli.tasks import KnownRecipe, Link, Machines, ServedRecipe, SharedLink, task
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_file, table
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.pins.vllm_command import family_of
from sparkpin.releases.current import current_of
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import clients, cluster, served, service
from sparkpin.serve.address import UNCHANGED, Address, AddressOptions, key_of, key_path, signs_itself
from sparkpin.serve.clients import ServerFacts, facts_of, found_here
from sparkpin.serve.cluster import ClusterOptions
from sparkpin.serve.status import service_of
from sparkpin.serve.switching import DRAIN_SECONDS, Detached
from sparkpin.serve.unit import show_unit
from sparkpin.smoke.client import Fault
from sparkpin.smoke.server import clear_leftovers

GUARD = "sparkpin_guard.Guard"  # --middleware of our stacks (mods/guard)


@task("serve")
def serve(
    paths: Paths,
    tag: Annotated[str | None, "release to serve (default: the recipe's current one)"] = None,
    *,
    recipe: KnownRecipe = None,
    port: Annotated[int | None, "port on this machine (default: the last one used, or the recipe's)"] = None,
    host: Annotated[str | None, "address (default: the last, or 127.0.0.1; others require a key)"] = None,
    tls_cert: Annotated[str | None, "PEM file of a TLS certificate (default: the last one; none: HTTP)", "FILE"] = None,
    tls_key: Annotated[str | None, "PEM file of the certificate's key", "FILE"] = None,
    allow: Annotated[
        str | None, "also open these paths of vLLM, such as /score,/v1/embeddings (default: the last)"
    ] = None,
    limit: Annotated[str | None, "other limits, such as requests=64,restarts=3 (default: the last)"] = None,
    nodes: Machines = None,
    link: Link = None,
    shared_link: SharedLink = False,
    drain: Annotated[int, "seconds that requests get to finish before it is replaced (default: 30)"] = DRAIN_SECONDS,
    unit: Annotated[bool, "print a systemd unit that serves it after a reboot; serve nothing now"] = False,
) -> None:
    """Serve a release, replacing the recipe's running server.

    invoke serve v2 --port 8001
    invoke serve --host 0.0.0.0 --tls-cert spark.pem --tls-key spark.key
    """
    options = AddressOptions(port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, allow=allow, limit=limit)
    where = ClusterOptions(nodes, link, shared_link)
    options.applied(Address())  # a wrong one is told before the state of any release
    if unit:
        if tag or drain != DRAIN_SECONDS or where != ClusterOptions() or options != UNCHANGED:
            cause = "--unit goes with --recipe alone: it serves what is current then, where and as it was served last"
            raise InputError(cause, next_step="first invoke promote TAG, or invoke serve with what is to be kept")
        show_unit(paths, current_of(paths, recipe).recipe)
        return
    chosen, engine = Releases(paths).get(tag, recipe) if tag else current_of(paths, recipe), engine_of(paths)
    require_runnable(paths, engine, chosen, to_serve=True)
    clear_leftovers(paths, engine)  # a killed smoke test's server has the memory that this one needs
    warn_unguarded(chosen)
    checkpoint = checkpoint_of(paths, chosen)
    try:
        now = service.start(paths, engine, chosen, checkpoint, options=options, drain=drain, where=where)
    except Detached as detached:
        show(f"detached: {detached}\nnext: invoke status, invoke logs --follow")
        return
    context = context_of(paths, now)
    show("\n".join(clients.how_to_ask(paths, now, context, scripted=chosen.demands.scripted)))


def warn_unguarded(release: Release) -> None:
    if not any(GUARD in word for word in release.argv):
        say(
            f"warning: {release.tag} has no --middleware {GUARD}: a client's request may end its engine, or stall it "
            "for all (mods/guard/README.md; a stack's flags have it)"
        )


@task("serve")
def stop(
    paths: Paths, *, recipe: Annotated[str | None, "recipe whose server to stop (default: all servers)"] = None
) -> None:
    """Stop what `serve` started.

    invoke stop --recipe smollm2
    """
    engine = engine_of(paths)
    urls = {url for one in served.recorded(paths.home, recipe).values() for url in one.urls}
    with cluster.reached(sorted(urls)) as (machines, _):
        clear_leftovers(paths, engine, [machine.engine for machine in machines])
    stopped = service.stop(paths, engine, recipe)
    show("\n".join(f"stopped {name}" for name in stopped) or "nothing is served")


Tool = Literal["", "claude", "cline", "codex", "continue", "litellm", "llm", "open-webui", "openai", "opencode"]


@task("serve")
def client(
    paths: Paths,
    tool: Annotated[Tool, "one of claude, cline, codex, continue, ... (default: list them)", "TOOL"] = "",
    *,
    recipe: ServedRecipe = None,
    url: Annotated[str, "the server's URL for the client, such as http://spark.local:8000 (default: as here)"] = "",
    key_env: Annotated[str, "variable that holds the API key at the client (default: SPARKPIN_API_KEY)", "NAME"] = "",
) -> None:
    """Print a configuration for a tool, or list the tools.

    invoke client claude --key-env SPARKPIN_API_KEY
    """
    if not tool:
        return list_tools()
    if key_env and not key_env.isidentifier():
        cause = f"--key-env: got {key_env!r}, expected the name of a variable of the environment"
        raise InputError(cause, next_step="--key-env SPARKPIN_API_KEY: the key itself belongs into no configuration")
    chosen = clients.clients()[tool]
    facts = facts_of_server(paths, recipe, url=url, key=key_env, in_file=bool(chosen.file))
    if chosen.prompt + facts.output > facts.context:  # vLLM refuses a request whose two do not fit together
        say(
            f"warning: a context of {facts.context:,} tokens is too short for {tool}: its own instructions and tools "
            f"take about {chosen.prompt:,}, an answer up to {facts.output:,} (a larger max_model_len in the recipe)"
        )
    if facts.url.startswith("https:"):
        say(f"note: a certificate that no authority signed: its file belongs into {chosen.trust}")
    say(f"note: {f'goes into {chosen.file}; then' if chosen.file else 'lines for a shell'}: {chosen.use}")
    show_file(chosen.write(facts))


def list_tools() -> None:
    """Those that are found on this machine first."""
    here = found_here()
    rows = [
        (name, "here" * (name in here), one.file or "lines for a shell", one.use)
        for name, one in clients.clients().items()
    ]
    table(("tool", "found", "file", "then"), sorted(rows, key=lambda row: not row[1]))
    say(f"next: invoke client {here[0] if here else 'TOOL'}")


def facts_of_server(
    paths: Paths, recipe: str | None, *, url: str = "", key: str = "", in_file: bool = True
) -> ServerFacts:
    """Of the running server of `recipe`, or of the only one. InputError where there is none.

    url, key: for another machine; in_file: for a file, which can name a variable alone, and no file of the key."""
    engine = engine_of(paths)
    found = served.describe(engine, service_of(paths, engine, recipe))
    release, file, key_file = Releases(paths).get(found.release), key_path(paths, found.recipe), ""
    if not (found.address.is_local or key):
        if url or in_file:
            key = "SPARKPIN_API_KEY"
            say(f"note: {found.recipe} requires an API key: export {key}=$(cat {file}) (--key-env names another)")
        else:
            key_file = str(file)
    family = None
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:  # which may be nowhere any more
        recipe_of = manifests.load_recipe(project, release.recipe)
        family = family_of(manifests.load_families(paths.project), recipe_of.model, recipe_of.family)
    return facts_of(
        release.argv,
        family,
        url=url or found.url,
        label=found.recipe,
        origin=release.tag,
        context=context_of(paths, found),
        key=key,
        key_file=key_file,
        cert=found.address.cert if not url and signs_itself(found.address.cert) else "",
    )


def context_of(paths: Paths, found: served.Served) -> int | None:
    """Tokens, from the server's list of models, which knows what `--max-model-len auto` came to; None where it does
    not say."""
    with (
        served.client_of(found, key_of(paths, found.recipe, found.address)) as asked,
        contextlib.suppress(Fault, ValueError, KeyError, TypeError),
    ):
        for entry in json.loads(asked.get("/v1/models").body)["data"]:
            if entry["id"] == found.model:
                return int(entry["max_model_len"])
    return None
