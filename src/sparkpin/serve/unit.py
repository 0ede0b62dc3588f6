"""A systemd unit that serves a recipe's current release after a reboot. Pure.

Docker's own policy "on-failure" starts a container at boot only where it had no time to end in good order (a power cut:
exit code 255), and "always" has no limit; besides, `serve` looks after what the container is given (tag, checkpoint,
port) before it starts it. One that Docker has started already is left alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

START_MINUTES = 30


def name_of(recipe: str) -> str:
    return f"sparkpin-{recipe}.service"


def quoted(text: str) -> str:
    """As systemd.syntax(7) wants it: no specifier, no variable, one word."""
    for old, new in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        text = text.replace(old, new)
    return f'"{text}"'


def unit_text(
    *,
    recipe: str,
    invoke: Path,
    project: Path,
    env: Mapping[str, str],
    arguments: tuple[str, ...],
    system: bool,
    nodes: Sequence[str] = (),
) -> str:
    """system: for root's systemd, else for a user's own, which knows no units of the system to wait for.

    nodes: URLs of other machines of the recipe, whose engines it waits for: they may take longer to start than this
    one, and `serve` would use up its attempts."""
    wait = "Wants=network-online.target\nAfter=network-online.target docker.service\nRequires=docker.service\n"
    settings = "".join(f"Environment={quoted(f'{name}={value}').replace('$$', '$')}\n" for name, value in env.items())
    until = "until docker -H {} version >/dev/null; do sleep 5; done"
    ready = "".join(f"ExecStartPre=/bin/sh -c {quoted(until.format(shlex.quote(url)))}\n" for url in nodes)
    serve = " ".join(["serve", "--recipe", recipe, *map(quoted, arguments)])
    return (
        f"[Unit]\nDescription=sparkpin serves {recipe}\n{wait if system else ''}"
        "StartLimitIntervalSec=1h\nStartLimitBurst=3\n\n"
        "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f"WorkingDirectory={str(project).replace('%', '%%')}\n{settings}{ready}"
        f"ExecStart={quoted(str(invoke))} {serve}\n"
        f"ExecStop={quoted(str(invoke))} stop --recipe {recipe}\n"
        f"TimeoutStartSec={START_MINUTES}min\nTimeoutStopSec=2min\nRestart=on-failure\nRestartSec=30\n\n"
        f"[Install]\nWantedBy={'multi-user' if system else 'default'}.target\n"
    )


def how_to_install(recipe: str, *, system: bool) -> list[str]:
    name = name_of(recipe)
    if system:
        place, control, more = "/etc/systemd/system", "systemctl", []
    else:
        place, control = "~/.config/systemd/user", "systemctl --user"
        more = ["loginctl enable-linger $USER  # so that it runs before you log in"]
    return [f"invoke serve --unit --recipe {recipe} > {place}/{name}", f"{control} enable --now {name}", *more]
