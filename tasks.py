"""The tasks, in the groups and the order in which `invoke` and `sparkpin` list them.

A task's signature is its line: what stands before `*` is positional, what follows are options, and each has its help
beside it (sparkpin.cli.command_line). Its body hands over to a file of sparkpin.cli.
"""

from __future__ import annotations

from typing import Annotated, Literal

from invoke.context import Context
from invoke.exceptions import Exit

from sparkpin import cli
from sparkpin.cli.command_line import take_over, task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import project_folder
from sparkpin.serve.address import AddressOptions

Recipe = Annotated[str | None, "recipe of recipes/ (default: the stack's)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's)"]
Stack = Annotated[str | None, "stack of pins/stacks/ (default: the one for this machine)"]
Json = Annotated[bool, "machine-readable"]
Drain = Annotated[
    int | None, "seconds that running requests get to finish before the server is replaced (default: 30)", 60
]
Link = Annotated[
    str | None, "interface, address or network that connects them (default: the last one used, else the only one)"
]
SharedLink = Annotated[bool, "allow a link that other machines share (insecure)"]
Trust = Annotated[bool, "also build an imported release: its steps run as root"]
Authority = Annotated[str, "PEM file of the registry's own certificate authority"]
Signed = Annotated[bool, "fail unless somebody whom allowed_signers names has signed it"]


@task("serve")
def up(
    c: Context,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    no_smoke: Annotated[bool, "build only"] = False,
    serve: Annotated[bool, "serve the last stage as soon as it has passed; the others are tested after it"] = False,
    yes: Annotated[bool, "fetch the model's files without asking"] = False,
    from_: Annotated[str, "fetch what is published there and signed, and build the rest", "oci://HOST/NAME"] = "",
    ca: Authority = "",
    dry_run: Annotated[bool, "print what would be done, and change nothing"] = False,
) -> None:
    """The main job: lock, fetch, build, checkpoint and smoke."""
    cli.up.up(recipe=recipe, stage=stage, stack=stack, smoke=not no_smoke, dry_run=dry_run, yes=yes, serve=serve,
                   published=(from_, ca))  # fmt: skip


@task("serve")
def serve(
    c: Context,
    tag: Annotated[str | None, "release to serve (default: the recipe's current one)"] = None,
    *,
    recipe: Recipe = None,
    stack: Stack = None,
    port: Annotated[int | None, "port on this machine (default: the last one used, else the recipe's)", 8001] = None,
    host: Annotated[
        str | None, "address to listen on (default: the last one used, else 127.0.0.1); others require an API key"
    ] = None,
    tls_cert: Annotated[
        str | None, "PEM file of a TLS certificate (default: the last one used; none: plain HTTP)"
    ] = None,
    tls_key: Annotated[str | None, "PEM file of the certificate's key"] = None,
    allow: Annotated[
        str | None,
        "more paths of vLLM to open to clients, such as /v1/embeddings,/score (default: the last ones; none: no more)",
        "/v1/embeddings,/score",
    ] = None,
    limit: Annotated[
        str | None,
        "limits to override, such as requests=64,restarts=3 (docs/serving.md; default: the last ones; none: no more)",
        "requests=64,restarts=3",
    ] = None,
    nodes: Annotated[
        str | None,
        "machines for a release that needs several, such as here,ssh://me@spark2 (default: the last ones)",
        "here,ssh://me@spark2",
    ] = None,
    link: Link = None,
    shared_link: SharedLink = False,
    drain: Drain = None,
    unit: Annotated[bool, "print a systemd unit that serves it after a reboot; serve nothing now"] = False,
) -> None:
    """Serve a release, replacing the recipe's running server."""
    options = AddressOptions(port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, allow=allow, limit=limit)
    cli.serve.serve(
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
    recipe: Annotated[str | None, "with --env: the recipe whose server is meant (default: the running one)"] = None,
    watch: Annotated[int | None, "repeat every so many seconds, until Ctrl-C", 2] = None,
) -> None:
    """Print what is served, its health and load, and why it died."""
    cli.status.status(as_json=json, env=env, recipe=recipe, watch=watch)


@task("serve")
def logs(
    c: Context,
    *,
    recipe: Annotated[str | None, "recipe whose server is meant (default: the running one)"] = None,
    lines: Annotated[int, "how many of the last lines (default: 100)"] = 100,
    follow: Annotated[bool, "keep printing new lines, until Ctrl-C"] = False,
) -> None:
    """Print a server's log, without health checks."""
    cli.status.logs(recipe=recipe, lines=lines, follow=follow)


@task("serve")
def stop(
    c: Context,
    *,
    recipe: Annotated[str | None, "recipe whose server to stop (default: all of this data directory)"] = None,
) -> None:
    """Stop what `serve` started."""
    cli.serve.stop(recipe=recipe)


@task("serve")
def client(
    c: Context,
    tool: Annotated[
        Literal["", "claude", "cline", "codex", "continue", "litellm", "llm", "open-webui", "openai", "opencode"],
        "claude, cline, codex, continue, litellm, llm, open-webui, openai or opencode (default: list them)",
    ] = "",
    *,
    recipe: Annotated[str | None, "recipe whose server is meant (default: the running one, else the stack's)"] = None,
    url: Annotated[
        str, "the server's URL for the client, such as http://spark.local:8000/v1 (default: as on this machine)"
    ] = "",
    key_env: Annotated[str, "environment variable that holds the API key at the client (default: none)"] = "",
) -> None:
    """Print a configuration for a tool, or list the tools."""
    cli.client.client(tool, recipe=recipe, url=url, key=key_env)


@task("releases")
def images(c: Context, *, json: Json = False) -> None:
    """List the releases with their images."""
    cli.releases.images(as_json=json)


@task("releases")
def promote(
    c: Context,
    tag: Annotated[str, "release that passed its smoke test"],
    *,
    recipe: Recipe = None,
    accept_loss: Annotated[str, "why it may lose more quality than its stage allows; recorded with the release"] = "",
    deep: Annotated[bool, "hash its whole checkpoint, not only small files and those whose time has changed"] = False,
) -> None:
    """Make a release the current one of its recipe."""
    cli.releases.promote(tag, recipe=recipe, accept_loss=accept_loss, deep=deep)


@task("releases")
def rollback(
    c: Context,
    *,
    recipe: Recipe = None,
    to: Annotated[str, "an earlier current release to go back to (default: the previous one)"] = "",
    serve: Annotated[bool, "also serve it; if it does not become ready, nothing changes"] = False,
    drain: Drain = None,
    dry_run: Annotated[bool, "print which release it would be and what differs, and change nothing"] = False,
) -> None:
    """Restore the previous release; repeat to go further back."""
    cli.releases.rollback(recipe=recipe, to=to, serve_it=serve, drain=drain, dry_run=dry_run)


@task("releases")
def keep(
    c: Context,
    tag: Annotated[str, "release to keep"],
    *,
    note: Annotated[str, "why, in one line"] = "",
    remove: Annotated[bool, "stop keeping it: `prune` may remove it again"] = False,
) -> None:
    """Protect a release from `prune`."""
    cli.releases.keep(tag, note=note, remove=remove)


@task("releases")
def prune(
    c: Context,
    *,
    keep: Annotated[
        int,
        "releases to keep per recipe (default: 5); current, previous, kept and in-use ones always stay",
    ] = 5,
    dry_run: Annotated[bool, "print what would be removed, and change nothing"] = False,
    store: Annotated[bool, "also remove fetched files that no lock and no remaining release needs"] = False,
    build_cache: Annotated[
        bool, "also clear the engine's build cache, including that of other projects' builds"
    ] = False,
) -> None:
    """Remove old releases, and what only they needed."""
    cli.prune.prune(keep=keep, dry_run=dry_run, store=store, build_cache=build_cache)


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
    """Print what changed between two releases."""
    if cli.history.diff(before, after, all_files=files, as_json=json) and exit_code:
        raise Exit(code=1)


@task("releases")
def report(
    c: Context,
    *,
    recipe: Annotated[str | None, "releases of this recipe only (default: every recipe's)"] = None,
    out: Annotated[
        str, "file to write (default: report.html or report-RECIPE.html in SPARKPIN_HOME; --markdown prints)"
    ] = "",
    markdown: Annotated[bool, "a table for a forum post instead"] = False,
) -> None:
    """Write the releases with their evidence as one HTML page."""
    cli.report.report(recipe=recipe, out=out, as_markdown=markdown)


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
    inspect: Annotated[
        bool,
        "without running it, say what of TAG would fail on its GPU: of a release, another image of the engine or a "
        "folder with a root file system",
    ] = False,
    sm: Annotated[str, "GPU for --inspect: 121, 12.1 or sm_121 (default: the one of the image's stack)"] = "",
    json: Json = False,
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
    if inspect or sm or json:
        if not inspect or kernels or load or stage or recipe or nodes or link:
            raise InputError(
                "--inspect goes with TAG, --sm and --json, and these with it alone", next_step="invoke smoke --help"
            )
        cli.smoke.inspect(tag, sm=sm, as_json=json)
        return
    if kernels:
        cli.smoke.compare_kernels(tag=tag, stage=stage, recipe=recipe)
        return
    cli.smoke.smoke(tag=tag, stage=stage, recipe=recipe, load=load, where=(nodes, link, shared_link))


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
        Literal["", "prompts", "sweep"],
        "the five prompts, or concurrent requests and longer prompts (default: both)",
    ] = "",
    quick: Annotated[bool, "short answers and few cells: whether it works at all"] = False,
    full: Annotated[bool, "the cells with many long prompts at a time, too"] = False,
    bandwidth: Annotated[
        str, "of the memory in GB/s, for the ceiling (default: a DGX Spark's 273 on one, else no ceiling)"
    ] = "",
    dry_run: Annotated[bool, "print the plan and measure nothing"] = False,
    json: Json = False,
) -> None:
    """Measure how fast a release is, or two in turns."""
    asked = cli.bench.BenchOptions(
        quick=quick, full=full, only=only, bandwidth=bandwidth, dry_run=dry_run, as_json=json
    )
    if compare or rounds is not None:
        cli.bench.run_compare(compare, tag or "", asked=asked, rounds=rounds)
    else:
        cli.bench.run(recipe=recipe, tag=tag, asked=asked)


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
    json: Json = False,
) -> None:
    """Compare the quality of a release with its parent stage's."""
    cli.quality.quality(recipe=recipe, release=tag, against=against, quick=quick, as_json=json)


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
    json: Json = False,
) -> None:
    """Check that caching, concurrency and drafting do not change answers."""
    asked = cli.prove.ProveOptions(
        model=model,
        key=key_env,
        seed=seed,
        sessions=sessions,
        turns=turns,
        replay=replay,
        as_json=json,
    )
    cli.prove.prove(what, recipe=recipe, asked=asked)


@task("measure")
def plan(
    c: Context,
    *,
    recipe: Recipe = None,
    stage: Stage = None,
    stack: Stack = None,
    memory: Annotated[
        str, "memory of the machine, such as 128GB (default: this machine's, or a DGX Spark's for its stack)"
    ] = "",
    free: Annotated[str, "how much of it is free, such as 110GB (default: what is free here now)"] = "",
    bandwidth: Annotated[
        str, "memory bandwidth in GB/s, for the highest possible speed (default: 273 for a DGX Spark's stack)", "273"
    ] = "",
    nodes: Annotated[int | None, "plan for this many machines, tensor-parallel", 2] = None,
    json: Json = False,
    exit_code: Annotated[bool, "exit with 1 if the recipe does not fit"] = False,
) -> None:
    """Estimate a recipe's memory, concurrent requests and highest speed."""
    from sparkpin.serve.memory import recipe as tasks

    cli.notes.say_memory_issues(recipe, stage, stack)
    asked = tasks.PlanOptions(memory=memory, free=free, bandwidth=bandwidth, nodes=nodes, as_json=json)
    if not tasks.plan(recipe=recipe, stage=stage, stack=stack, asked=asked) and exit_code:
        raise Exit(code=1)


@task("measure")
def bisect(
    c: Context,
    *,
    good: Annotated[str, "release whose check is good"],
    bad: Annotated[str, "release whose check is bad"],
    check: Annotated[str, "shell command (docs/bisect.md): 0 is good, 125 inconclusive, any other code bad"],
    serve: Annotated[bool, "start a server for each trial: its address is SPARKPIN_ENDPOINT"] = False,
    unstarted_is_bad: Annotated[bool, "with --serve: a server that does not start is bad, not unresolved"] = False,
    limit: Annotated[int, "seconds that the check may take (default: 1800)"] = 1800,
) -> None:
    """Find the change between two releases that makes a check fail."""
    cli.bisect.bisect(good=good, bad=bad, check=check, serve=serve, unstarted_is_bad=unstarted_is_bad, limit=limit)


@task("measure")
def bump(
    c: Context,
    *,
    stack: Stack = None,
    what: Annotated[
        Literal["all", "vllm", "python", "debian", "model"],
        "update only this component: vllm, python, debian or model (default: all)",
    ] = "all",
    to: Annotated[
        str, "a version that the stack is to pin, such as vllm==0.34.0; --apply writes it into its file"
    ] = "",
    recipe: Recipe = None,
    apply: Annotated[bool, "where the verdict is `promote`: promote it, and write the lock"] = False,
    quick: Annotated[bool, "fewer texts, questions and cells: sooner, and less sure"] = False,
    hold: Annotated[int, "days that a wheel must have been offered for (default: 7; 0: take all)"] = 7,
    busy: Annotated[bool, "promote though the recipe's server answers requests"] = False,
) -> None:
    """Try newer versions against the current release, on the side."""
    cli.bump.bump(
        stack=stack,
        what=what,
        recipe=recipe,
        apply=apply,
        quick=quick,
        hold=hold,
        busy=busy,
        to=to,
    )


@task("build")
def build(
    c: Context,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    offline: Annotated[bool, "fetch nothing: what is missing is an error"] = False,
    render: Annotated[bool, "instead: print the Dockerfile of a stage and what its build sees"] = False,
    fetch_only: Annotated[bool, "instead: fetch and verify everything that the locks name"] = False,
    checkpoint_only: Annotated[bool, "instead: make the checkpoint of a stage from the pinned repositories"] = False,
    model: Annotated[
        str | None, "with --checkpoint-only: a model of pins/models/, without a recipe (default stage: all of its pin)"
    ] = None,
    dry_run: Annotated[bool, "with --checkpoint-only: print the plan, which only reads headers"] = False,
    verify: Annotated[bool, "with --checkpoint-only: compare all bytes of a checkpoint with its sources"] = False,
    deep: Annotated[bool, "with --checkpoint-only: hash the base again, though its files have not changed"] = False,
) -> None:
    """Build, seal and tag the images of a recipe up to a stage."""
    only = cli.checkpoint.CheckpointOptions(model=model, dry_run=dry_run, verify=verify, deep=deep)
    kinds = {"render": render, "fetch-only": fetch_only, "checkpoint-only": checkpoint_only}
    cli.checkpoint.require_one(kinds, only, offline=offline)
    if render:
        cli.build.show_rendered(recipe=recipe, stage=stage, stack=stack)
    elif fetch_only:
        cli.build.fetch(recipe=recipe, stack=stack)
    elif checkpoint_only:
        cli.checkpoint.checkpoint(recipe=recipe, stage=stage, stack=stack, asked=only)
    else:
        cli.build.build(recipe=recipe, stage=stage, stack=stack, offline=offline)


@task("inputs")
def lock(
    c: Context,
    *,
    stack: Annotated[str | None, "lock this stack only"] = None,
    model: Annotated[str | None, "lock this model only"] = None,
    digests: Annotated[bool, "resolve nothing: build what the locks give, write its digests to pins/digests"] = False,
) -> None:
    """Resolve the pins and write their locks (network)."""
    cli.lock.lock(stack=stack, model=model, digests=digests)


@task("inputs")
def recipe(
    c: Context,
    action: Annotated[
        Literal["list", "check", "show", "import", "export"],
        "list: those of recipes/; check: find mistakes; show: the command and environment that would run, and where "
        "each word comes from; import: convert a recipe of spark-vllm-docker or sparkrun; export: write one for them, "
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
    no_lock: Annotated[bool, "import: do not ask the Hub for the model's commit"] = False,
    dry_run: Annotated[bool, "import: print the new recipe, and write nothing"] = False,
    json: Annotated[bool, "check, show: machine-readable"] = False,
    format: Annotated[Literal["v1", "v2"], "export: for spark-vllm-docker or for sparkrun (default: v1)"] = "v1",
    output: Annotated[str, "export: file to write (default: print it)"] = "",
) -> None:
    """List, check, show, import and export recipes."""
    if not cli.recipe.recipe(action, what, name=name, stack=stack, stage=stage, lock=not no_lock,
                                  dry_run=dry_run, as_json=json, form=format, output=output):  # fmt: skip
        raise Exit(code=4)


@task("prove and carry")
def verify(
    c: Context,
    subject: Annotated[str, "tag of a release, or the file of a bundle"],
    *,
    sign: Annotated[bool, "make SBOM, statement and, with a key, signature again first"] = False,
    deep: Annotated[bool, "read and hash every layer and fetched package, too"] = False,
    require_signature: Signed = False,
) -> None:
    """Check a release or a bundle, and sign a release."""
    cli.evidence.verify(subject, sign=sign, deep=deep, require_signature=require_signature)


@task("prove and carry")
def reproduce(
    c: Context,
    tag: Annotated[str | None, "release to build again (default: the newest of --stage)"] = None,
    *,
    stage: Annotated[str | None, "the newest release of this stage (default: the recipe's)"] = None,
    recipe: Recipe = None,
    keep: Annotated[bool, "in this machine's engine: its images, and its checkpoint, stay"] = False,
    trust: Trust = False,
) -> None:
    """Build a release again from its record, and compare."""
    cli.reproduce.reproduce(tag=tag, stage=stage, recipe=recipe, trusted=trust, keep=keep)


@task("prove and carry")
def why(
    c: Context, tag: Annotated[str, "release"], path: Annotated[str, "in its image"], *, json: Json = False
) -> None:
    """Print which lock entry, stage and layer a file comes from."""
    cli.history.why(tag, path, as_json=json)


@task("prove and carry")
def export(
    c: Context,
    tag: Annotated[str, "release to export"],
    place: Annotated[str, "file to write, registry (oci://HOST/NAME) or engine (ssh://HOST, unix://..., tcp://...)"],
    *,
    with_store: Annotated[
        bool, "file: with every wheel, package and model file, to build image and checkpoint again offline"
    ] = False,
    with_checkpoint: Annotated[bool, "file, engine: with the finished checkpoint, to serve it offline"] = False,
    no_image: Annotated[bool, "file: records and inputs only, for a machine that has the image"] = False,
    redistribute: Annotated[
        bool, "registry: whoever reads there may have its NVIDIA wheels (docs/registry.md)"
    ] = False,
    ca: Authority = "",
    link: Annotated[str, "ssh: the fast way, that host's address on a link, or this machine's interface on it"] = "",
    deep: Annotated[bool, "engine: hash all of a checkpoint that is there, as `promote --deep` does here"] = False,
) -> None:
    """Write a release to a file, a registry or another engine."""
    options = cli.bundle.ExportOptions(
        with_store=with_store,
        with_checkpoint=with_checkpoint,
        no_image=no_image,
        redistribute=redistribute,
        ca=ca,
        link=link,
        deep=deep,
    )
    cli.bundle.export(tag, place, options)


@task("prove and carry")
def import_(
    c: Context,
    place: Annotated[str, "a file that `export` wrote, or oci://HOST/NAME:TAG (or @sha256:DIGEST) of a registry"],
    *,
    require_signature: Annotated[bool, "file: refuse what nobody signed whom allowed_signers names"] = False,
    unsigned: Annotated[bool, "registry: take what nobody signed whom allowed_signers names, too"] = False,
    ca: Authority = "",
) -> None:
    """Verify a release that was exported, then take it in."""
    cli.bundle.import_release(place, signed=require_signature, unsigned=unsigned, ca=ca)


@task("machine")
def doctor(
    c: Context,
    *,
    fix: Annotated[bool, "install what is missing and start an engine"] = False,
    stack: Stack = None,
    recipe: Annotated[str | None, "also check what this recipe needs: stack, model, disk, memory, GPU"] = None,
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Check this machine, and print how to fix what is missing."""
    from sparkpin.cli.doctor import command

    command.doctor(fix=fix, stack=stack, recipe_name=recipe, stage=stage, as_json=json)


@task("for developers")
def test(
    c: Context,
    *,
    fast: Annotated[bool, "only the unit tests: no engine, no images"] = False,
    all: Annotated[bool, "every test, the slow ones too"] = False,
    select: Annotated[str, "pytest's -k expression"] = "",
) -> None:
    """Run the tests; the slow ones only with --all."""
    if code := cli.developer.test(project_folder(), fast=fast, whole=all, select=select):
        raise Exit(code=code)


@task("for developers")
def check(c: Context) -> None:
    """Run ruff, mypy, shellcheck and hadolint."""
    if code := cli.developer.check(project_folder()):
        raise Exit(code=code)


take_over()
