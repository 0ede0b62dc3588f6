"""The tasks, in the groups and the order in which `invoke` and `sparkpin` list them.

A task's signature is its line: what stands before `*` is positional, what follows are options, and each has its help
beside it (sparkpin.commands.command_line). Its body hands over to a file of sparkpin.commands.
"""

from __future__ import annotations

from typing import Annotated, Literal

from invoke.context import Context
from invoke.exceptions import Exit

from sparkpin import commands
from sparkpin.commands.command_line import take_over, task
from sparkpin.core.paths import project_folder
from sparkpin.serve.address import AddressOptions

Recipe = Annotated[str | None, "recipe of recipes/ (default: the one of the stack)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's)"]
Stack = Annotated[str | None, "stack of pins/stacks/ (default: the one for this machine)"]
Json = Annotated[bool, "machine-readable"]
Drain = Annotated[
    int | None, "seconds to wait for requests under way before another server takes the port (default: 30)", 60
]
Published = Annotated[bool, "from the shapes that are published of the model, before it is locked: no Hub is asked"]
Link = Annotated[str | None, "interface, address or network between them (default: as before, else the only one)"]
SharedLink = Annotated[bool, "take the link though others are on it"]
Trust = Annotated[bool, "build an imported release, too: its steps run as root"]
Authority = Annotated[str, "PEM file of the registry's own certificate authority"]
Signed = Annotated[bool, "what is not signed by somebody whom allowed_signers names is wrong"]


@task("serve")
def up(
    c: Context,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    no_smoke: Annotated[bool, "build only"] = False,
    serve: Annotated[bool, "serve the last stage as soon as its smoke test passed; the others come after it"] = False,
    yes: Annotated[bool, "fetch the model's files without a question"] = False,
    from_: Annotated[str, "take what is published there and signed, and build the rest", "oci://HOST/NAME"] = "",
    ca: Authority = "",
    dry_run: Annotated[bool, "say it only"] = False,
) -> None:
    """The main job: lock, fetch, build, checkpoint and smoke."""
    commands.up.up(recipe=recipe, stage=stage, stack=stack, smoke=not no_smoke, dry_run=dry_run, yes=yes, serve=serve,
                   published=(from_, ca))  # fmt: skip


@task("serve")
def serve(
    c: Context,
    tag: Annotated[str | None, "release to serve (default: the current one of the recipe)"] = None,
    *,
    recipe: Recipe = None,
    stack: Stack = None,
    port: Annotated[int | None, "port on this machine (default: as before, else the recipe's)", 8001] = None,
    host: Annotated[
        str | None, "address to listen on (default: as before, else 127.0.0.1); a wider one wants an API key of clients"
    ] = None,
    tls_cert: Annotated[str | None, "PEM file of a certificate (default: as before; `none`: plain HTTP)"] = None,
    tls_key: Annotated[str | None, "PEM file of its key"] = None,
    allow: Annotated[
        str | None, "further paths of vLLM that clients may ask (default: as before; `none`)", "/v1/embeddings,/score"
    ] = None,
    limit: Annotated[
        str | None,
        "limits of docs/serving.md that are to be others (default: as before; `none`)",
        "requests=64,restarts=3",
    ] = None,
    nodes: Annotated[
        str | None, "machines of a release that is for several (default: as before)", "here,ssh://me@spark2"
    ] = None,
    link: Link = None,
    shared_link: SharedLink = False,
    drain: Drain = None,
    unit: Annotated[bool, "print a systemd unit that does this after a reboot, and serve nothing now"] = False,
) -> None:
    """Serve a release, in the place of what is served of its recipe."""
    options = AddressOptions(port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, allow=allow, limit=limit)
    commands.serve.serve(
        recipe=recipe,
        release=tag,
        stack=stack,
        options=options,
        drain=drain,
        unit=unit,
        where=(nodes, link, shared_link),
    )


@task("serve")
def status(
    c: Context,
    *,
    json: Json = False,
    env: Annotated[bool, 'print OPENAI_BASE_URL and the key for a shell: eval "$(invoke status --env)"'] = False,
    recipe: Annotated[str | None, "with --env: whose server (default: the one that runs)"] = None,
    watch: Annotated[int | None, "again each so many seconds, until Ctrl-C", 2] = None,
) -> None:
    """Say what is served, how it is, and why it died."""
    commands.status.status(as_json=json, env=env, recipe=recipe, watch=watch)


@task("serve")
def logs(
    c: Context,
    *,
    recipe: Annotated[str | None, "whose server (default: the one that runs)"] = None,
    lines: Annotated[int, "how many of the last (default: 100)"] = 100,
    follow: Annotated[bool, "go on as they come"] = False,
) -> None:
    """Print what a server has written, health checks left out."""
    commands.status.logs(recipe=recipe, lines=lines, follow=follow)


@task("serve")
def stop(
    c: Context, *, recipe: Annotated[str | None, "whose server (default: each that runs of this home)"] = None
) -> None:
    """Stop what `serve` started."""
    commands.serve.stop(recipe=recipe)


@task("serve")
def client(
    c: Context,
    tool: Annotated[
        Literal["", "claude", "cline", "codex", "continue", "litellm", "llm", "open-webui", "openai", "opencode"],
        "claude, cline, codex, continue, litellm, llm, open-webui, openai or opencode (default: list them)",
    ] = "",
    *,
    recipe: Annotated[str | None, "whose server (default: the one that runs, else that of the stack)"] = None,
    url: Annotated[
        str, "how the client reaches it, such as http://spark.local:8000/v1 (default: as this machine does)"
    ] = "",
    key_env: Annotated[
        str, "variable of the client's environment with the API key (default: no key is asked for)"
    ] = "",
) -> None:
    """Print a configuration for a tool, or list the tools."""
    commands.client.client(tool, recipe=recipe, url=url, key=key_env)


@task("releases", "ls")
def images(c: Context, *, json: Json = False) -> None:
    """List the releases with their images; `ls` for short."""
    commands.releases.images(as_json=json)


@task("releases")
def promote(
    c: Context,
    tag: Annotated[str, "release that passed its smoke test"],
    *,
    recipe: Recipe = None,
    accept_loss: Annotated[str, "why it may lose more than its stage allows; kept with the release"] = "",
    deep: Annotated[bool, "hash all of its checkpoint, not only small files and those with another time"] = False,
) -> None:
    """Make a release the current one of its recipe."""
    commands.releases.promote(tag, recipe=recipe, accept_loss=accept_loss, deep=deep)


@task("releases")
def rollback(
    c: Context,
    *,
    recipe: Recipe = None,
    to: Annotated[str, "release that was current before, to go back to at once (default: the one current last)"] = "",
    serve: Annotated[bool, "serve it, too; where it does not become ready, nothing has changed"] = False,
    drain: Drain = None,
    dry_run: Annotated[bool, "say where it goes and what differs, and change nothing"] = False,
) -> None:
    """Back to what was current before; once more: one further back."""
    commands.releases.rollback(recipe=recipe, to=to, serve_it=serve, drain=drain, dry_run=dry_run)


@task("releases")
def keep(
    c: Context,
    tag: Annotated[str, "release to keep"],
    *,
    note: Annotated[str, "why, in one line"] = "",
    remove: Annotated[bool, "no longer: `prune` may remove it again"] = False,
) -> None:
    """Keep a release, whatever `prune` is told."""
    commands.releases.keep(tag, note=note, remove=remove)


@task("releases")
def prune(
    c: Context,
    *,
    keep: Annotated[
        int,
        "releases to keep of each recipe (default: 5): the current one, the one to roll back to, those that passed, "
        "the others; newest first. What is current, was current last before, passed last, is kept by `keep` or in use "
        "stays even beyond that",
    ] = 5,
    dry_run: Annotated[bool, "say what would go, what stays and why, and the bytes that it would free"] = False,
    store: Annotated[bool, "remove fetched files, too, that no lock and no remaining release needs"] = False,
    build_cache: Annotated[
        bool, "clear the engine's build cache, too, of everybody's builds: the engine does not tell whose it is"
    ] = False,
) -> None:
    """Remove old releases and say what that freed."""
    commands.prune.prune(keep=keep, dry_run=dry_run, store=store, build_cache=build_cache)


@task("releases")
def diff(
    c: Context,
    before: Annotated[str, "tag of a release, or . for the working tree"],
    after: Annotated[str, "another tag, or ."],
    *,
    files: Annotated[bool, "every path of the images that differs"] = False,
    json: Json = False,
    exit_code: Annotated[bool, "end with 1 when they differ"] = False,
) -> None:
    """Say what changed between two releases."""
    if commands.history.diff(before, after, all_files=files, as_json=json) and exit_code:
        raise Exit(code=1)


@task("releases")
def report(
    c: Context,
    *,
    recipe: Annotated[str | None, "releases of this recipe only (default: every recipe's)"] = None,
    out: Annotated[
        str, "file to write (default: report.html or report-RECIPE.html in SPARKPIN_HOME; --markdown prints)"
    ] = "",
    open: Annotated[bool, "serve the page on 127.0.0.1 instead, until Ctrl-C"] = False,
    port: Annotated[int, "for --open (default: any that is free)", 8088] = 0,
    markdown: Annotated[bool, "a table for a forum post instead"] = False,
) -> None:
    """Write the releases with their evidence as one HTML page."""
    commands.report.report(recipe=recipe, out=out, serve=open, port=port, as_markdown=markdown)


@task("measure")
def smoke(
    c: Context,
    tag: Annotated[str | None, "release to smoke (default: each that is built and not yet smoked)"] = None,
    *,
    stage: Annotated[str | None, "smoke the newest release of this stage"] = None,
    recipe: Annotated[
        str | None, "smoke the releases of this recipe only (default: every recipe; with --stage the stack's own)"
    ] = None,
    load: Annotated[
        bool,
        "what this machine cannot serve and so inspects: load its libraries and plugins, too, emulated where that "
        "must be (up to 15 minutes a release)",
    ] = False,
    kernels: Annotated[
        bool, "without a server: compare the GPU kernels of one release with their specification, and print the table"
    ] = False,
    nodes: Annotated[
        str | None,
        "machines of a release that is for several (default: this one, else as before)",
        "here,ssh://me@spark2",
    ] = None,
    link: Link = None,
    shared_link: SharedLink = False,
) -> None:
    """Start each new image with a real server and check its answers."""
    if kernels:
        commands.smoke.compare_kernels(tag=tag, stage=stage, recipe=recipe)
        return
    commands.smoke.smoke(tag=tag, stage=stage, recipe=recipe, load=load, where=(nodes, link, shared_link))


@task("measure")
def bench(
    c: Context,
    tag: Annotated[
        str | None, "release to measure (default: what is served of the recipe, else its current release)"
    ] = None,
    *,
    recipe: Recipe = None,
    compare: Annotated[str, "measure A and TAG in turns: --compare A TAG"] = "",
    rounds: Annotated[int | None, "of a comparison, a turn of each (default: 4)", 4] = None,
    only: Annotated[
        Literal["", "prompts", "sweep"], "the five prompts, or more users at a time and longer prompts (default: both)"
    ] = "",
    quick: Annotated[bool, "short answers and few cells: whether it works at all"] = False,
    full: Annotated[bool, "the cells with many long prompts at a time, too"] = False,
    bandwidth: Annotated[
        str, "of the memory in GB/s, for the ceiling (default: a DGX Spark's 273 on one, else no ceiling)"
    ] = "",
    resume: Annotated[bool, "go on with a run that was broken off"] = False,
    dry_run: Annotated[bool, "print the plan and about how long it takes"] = False,
    json: Json = False,
) -> None:
    """Measure how fast a release is, or two in turns."""
    asked = commands.bench.BenchOptions(
        quick=quick, full=full, only=only, bandwidth=bandwidth, dry_run=dry_run, as_json=json
    )
    if compare or rounds is not None:
        commands.bench.run_compare(compare, tag or "", asked=asked, rounds=rounds)
    else:
        commands.bench.run(recipe=recipe, tag=tag, asked=asked, resume=resume)


@task("measure")
def quality(
    c: Context,
    tag: Annotated[str | None, "release to measure (default: the newest that passed, of a stage with a parent)"] = None,
    *,
    recipe: Recipe = None,
    against: Annotated[
        str | None, "tag or stage to compare it with (default: its parent stage, which `promote` goes by)"
    ] = None,
    quick: Annotated[bool, "two texts of each kind, fewer questions: says less, and sooner"] = False,
    tasks: Annotated[
        str, "tasks of lm-eval to run as well, such as arc_easy,gsm8k (sparkpin_choices needs no data)"
    ] = "",
    limit: Annotated[int, "questions of each of these tasks (default: all)", 100] = 0,
    hours: Annotated[int, "that these tasks may take for each release (default: 12)"] = 12,
    chat: Annotated[bool, "ask these tasks as chats; those that compare log-probabilities cannot be"] = False,
    limits: Annotated[
        bool, "show what was measured of the recipe's releases beside their stages' limits; measure nothing"
    ] = False,
    fetch: Annotated[bool, "install lm-eval and fetch the tasks' data first (network)"] = False,
    json: Json = False,
) -> None:
    """Measure what a release lost against another."""
    from sparkpin.measure.quality.standard import wanted_of

    if limits:
        commands.quality.limits(recipe=recipe, as_json=json)
        return
    wanted = wanted_of(tasks, limit=limit, chat=chat, fetch=fetch)
    commands.quality.quality(
        recipe=recipe, release=tag, against=against, quick=quick, wanted=wanted, fetch=fetch, hours=hours, as_json=json
    )


@task("measure")
def prove(
    c: Context,
    what: Annotated[
        str | None, "tag of a release, or URL of an OpenAI endpoint (default: the recipe's current release)"
    ] = None,
    *,
    recipe: Recipe = None,
    model: Annotated[str, "name of the model at a URL (default: the first that it lists)"] = "",
    key_env: Annotated[str, "variable with the API key of a URL (default: on this machine OPENAI_API_KEY)"] = "",
    sessions: Annotated[int, "how many, all with one beginning (default: 4)"] = 4,
    turns: Annotated[int, "of each (default: 3)"] = 3,
    seed: Annotated[int, "of the texts (default: 1)"] = 1,
    replay: Annotated[str, "send the session of a file that an earlier run wrote, and say whether it differs"] = "",
    resume: Annotated[bool, "go on with a run that was broken off"] = False,
    json: Json = False,
) -> None:
    """Hunt for answers that a cache, company or drafts change."""
    asked = commands.prove.ProveOptions(
        model=model,
        key=key_env,
        seed=seed,
        sessions=sessions,
        turns=turns,
        replay=replay,
        resume=resume,
        as_json=json,
    )
    commands.prove.prove(what, recipe=recipe, asked=asked)


@task("measure")
def roofline(
    c: Context,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    published: Annotated[
        bool,
        "with --recipe: from the shapes that are published of its model, before it is locked; without: every stage of "
        "the published chain of the 122B",
    ] = False,
    bandwidth: Annotated[str, "of the memory in GB/s (default: 273, a DGX Spark's)"] = "273",
    context: Annotated[int, "tokens in the cache (default: 1000)", 32768] = 1000,
    users: Annotated[int, "at once, each with that many tokens (default: 1)", 8] = 1,
    accepted: Annotated[
        str, "share of the drafted tokens that the model accepts (default: as measured, else as published)"
    ] = "",
    measured: Annotated[str, "tokens a second, to say what fraction of the ceiling they are"] = "",
    nodes: Annotated[int | None, "as if the recipe were for so many machines, tensor-parallel", 2] = None,
    link_latency: Annotated[str, "of an all-reduce between machines, in microseconds (default: 55)"] = "55",
    link_bandwidth: Annotated[str, "between machines in GB/s (default: 12.25, half a Spark's port)"] = "12.25",
    json: Json = False,
) -> None:
    """Say how fast decode can be at most, and how much to draft."""
    asked = commands.roofline.asked(
        bandwidth=bandwidth,
        context=context,
        accepted=accepted,
        link_latency=link_latency,
        link_bandwidth=link_bandwidth,
        users=users,
    )
    run = commands.roofline.published if published else commands.roofline.roofline
    run(asked, recipe=recipe, stage=stage, measured=measured, as_json=json, nodes=nodes)


@task("measure")
def plan(
    c: Context,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    stack: Stack = None,
    memory: Annotated[
        str, "of the machine to plan for, such as 128GB (default: this one's; a Spark's for a stack for it)"
    ] = "",
    free: Annotated[str, "of which so much is free"] = "",
    nodes: Annotated[int | None, "as if the recipe were for so many machines, tensor-parallel", 2] = None,
    published: Published = False,
    json: Json = False,
    exit_code: Annotated[bool, "end with 1 when it does not fit"] = False,
) -> None:
    """Say what memory a recipe will need, and how many users fit."""
    from sparkpin.serve.memory import recipe as tasks

    commands.notes.say_memory_issues(recipe, stage, stack)
    fits = tasks.plan(
        recipe=recipe,
        stage=stage,
        stack=stack,
        memory=memory,
        free=free,
        as_json=json,
        published=published,
        nodes=nodes,
    )
    if exit_code and not fits:
        raise Exit(code=1)


@task("measure")
def bisect(
    c: Context,
    *,
    good: Annotated[str, "release whose check is good"],
    bad: Annotated[str, "release whose check is bad"],
    check: Annotated[str, "command of a shell (docs/bisect.md): 0 is good, 125 cannot be told, any other bad"],
    serve: Annotated[bool, "start a server for each trial: its address is SPARKPIN_ENDPOINT"] = False,
    unstarted_is_bad: Annotated[bool, "with --serve: a server that does not start is bad, not unresolved"] = False,
    limit: Annotated[int, "seconds that the check may take (default: 1800)"] = 1800,
    dry_run: Annotated[bool, "show what would be built and tested, and do nothing"] = False,
) -> None:
    """Find the change between two releases that turns a check."""
    commands.bisect.bisect(
        good=good, bad=bad, check=check, serve=serve, unstarted_is_bad=unstarted_is_bad, limit=limit, dry_run=dry_run
    )


@task("measure")
def bump(
    c: Context,
    *,
    stack: Stack = None,
    what: Annotated[
        Literal["all", "vllm", "python", "debian", "model"], "of what: vllm, python, debian or model (default: all)"
    ] = "all",
    to: Annotated[
        str, "a version that the stack is to pin, such as vllm==0.34.0; --apply writes it into its file"
    ] = "",
    recipe: Recipe = None,
    apply: Annotated[bool, "where the verdict is `promote`: promote it, and write the lock"] = False,
    quick: Annotated[bool, "fewer texts, questions and cells: sooner, and less sure"] = False,
    hold: Annotated[int, "days that a wheel must have been offered for (default: 7; 0: take all)"] = 7,
    busy: Annotated[bool, "promote though the recipe's server answers requests"] = False,
    schedule: Annotated[
        Literal["", "systemd", "github"], "print a timer and its service, or a workflow, and try nothing now"
    ] = "",
) -> None:
    """Try newer versions against the current release, on the side."""
    commands.bump.bump(
        stack=stack,
        what=what,
        recipe=recipe,
        apply=apply,
        quick=quick,
        hold=hold,
        busy=busy,
        to=to,
        plan_for_later=schedule,
    )


@task("build")
def build(
    c: Context,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    offline: Annotated[bool, "fetch nothing: what is missing is an error"] = False,
) -> None:
    """Build, seal and tag the images of a recipe up to a stage."""
    commands.up.build(recipe=recipe, stage=stage, stack=stack, offline=offline)


@task("build")
def rebuild(
    c: Context, tag: Annotated[str, "release whose image or checkpoint is gone"], *, trust: Trust = False
) -> None:
    """Make a release's images and checkpoint again from its record."""
    commands.build.rebuild(tag, trusted=trust)


@task("build")
def checkpoint(
    c: Context,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    model: Annotated[
        str | None, "a model of pins/models/, without a recipe (default stage: all that its pin allows)"
    ] = None,
    dry_run: Annotated[bool, "print the plan, which only reads headers"] = False,
    verify: Annotated[bool, "compare all bytes of a checkpoint that is there with its sources"] = False,
    deep: Annotated[bool, "hash the base again, though it is the same files that were right before"] = False,
    published: Published = False,
) -> None:
    """Make the checkpoint of a stage from the pinned repositories."""
    commands.checkpoint.checkpoint(
        recipe=recipe,
        model=model,
        stage=stage,
        stack=stack,
        dry_run=dry_run,
        verify=verify,
        deep=deep,
        published=published,
    )


@task("build")
def render(
    c: Context, *, stage: Stage = None, recipe: Recipe = None, stack: Stack = None, published: Published = False
) -> None:
    """Print the Dockerfile of a stage and what its build sees."""
    commands.build.show_rendered(recipe=recipe, stage=stage, stack=stack, published=published)


@task("inputs")
def lock(
    c: Context,
    *,
    stack: Annotated[str | None, "lock this stack only"] = None,
    model: Annotated[str | None, "lock this model only"] = None,
    mod: Annotated[str | None, "bring this community mod of pins/community here, and lock it"] = None,
    keep_layers: Annotated[
        bool, "keep the former layers, put the wheels that changed on top: costs only their disk"
    ] = False,
    digests: Annotated[bool, "resolve nothing: build what the locks give, write its digests to pins/digests"] = False,
) -> None:
    """Resolve the pins and write their locks (network)."""
    commands.lock.lock(stack=stack, model=model, mod=mod, keep_layers=keep_layers, digests=digests)


@task("inputs")
def fetch(c: Context, *, recipe: Recipe = None, stack: Stack = None) -> None:
    """Fetch and verify everything that the locks name (network)."""
    commands.lock.fetch(recipe=recipe, stack=stack)


@task("inputs")
def recipe(
    c: Context,
    action: Annotated[
        Literal["list", "check", "show", "import", "export"],
        "list: those of recipes/; check: find mistakes; show: the command and environment that would run, with where "
        "each word is from; import: take a recipe of spark-vllm-docker or sparkrun over; export: write one for them, "
        "with our image",
    ],
    what: Annotated[
        tuple[str, ...],
        "check: files, folders, globs or names of recipes/, all of these when left out; show: a file or a name; "
        "import: a file; export: a name, and a release (default: what the working tree would build); list: none",
    ] = (),
    *,
    name: Annotated[str, "import: name of the new recipe (default: the file's)"] = "",
    stack: Annotated[
        str | None, "import, check and show of a file: stack of pins/stacks/ (default: its container's)"
    ] = None,
    stage: Annotated[str | None, "show, import, export: stage of stages/ (default: base; the recipe's)"] = None,
    no_lock: Annotated[bool, "import: ask no Hub for the model's commit"] = False,
    dry_run: Annotated[bool, "import: say it only"] = False,
    json: Annotated[bool, "check, show: machine-readable"] = False,
    format: Annotated[Literal["v1", "v2"], "export: for spark-vllm-docker or for sparkrun (default: v1)"] = "v1",
    output: Annotated[str, "export: file to write (default: print it)"] = "",
) -> None:
    """List, check, show, import and export recipes."""
    if not commands.recipe.recipe(action, what, name=name, stack=stack, stage=stage, lock=not no_lock,
                                  dry_run=dry_run, as_json=json, form=format, output=output):  # fmt: skip
        raise Exit(code=4)


@task("prove and carry")
def verify(
    c: Context,
    subject: Annotated[str, "tag of a release, the file of a bundle, or .venv: the packages of sparkpin itself"],
    *,
    deep: Annotated[bool, "read and hash every layer and fetched file, too"] = False,
    require_signature: Signed = False,
) -> None:
    """Check a release, a bundle, or the packages of .venv."""
    commands.evidence.verify(subject, deep=deep, require_signature=require_signature)


@task("prove and carry")
def attest(
    c: Context,
    tag: Annotated[str, "release whose SBOM, statement and signature to make anew"],
    *,
    builder: Annotated[
        str | None, "instead: sign, under this name in pins/digests/builders, that these bytes were built here"
    ] = None,
) -> None:
    """Make SBOM, statement and signature of a release anew."""
    commands.evidence.attest(tag, builder=builder)


@task("prove and carry")
def reproduce(
    c: Context,
    tag: Annotated[str | None, "release to build again (default: the newest of --stage)"] = None,
    *,
    stage: Annotated[str | None, "the newest release of this stage (default: the recipe's)"] = None,
    recipe: Recipe = None,
    commit: Annotated[
        str | None, "instead: what this earlier commit of the project gives, by its own code, pins and mods"
    ] = None,
    trust: Trust = False,
) -> None:
    """Build a release again from its record, and compare."""
    commands.build.reproduce(tag=tag, stage=stage, recipe=recipe, trusted=trust, commit=commit)


@task("prove and carry")
def inspect(
    c: Context,
    tag: Annotated[str, "release, another image of the engine, or a folder with a root file system"],
    *,
    sm: Annotated[str, "GPU that it has to run on: 121, 12.1 or sm_121 (default: the one of the image's stack)"] = "",
    platform: Annotated[str, "linux/arm64 or linux/amd64 (default: the image's)"] = "",
    all: Annotated[bool, "each library with GPU code, and what it holds; each lack that is allowed, and why"] = False,
    json: Json = False,
) -> None:
    """Say what of an image would fail on a GPU, without one."""
    commands.inspect.inspect(tag, sm=sm, platform=platform, everything=all, as_json=json)


@task("prove and carry")
def why(
    c: Context, tag: Annotated[str, "release"], path: Annotated[str, "in its image"], *, json: Json = False
) -> None:
    """Say which lock entry, stage and layer a file comes from."""
    commands.history.why(tag, path, as_json=json)


@task("prove and carry")
def export(
    c: Context,
    tag: Annotated[str, "release to export"],
    *,
    output: Annotated[str, "file to write"],
    with_store: Annotated[
        bool, "with every wheel, package and model file: enough to build image and checkpoint again offline"
    ] = False,
    with_checkpoint: Annotated[bool, "with the finished checkpoint: enough to serve it offline"] = False,
    no_image: Annotated[bool, "records and inputs only: for a machine that has the image (invoke copy)"] = False,
) -> None:
    """Write a release into one file: image, record, inputs."""
    commands.bundle.export(tag, output, store=with_store, checkpoint=with_checkpoint, image=not no_image)


@task("prove and carry")
def import_(
    c: Context,
    file: Annotated[str, "a bundle that `export` wrote"],
    *,
    require_signature: Signed = False,
) -> None:
    """Verify a bundle, then load its image and record."""
    commands.bundle.import_bundle(file, signed=require_signature)


@task("prove and carry")
def publish(
    c: Context,
    tag: Annotated[str, "release to publish"],
    to: Annotated[str, "repository of a registry: oci://HOST[:PORT]/NAME"],
    *,
    redistribute: Annotated[bool, "whoever reads there may have its NVIDIA wheels (docs/registry.md)"] = False,
    ca: Authority = "",
) -> None:
    """Send a release to a registry: image, SBOM, statement, record."""
    commands.bundle.publish(tag, to, agreed=redistribute, ca=ca)


@task("prove and carry")
def pull(
    c: Context,
    source: Annotated[str, "oci://HOST[:PORT]/NAME:TAG or ...@sha256:DIGEST, as `publish` has printed it"],
    *,
    unsigned: Annotated[bool, "take what is not signed by somebody whom allowed_signers names, too"] = False,
    ca: Authority = "",
) -> None:
    """Fetch a release from a registry, verify it, take it in."""
    commands.bundle.pull(source, unsigned=unsigned, ca=ca)


@task("prove and carry")
def copy(
    c: Context,
    tag: Annotated[str, "release to send"],
    *,
    to: Annotated[str, "ssh://user@host[:port], unix://... or tcp://..."],
    with_checkpoint: Annotated[bool, "and its checkpoint, into a Docker volume there"] = False,
    link: Annotated[str, "the fast way: that host's address on a link, or this machine's interface on it"] = "",
    deep: Annotated[bool, "hash all of a checkpoint that is there, as `promote --deep` does here"] = False,
) -> None:
    """Send a release's image, and its checkpoint, to another engine."""
    commands.bundle.copy(tag, to, checkpoint=with_checkpoint, link=link, deep=deep)


@task("machine")
def doctor(
    c: Context,
    *,
    fix: Annotated[bool, "install what is missing and start an engine"] = False,
    stack: Stack = None,
    recipe: Annotated[str | None, "what this recipe needs, too: its stack, its model, disk, memory, GPU"] = None,
    stage: Stage = None,
    online: Annotated[bool, "ask the Hub, too: whether it answers, and what time it is"] = False,
    json: Json = False,
    nodes: Annotated[
        str, "look at the machines of a release for several instead, and their link", "here,ssh://me@spark2"
    ] = "",
    link: Annotated[str | None, "with --nodes: as of serve (default: the only one)"] = None,
) -> None:
    """Say what this machine is and has, and what it lacks."""
    from sparkpin.commands.doctor import command, machines

    if nodes:
        machines.machines(urls=nodes, link=link, recipe=recipe)
        return
    command.doctor(fix=fix, stack=stack, recipe_name=recipe, stage=stage, online=online, as_json=json)


@task("for developers")
def test(
    c: Context,
    *,
    fast: Annotated[bool, "the unit tests alone: no engine, no images"] = False,
    all: Annotated[bool, "every test, the slow ones too"] = False,
    select: Annotated[str, "pytest's -k expression"] = "",
) -> None:
    """Run the tests; the slow ones only with --all."""
    if code := commands.developer.test(project_folder(), fast=fast, whole=all, select=select):
        raise Exit(code=code)


@task("for developers")
def check(c: Context) -> None:
    """Run ruff, mypy, shellcheck and hadolint."""
    if code := commands.developer.check(project_folder()):
        raise Exit(code=code)


take_over()
