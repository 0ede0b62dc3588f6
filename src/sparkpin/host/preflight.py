"""What ./install.sh runs before anything else: look at the machine, say what will be done, install what is missing.

It runs before .venv exists, so it and all that it imports use the standard library alone.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from sparkpin.core.errors import SparkpinError
from sparkpin.core.names import choose
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host import machine

FOLDERS = {"stack": "pins/stacks", "recipe": "recipes", "stage": "stages"}


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser(prog="sparkpin.host.preflight")
    options.add_argument("--dry-run", action="store_true")
    for flag in ("--no-smoke", "--serve", "--yes"):  # of `invoke up`
        options.add_argument(flag, action="store_true")
    for name in (*FOLDERS, "from", "ca"):
        options.add_argument(f"--{name}")
    chosen = options.parse_args(arguments)
    run: list[str] = []

    def install(line: str) -> None:
        run.append(line)
        print(line, flush=True)

    try:
        paths = Paths.from_env()
        for name, folder in FOLDERS.items():
            if value := getattr(chosen, name):
                choose(paths.project / folder, value, name)
        published = getattr(chosen, "from") is not None
        show = partial(print, flush=True)
        look(paths, chosen.stack, published=published, dry_run=chosen.dry_run, show=show, say=install)
    except SparkpinError as error:
        print(f"error: {error}", *([] if run else ["Nothing was changed."]), sep="\n", file=sys.stderr)
        return error.exit_code
    return 0


def look(paths: Paths, stack: str | None, *, published: bool = False, dry_run: bool, show: Say, say: Say) -> None:
    """Raises HostError, with nothing changed, when this machine lacks what only a person can give.

    stack: None for the one for this machine; published: images are to come from a registry; say: is told each command
    that is run, before it runs.
    """
    host = machine.read_host()
    show(f"This machine: {host.summary}. Stack: {stack or machine.default_stack(paths.project, host)}.")
    lacking = machine.missing(paths, host, published=published)
    if not lacking:
        show("It has what is needed; nothing to install.")
        return
    for requirement in lacking:
        show(f"  missing: {requirement.name}: {requirement.detail}")
    commands, others = machine.mending(lacking, host)
    if commands:
        show(f"To be run: {machine.as_root(host, *commands)}")
    for requirement in others:
        if requirement.fix:
            show(f"To be done by you: {requirement.name}: {requirement.fix}")
    if not dry_run:
        machine.install(lacking, host, say)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
