"""What ./install.sh runs before anything else: look at the machine, say what will be done, install what is missing.

It runs before .venv exists, so it and all that it imports use the standard library alone.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable

from sparkpin import host as hosts
from sparkpin.errors import SparkpinError
from sparkpin.paths import Paths


def main(arguments: list[str]) -> int:
    options = argparse.ArgumentParser(prog="sparkpin.preflight")
    options.add_argument("--dry-run", action="store_true")
    dry_run = options.parse_args(arguments).dry_run
    paths = Paths.from_env()
    try:
        look(paths, dry_run=dry_run, show=lambda line: print(line, flush=True))
    except SparkpinError as error:
        print(f"error: {error}\nNothing was changed.", file=sys.stderr)
        return error.exit_code
    return 0


def look(paths: Paths, *, dry_run: bool, show: Callable[[str], None]) -> None:
    """Raises HostError, with nothing changed, when this machine lacks what only a person can give."""
    host = hosts.read_host()
    stack = hosts.default_stack(paths.project, host)
    show(f"This machine: {host.fingerprint}. Stack: {stack}.")
    lacking = hosts.missing(paths, host)
    if not lacking:
        show("It has what is needed; nothing to install.")
        return
    for requirement in lacking:
        show(f"  missing: {requirement.name}: {requirement.detail}")
    packages = sorted({package for requirement in lacking for package in requirement.packages})
    show("To be run: " + " && ".join(shlex.join(c) for c in hosts.apt_commands(packages, sudo=not host.is_root)))
    if not dry_run:
        hosts.install(lacking, host, show)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
