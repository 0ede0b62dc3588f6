"""The tasks: each parses its options and hands over to a file of sparkpin.commands.

`invoke --list` imports no more than this.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from sparkpin.commands import command_line

PROJECT = Path(__file__).resolve().parent
RECIPE = "recipe of recipes/ (default: the one of the stack)"
STAGE = "stage of stages/ (default: the recipe's)"
DRAIN = "seconds to wait for requests under way before another server takes the port (default: 30)"
TRUST = "build an imported release, too: its steps run as root"
STACK = "stack of pins/stacks/ (default: the one for this machine)"


def guarded(body: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a SparkpinError into one message and its own exit code, without a traceback."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        from sparkpin.core.errors import SparkpinError
        from sparkpin.core.terminal import tame

        for number in (signal.SIGTERM, signal.SIGHUP):  # clean up as after Ctrl-C; nohup stays in force
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        try:
            return body(*args, **kwargs)
        except SparkpinError as error:
            sys.stdout.flush()
            raise Exit(f"error: {tame(str(error))}", code=error.exit_code) from None
        except KeyboardInterrupt:
            raise Exit("interrupted: nothing half-made will be used; run the same command again", code=130) from None
        except BrokenPipeError:  # `| head` has seen enough; Python would complain once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Exit(code=141) from None  # as if the signal had ended it

    return run


def command(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """An invoke task around a guarded body. Options have long names only: one letter would mean different things."""
    return lambda body: task(auto_shortflags=False, **options)(guarded(body))


def whole(option: str, value: str, example: int) -> int:
    """invoke's own conversion of a number ends in a traceback."""
    from sparkpin.core.errors import InputError

    if not value.isdecimal():
        wanted = "a whole number, 0 or more"
        raise InputError(f"--{option}: saw {value!r}, wanted {wanted}", next_step=f"for example --{option} {example}")
    return int(value)


@command(help={"stage": STAGE, "recipe": RECIPE, "stack": STACK, "no_smoke": "build only", "dry_run": "say it only"})
def up(
    c: Context,
    stage: str | None = None,
    recipe: str | None = None,
    stack: str | None = None,
    no_smoke: bool = False,
    dry_run: bool = False,
) -> None:
    """The main job: fetch, build, checkpoint and smoke."""
    from sparkpin.commands import up as commands

    commands.up(recipe=recipe, stage=stage, stack=stack, smoke=not no_smoke, dry_run=dry_run)


@command(
    help={
        "fix": "install what is missing and start an engine",
        "stack": STACK,
        "online": "ask the Hub, too: whether it answers, and what time it is",
        "json": "machine-readable",
    }
)
def doctor(c: Context, fix: bool = False, stack: str | None = None, online: bool = False, json: bool = False) -> None:
    """Say what this machine is and has, and what it lacks."""
    from sparkpin.commands.doctor import command as tasks

    tasks.doctor(fix=fix, stack=stack, online=online, as_json=json)


@command(
    help={
        "stack": "lock this stack only",
        "model": "lock this model only",
        "mod": "bring this community mod of pins/community here, and lock it",
        "keep_layers": "keep the former layers, put the wheels that changed on top: costs only their disk",
    }
)
def lock(
    c: Context,
    stack: str | None = None,
    model: str | None = None,
    mod: str | None = None,
    keep_layers: bool = False,
) -> None:
    """Resolve the pins and write their locks (network)."""
    from sparkpin.commands import lock as commands

    commands.lock(stack=stack, model=model, mod=mod, keep_layers=keep_layers)


@command(help={"recipe": RECIPE, "stack": STACK})
def fetch(c: Context, recipe: str | None = None, stack: str | None = None) -> None:
    """Fetch and verify everything that the locks name (network)."""
    from sparkpin.commands import lock as commands

    commands.fetch(recipe=recipe, stack=stack)


@command(help={"stage": STAGE, "recipe": RECIPE, "stack": STACK})
def render(c: Context, stage: str | None = None, recipe: str | None = None, stack: str | None = None) -> None:
    """Print the Dockerfile of a stage and what its build sees."""
    from sparkpin.commands import build as commands

    commands.show_rendered(recipe=recipe, stage=stage, stack=stack)


@command(
    help={"stage": STAGE, "recipe": RECIPE, "stack": STACK, "offline": "fetch nothing: what is missing is an error"}
)
def build(
    c: Context, stage: str | None = None, recipe: str | None = None, stack: str | None = None, offline: bool = False
) -> None:
    """Build, seal and tag the images of a recipe up to a stage."""
    from sparkpin.commands import up as commands

    commands.build(recipe=recipe, stage=stage, stack=stack, offline=offline)


@command(
    help={
        "release": "tag of the release (default: the newest of --stage)",
        "stage": "the newest release of this stage (default: the recipe's)",
        "recipe": RECIPE,
        "trust": TRUST,
    }
)
def reproduce(
    c: Context, release: str | None = None, stage: str | None = None, recipe: str | None = None, trust: bool = False
) -> None:
    """Build a release again from its record, and compare."""
    from sparkpin.commands import build as commands

    commands.reproduce(tag=release, stage=stage, recipe=recipe, trusted=trust)


@command(positional=["tag"], help={"tag": "release whose image or checkpoint is gone", "trust": TRUST})
def rebuild(c: Context, tag: str, trust: bool = False) -> None:
    """Make a release's images and checkpoint again from its record."""
    from sparkpin.commands import build as commands

    commands.rebuild(tag, trusted=trust)


@command(
    help={
        "stage": STAGE,
        "recipe": RECIPE,
        "stack": STACK,
        "model": "a model of pins/models/, without a recipe (default stage: all that its pin allows)",
        "dry_run": "print the plan, which only reads headers",
        "verify": "compare all bytes of a checkpoint that is there with its sources",
    }
)
def checkpoint(
    c: Context,
    stage: str | None = None,
    recipe: str | None = None,
    stack: str | None = None,
    model: str | None = None,
    dry_run: bool = False,
    verify: bool = False,
) -> None:
    """Make the checkpoint of a stage from the pinned repositories."""
    from sparkpin.commands import checkpoint as commands

    commands.checkpoint(recipe=recipe, model=model, stage=stage, stack=stack, dry_run=dry_run, verify=verify)


@command(
    help={
        "recipe": RECIPE,
        "stage": STAGE,
        "memory": "of the machine to plan for, such as 128GB (default: this one's; a Spark's for a stack for it)",
        "free": "of which so much is free",
        "json": "machine-readable",
        "exit_code": "end with 1 when it does not fit",
        "stack": STACK,
    }
)
def plan(
    c: Context,
    recipe: str | None = None,
    stage: str | None = None,
    stack: str | None = None,
    memory: str = "",
    free: str = "",
    json: bool = False,
    exit_code: bool = False,
) -> None:
    """Say what memory a recipe will need, and how many users fit."""
    from sparkpin.serve.memory import recipe as tasks

    fits = tasks.plan(recipe=recipe, stage=stage, stack=stack, memory=memory, free=free, as_json=json)
    if exit_code and not fits:
        raise Exit(code=1)


@command(
    help={
        "recipe": RECIPE,
        "stage": STAGE,
        "published": "every stage of the published chain of the 122B instead, which needs none of its files: without "
        "--recipe, --stage and --measured",
        "bandwidth": "of the memory in GB/s (default: 273, a DGX Spark's)",
        "context": "tokens in the cache (default: 1000)",
        "accepted": "share of the drafted tokens that the model accepts (default: as measured of a release, else 0.79)",
        "measured": "tokens a second, to say what fraction of the ceiling they are",
        "json": "machine-readable",
    }
)
def roofline(
    c: Context,
    recipe: str | None = None,
    stage: str | None = None,
    published: bool = False,
    bandwidth: str = "273",
    context: str = "1000",
    accepted: str = "",
    measured: str = "",
    json: bool = False,
) -> None:
    """Say how fast one user's decode can be at most."""
    from sparkpin.commands import roofline as tasks

    asked = tasks.asked(bandwidth=bandwidth, context=whole("context", context, 32768), accepted=accepted)
    if published:
        tasks.published(asked, as_json=json, recipe=recipe, stage=stage, measured=measured)
    else:
        tasks.roofline(asked, recipe=recipe, stage=stage, measured=measured, as_json=json)


@command(
    help={
        "release": "tag to smoke (default: every release that is built and not yet smoked)",
        "stage": "smoke the newest release of this stage",
        "recipe": "smoke the releases of this recipe only (default: every recipe; with --stage the stack's own)",
        "load": "what this machine cannot serve and so inspects: load its libraries and plugins, too, emulated where "
        "that must be (up to 15 minutes a release)",
    }
)
def smoke(
    c: Context, release: str | None = None, stage: str | None = None, recipe: str | None = None, load: bool = False
) -> None:
    """Start each new image with a real server and check its answers."""
    from sparkpin.commands import smoke as commands

    commands.smoke(tag=release, stage=stage, recipe=recipe, load=load)


@command(
    positional=command_line.compare_words(sys.argv),
    help={
        "release": "tag to measure (default: what is served of the recipe, else its current release)",
        "recipe": RECIPE,
        "compare": "measure this release and the one that follows in turns: --compare A B",
        "other": "the release that follows, by its name: --compare A --other B",
        "rounds": "of a comparison, a turn of each (default: 4)",
        "only": "prompts: the five prompts; sweep: more users at a time, longer prompts (default: both)",
        "quick": "short answers and few cells: whether it works at all",
        "full": "the cells with many long prompts at a time, too",
        "bandwidth": "of the memory in GB/s (a DGX Spark's: 273), to print the ceiling beside it",
        "resume": "go on with a run that was broken off",
        "dry_run": "print the plan and about how long it takes",
        "json": "machine-readable",
    },
)
def bench(
    c: Context,
    release: str | None = None,
    recipe: str | None = None,
    compare: str = "",
    other: str | None = None,
    rounds: str = "",
    only: str = "",
    quick: bool = False,
    full: bool = False,
    bandwidth: str = "",
    resume: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Measure how fast a release is, or two in turns."""
    from sparkpin.commands import bench as tasks
    from sparkpin.core.errors import InputError

    turns = whole("rounds", rounds or "4", 4)
    if (rounds or other) and not compare:
        more = f" --rounds {turns}" if rounds and turns else ""
        raise InputError(
            f"{'--rounds' if rounds else '--other'} is about --compare",
            next_step=f"invoke bench --compare A {other or 'B'}{more}, of two releases that `invoke images` lists",
        )
    asked = tasks.BenchOptions(quick=quick, full=full, only=only, bandwidth=bandwidth, dry_run=dry_run, as_json=json)
    if compare:
        tasks.run_compare(compare, other or "", asked=asked, rounds=turns)
    else:
        tasks.run(recipe=recipe, tag=release, asked=asked, resume=resume)


@command(help={"json": "machine-readable"})
def images(c: Context, json: bool = False) -> None:
    """List the releases with their images."""
    from sparkpin.commands import releases as commands

    commands.images(as_json=json)


@command(positional=["tag"], help={"tag": "release whose SBOM, statement and signature to make anew"})
def attest(c: Context, tag: str) -> None:
    """Make SBOM, statement and signature of a release anew."""
    from sparkpin.commands import evidence as commands

    commands.attest(tag)


@command(
    positional=["subject"],
    help={
        "subject": "tag of a release, or the file of a bundle",
        "deep": "read and hash every layer and fetched file, too",
        "require_signature": "a release without a signature of an allowed signer is wrong",
    },
)
def verify(c: Context, subject: str, deep: bool = False, require_signature: bool = False) -> None:
    """Check image, statement and signature of a release or a bundle."""
    from sparkpin.commands import evidence as commands

    commands.verify(subject, deep=deep, require_signature=require_signature)


@command(
    positional=["before", "after"],
    help={
        "before": "tag of a release, or . for the working tree",
        "after": "another tag, or .",
        "files": "every path of the images that differs",
        "json": "machine-readable",
        "exit_code": "end with 1 when they differ",
    },
)
def diff(c: Context, before: str, after: str, files: bool = False, json: bool = False, exit_code: bool = False) -> None:
    """Say what changed between two releases."""
    from sparkpin.commands import history as tasks

    if tasks.diff(before, after, all_files=files, as_json=json) and exit_code:
        raise Exit(code=1)


@command(positional=["tag", "path"], help={"tag": "release", "path": "in its image", "json": "machine-readable"})
def why(c: Context, tag: str, path: str, json: bool = False) -> None:
    """Say which lock entry, stage and layer a file comes from."""
    from sparkpin.commands import history as tasks

    tasks.why(tag, path, as_json=json)


@command(
    positional=["tag"],
    help={
        "tag": "release, another image of the engine, or a folder with a root file system",
        "sm": "GPU that it has to run on: 121, 12.1 or sm_121 (default: the one of the image's stack)",
        "platform": "linux/arm64 or linux/amd64 (default: the image's)",
        "all": "each library with GPU code, and what it holds; each lack that is allowed, and why",
        "json": "machine-readable",
    },
)
def inspect(c: Context, tag: str, sm: str = "", platform: str = "", all: bool = False, json: bool = False) -> None:
    """Say what of an image would fail on a GPU, without one."""
    from sparkpin.commands import inspect as commands

    commands.inspect(tag, sm=sm, platform=platform, everything=all, as_json=json)


@command(
    help={
        "recipe": RECIPE,
        "release": "tag of the release to measure (default: the newest that passed, of a stage with a parent)",
        "against": "tag or stage to compare it with (default: its parent stage, which `promote` goes by)",
        "quick": "two texts of each kind, fewer questions: says less, and sooner",
        "tasks": "tasks of lm-eval to run as well, such as arc_easy,gsm8k (sparkpin_choices needs no data)",
        "limit": "questions of each of these tasks (default: all)",
        "hours": "that these tasks may take for each release (default: 12)",
        "chat": "ask these tasks as chats; those that compare log-probabilities cannot be",
        "limits": "show what was measured of the recipe's releases beside their stages' limits; measure nothing",
        "fetch": "install lm-eval and fetch the tasks' data first (network)",
        "json": "machine-readable",
    }
)
def quality(
    c: Context,
    recipe: str | None = None,
    release: str | None = None,
    against: str | None = None,
    quick: bool = False,
    tasks: str = "",
    limit: str = "0",
    hours: str = "12",
    chat: bool = False,
    limits: bool = False,
    fetch: bool = False,
    json: bool = False,
) -> None:
    """Measure what a release lost against another."""
    from sparkpin.commands import quality as measuring
    from sparkpin.measure.quality.standard import wanted_of

    if limits:
        measuring.limits(recipe=recipe)
        return
    measuring.quality(
        recipe=recipe,
        release=release,
        against=against,
        quick=quick,
        wanted=wanted_of(tasks, limit=whole("limit", limit, 100), chat=chat, fetch=fetch),
        fetch=fetch,
        hours=whole("hours", hours, 12),
        as_json=json,
    )


@command(
    help={
        "good": "release whose check is good",
        "bad": "release whose check is bad",
        "check": "command of a shell (docs/bisect.md): 0 is good, 125 cannot be told, any other bad",
        "serve": "start a server for each trial: its address is SPARKPIN_ENDPOINT",
        "unstarted_is_bad": "with --serve: a server that does not start is bad, not unresolved",
        "limit": "seconds that the check may take (default: 1800)",
        "dry_run": "show what would be built and tested, and do nothing",
    }
)
def bisect(
    c: Context,
    good: str = "",
    bad: str = "",
    check: str = "",
    serve: bool = False,
    unstarted_is_bad: bool = False,
    limit: str = "1800",
    dry_run: bool = False,
) -> None:
    """Find the change between two releases that turns a check."""
    from sparkpin.commands import bisect as tasks

    tasks.bisect(
        good=good,
        bad=bad,
        check=check,
        serve=serve,
        unstarted_is_bad=unstarted_is_bad,
        limit=whole("limit", limit, 1800),
        dry_run=dry_run,
    )


@command(
    help={
        "recipe": "releases of this recipe only (default: every recipe's)",
        "out": "file to write (default: report.html or report-RECIPE.html in SPARKPIN_HOME; --markdown prints)",
        "open": "serve the page on 127.0.0.1 instead, until Ctrl-C",
        "port": "for --open (default: any that is free)",
        "markdown": "a table for a forum post instead",
    }
)
def report(
    c: Context,
    recipe: str | None = None,
    out: str = "",
    open: bool = False,
    port: str = "0",
    markdown: bool = False,
) -> None:
    """Write the releases with their evidence as one HTML page."""
    from sparkpin.commands import report as tasks

    tasks.report(recipe=recipe, out=out, serve=open, port=whole("port", port, 8088), as_markdown=markdown)


@command(
    positional=["tag"],
    help={
        "tag": "release that passed its smoke test",
        "accept_loss": "why it may lose more than its stage allows; kept with the release",
    },
)
def promote(c: Context, tag: str, accept_loss: str = "") -> None:
    """Make a release the current one of its recipe."""
    from sparkpin.commands import releases as commands

    commands.promote(tag, accept_loss=accept_loss)


@command(
    help={
        "recipe": RECIPE,
        "serve": "serve it, too; where it does not become ready, nothing has changed",
        "drain": DRAIN,
    }
)
def rollback(c: Context, recipe: str | None = None, serve: bool = False, drain: str = "") -> None:
    """Back to the stage's last good release, or else any stage's."""
    from sparkpin.commands import releases as commands

    commands.rollback(recipe=recipe, serve_it=serve, drain=whole("drain", drain, 60) if drain else None)


@command(
    positional=["tag"],
    help={
        "tag": "release to export",
        "output": "file to write",
        "o": "the same",
        "with_store": "with every wheel, package and model file: enough to build image and checkpoint again offline",
        "with_checkpoint": "with the finished checkpoint: enough to serve it offline",
        "no_image": "records and inputs only: for a machine that has the image (invoke copy)",
    },
)
def export(
    c: Context,
    tag: str,
    output: str = "",
    o: str = "",
    with_store: bool = False,
    with_checkpoint: bool = False,
    no_image: bool = False,
) -> None:
    """Write a release into one file: image, record, inputs."""
    from sparkpin.commands import bundle as commands

    commands.export(tag, output or o, store=with_store, checkpoint=with_checkpoint, image=not no_image)


@command(
    name="import",
    positional=["file"],
    help={
        "file": "a bundle that `export` wrote",
        "require_signature": "refuse one that is not signed by somebody whom allowed_signers names",
    },
)
def import_(c: Context, file: str, require_signature: bool = False) -> None:
    """Verify a bundle, then load its image and record."""
    from sparkpin.commands import bundle as commands

    commands.import_bundle(file, signed=require_signature)


@command(positional=["tag"], help={"tag": "release to send", "to": "ssh://user@host[:port], unix://... or tcp://..."})
def copy(c: Context, tag: str, to: str = "") -> None:
    """Send a release's image to another engine."""
    from sparkpin.commands import bundle as commands

    commands.copy(tag, to)


@command(positional=["tag"], help={"tag": "release to keep", "note": "why, in one line"})
def pin(c: Context, tag: str, note: str = "") -> None:
    """Keep a release, whatever `prune` is told."""
    from sparkpin.commands import releases as commands

    commands.pin(tag, note=note)


@command(positional=["tag"], help={"tag": "release that `prune` may remove again"})
def unpin(c: Context, tag: str) -> None:
    """Take a release's pin away."""
    from sparkpin.commands import releases as commands

    commands.unpin(tag)


@command(
    help={
        "keep": "releases to keep of each recipe (default: 5): the current one, the one to roll back to, those that "
        "passed, the others; newest first. What is current, passed last, is pinned or in use stays even beyond that",
        "dry_run": "say what would go, what stays and why, and the bytes that it would free",
        "store": "remove fetched files, too, that no lock and no remaining release needs",
    }
)
def prune(c: Context, keep: str = "5", dry_run: bool = False, store: bool = False) -> None:
    """Remove old releases and say what that freed."""
    from sparkpin.commands import releases as commands

    commands.prune(keep=whole("keep", keep, 5), dry_run=dry_run, store=store)


@command(
    help={
        "recipe": RECIPE,
        "release": "tag to serve (default: the current release)",
        "port": "port on this machine (default: of what runs, else the recipe's)",
        "host": "address to listen on (default: of what runs, else 127.0.0.1); a wider one wants an API key of clients",
        "stack": STACK,
        "drain": DRAIN,
        "unit": "print a systemd unit that does this after a reboot, and serve nothing now",
    }
)
def serve(
    c: Context,
    recipe: str | None = None,
    release: str | None = None,
    port: str = "",
    host: str = "",
    stack: str | None = None,
    drain: str = "",
    unit: bool = False,
) -> None:
    """Serve a release, in the place of what is served of its recipe."""
    from sparkpin.commands import serve as commands

    number = whole("port", port, 8001) if port else None
    wait = whole("drain", drain, 60) if drain else None
    commands.serve(recipe=recipe, release=release, stack=stack, port=number, host=host or None, drain=wait, unit=unit)


@command(help={"json": "machine-readable"})
def status(c: Context, json: bool = False) -> None:
    """Say what is served, how it is, and why it died."""
    from sparkpin.commands import serve as commands

    commands.server_status(as_json=json)


@command(
    help={
        "recipe": "whose server (default: the one that runs)",
        "lines": "how many of the last (default: 100)",
        "follow": "go on as they come",
    }
)
def logs(c: Context, recipe: str | None = None, lines: str = "100", follow: bool = False) -> None:
    """Print what a server has written, health checks left out."""
    from sparkpin.commands import serve as commands

    commands.server_logs(recipe=recipe, lines=whole("lines", lines, 100), follow=follow)


@command(help={"recipe": "whose server (default: each that runs of this home)"})
def stop(c: Context, recipe: str | None = None) -> None:
    """Stop what `serve` started."""
    from sparkpin.commands import serve as commands

    commands.stop(recipe=recipe)


@command(
    positional=command_line.recipe_words(sys.argv),
    help={
        "action": "list: those of recipes/; check: find mistakes; import: take a recipe of spark-vllm-docker or "
        "sparkrun over; export: write one for them, with our image",
        "what": "import: a file; export: a name of recipes/; check: either, all of recipes/ when left out; list: none",
        "name": "import: name of the new recipe (default: the file's)",
        "stack": "import, check of a file: stack of pins/stacks/ (default: the one that its container maps to)",
        "stage": "import, export: stage of stages/ (default: base; the recipe's)",
        "no_lock": "import: ask no Hub for the model's commit",
        "format": "export: v1 (spark-vllm-docker) or v2 (sparkrun)",
        "release": "export: tag of a release (default: what the working tree would build)",
        "output": "export: file to write (default: print it)",
    },
)
def recipe(
    c: Context,
    action: str,
    what: str | None = None,
    name: str = "",
    stack: str | None = None,
    stage: str | None = None,
    no_lock: bool = False,
    format: str = "v1",
    release: str | None = None,
    output: str = "",
) -> None:
    """List, check, import and export recipes."""
    from sparkpin.commands import recipe as tasks

    if not tasks.recipe(action, what or "", name=name, stack=stack, stage=stage, lock=not no_lock, form=format,
                        release=release, output=output):  # fmt: skip
        raise Exit(code=4)


@command(
    positional=["tool"],
    help={
        "tool": "opencode, openai, continue or litellm",
        "recipe": "whose server (default: the one that runs, else that of the stack)",
        "url": "how the client reaches it, such as http://spark.local:8000/v1 (default: as this machine does)",
        "key_env": "variable of the client's environment with the API key (default: no key is asked for)",
    },
)
def client(c: Context, tool: str, recipe: str | None = None, url: str = "", key_env: str = "") -> None:
    """Print a configuration for a tool that uses the server."""
    from sparkpin.commands import client as tasks

    tasks.client(tool, recipe=recipe, url=url, key=key_env)


@command(
    help={
        "fast": "the unit tests alone: no engine, no images",
        "all": "every test",
        "rest": "what `invoke test` leaves out",
        "select": "pytest's -k expression",
    }
)
def test(c: Context, fast: bool = False, all: bool = False, rest: bool = False, select: str = "") -> None:
    """Run the unit tests, and the main job for real."""
    from sparkpin.commands import developer

    if code := developer.test(PROJECT, fast=fast, whole=all, rest=rest, select=select):
        raise Exit(code=code)


@command()
def check(c: Context) -> None:
    """Run ruff, mypy, shellcheck and hadolint."""
    from sparkpin.commands import developer

    if code := developer.check(PROJECT):
        raise Exit(code=code)


if command_line.is_invoke(sys.argv[0]) and guarded(command_line.answered)(sys.argv, sys.modules[__name__]):
    raise Exit(code=0)  # invoke, which reads the line next, has nothing left to do
