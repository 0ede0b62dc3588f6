"""What tries newer versions by itself: a systemd timer with its service, and a workflow for a fork. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkpin.core.errors import BumpError
from sparkpin.serve.unit import quoted

HOURS = 12
# Commits of released tags: a tag can be moved.
CHECKOUT = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1"
UPLOAD = "actions/upload-artifact@bbbca2ddaa5d8feaa63e36b76fdaad77386f024f # v7.0.0"


def name_of(recipe: str) -> str:
    return f"sparkpin-bump-{recipe}"


def units(*, recipe: str, invoke: Path, project: Path, env: Mapping[str, str], words: Sequence[str]) -> str:
    """Two files, each below its name, as `systemctl cat` prints them. A refused bump is no failure of the service, and
    the report is written however it ends."""
    settings = "".join(f"Environment={quoted(f'{name}={value}').replace('$$', '$')}\n" for name, value in env.items())
    program = quoted(str(invoke))
    return (
        f"# {name_of(recipe)}.service\n"
        f"[Unit]\nDescription=sparkpin tries newer versions for {recipe}\n\n"
        f"[Service]\nType=oneshot\nWorkingDirectory={str(project).replace('%', '%%')}\n{settings}"
        f"ExecStart={program} bump --recipe {recipe}{''.join(f' {quoted(word)}' for word in words)}\n"
        f"ExecStopPost={program} report\n"
        f"SuccessExitStatus={BumpError.exit_code}\nTimeoutStartSec={HOURS}h\nNice=10\n\n"
        f"# {name_of(recipe)}.timer\n"
        f"[Unit]\nDescription=sparkpin tries newer versions for {recipe} each week\n\n"
        "[Timer]\nOnCalendar=Sun 03:00\nRandomizedDelaySec=1h\nPersistent=true\n\n"
        "[Install]\nWantedBy=timers.target\n"
    )


def how_to_install(recipe: str, *, system: bool) -> list[str]:
    """Lines of a shell."""
    place, control = ("/etc/systemd/system", "systemctl")
    if not system:
        place, control = "$HOME/.config/systemd/user", "systemctl --user"
    split = f"""awk -v to="{place}/" '/^# .*[.](service|timer)$/ {{ file = to $2 }} {{ print > file }}'"""
    return [
        f"mkdir -p {place}; invoke bump --recipe {recipe} --schedule systemd | {split}",
        f"{control} enable --now {name_of(recipe)}.timer",
    ]


def workflow(*, recipe: str, words: Sequence[str]) -> str:
    """For GitHub: it makes a release of the fork's pins, tries newer versions, and keeps the page. It promotes and
    pushes nothing."""
    line = " ".join([".venv/bin/invoke bump --recipe", recipe, *words])
    return f"""\
# .github/workflows/{name_of(recipe)}.yml
name: {name_of(recipe)}
on:
  schedule: [{{cron: "17 3 * * 0"}}]
  workflow_dispatch:
permissions: {{contents: read}}
jobs:
  bump:
    runs-on: ubuntu-24.04
    timeout-minutes: 350
    steps:
      - uses: {CHECKOUT}
      - run: ./install.sh --no-smoke
      - run: .venv/bin/invoke up --recipe {recipe} --yes
      - run: {line} || test $? = {BumpError.exit_code}
      - run: .venv/bin/invoke report --out report.html
        if: always()
      - uses: {UPLOAD}
        if: always()
        with: {{name: report, path: report.html}}
"""
