"""Checkpoints on other machines: in the data directory there, brought by rsync over ssh, and mounted by their path."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from sparkpin.checkpoint.content import OWN, RECORD
from sparkpin.core.errors import DiskError, InputError, NetworkError
from sparkpin.core.progress import ticking
from sparkpin.core.terminal import printable, say
from sparkpin.host.machine import require_program
from sparkpin.host.ssh import OPTIONS, SECONDS, SSH, WITHOUT_PASSWORD, ssh_command, unexpected
from sparkpin.releases.record import Release


def checkpoint_at(url: str, release: Release) -> str:
    """The folder on an ssh host that has the release's checkpoint, "" where none is. InputError for another url,
    NetworkError."""
    return folder_there(url, release, f'if [ -f "$d/{RECORD}" ]; then echo "$d"; fi')


def send_checkpoint(url: str, release: Release, folder: Path, *, deep: bool = False) -> str:
    """Let an ssh host have a checkpoint; its folder there. A file that is there with its size and time stays, one that
    was begun is gone on with, any other goes; the record comes last, for without one nothing is a checkpoint.

    deep: compare what is there byte for byte. Raises what `checkpoint_at` raises, and DiskError.
    """
    there = folder_there(url, release, f'mkdir -p "$d" && rm -f "$d/{RECORD}" && echo "$d"')
    words = ["-rlpts", "--chmod=D755,F444", "--partial-dir=.partial", *(["--checksum"] if deep else [])]
    ends = (f"{folder}/", at(url, f"{there}/"))
    rsync(url, *words, "--delete", *(f"--exclude=/{name}" for name in OWN), *ends)
    rsync(url, *words, f"--include=/{RECORD}", "--exclude=*", *ends)
    return there


def folder_there(url: str, release: Release, script: str) -> str:
    """The checkpoint's folder in the data directory of the user who logs in, as a shell's line prints it, which has its
    name in `d`; "" where it prints nothing. No prune there knows it. NetworkError for anything else that is printed:
    rsync removes what it does not know from where it goes."""
    name = f"carried/{release.model}/{release.checkpoint_key[:16]}"
    home = "${SPARKPIN_HOME:-${XDG_DATA_HOME:-$HOME/.local/share}/sparkpin}"
    found = run_there(url, f'd="{home}/{name}"; {script}')
    if found and not re.fullmatch(rf"/[^\n]+/{name}", found):
        raise unexpected(host_of(url), found, f".../{name}")
    return found


def host_of(url: str) -> str:
    return parts_of(url)["host"]


def parts_of(url: str) -> re.Match[str]:
    """InputError for no URL of an ssh host."""
    if parts := SSH.fullmatch(url):
        return parts
    step = "the same command with the URL of an ssh host"
    raise InputError(f"got {url}, expected ssh://user@host[:port], where rsync brings checkpoints", next_step=step)


def run_there(url: str, script: str) -> str:
    """What a shell's line prints on an ssh host."""
    host, argv = host_of(url), ssh_command(host_of(url), script)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=4 * SECONDS
        )
    except subprocess.TimeoutExpired:
        raise NetworkError(f"{host}: no answer within {4 * SECONDS} s", next_step="the same command again") from None
    if done.returncode:
        cause = printable(" ".join(done.stderr.split())[-600:]) or f"exit code {done.returncode}"
        step = f"`ssh {host}` {WITHOUT_PASSWORD if done.returncode == 255 else 'shows what is wrong there'}"
        raise NetworkError(f"{host}: {cause}", next_step=step)
    return done.stdout.strip()


def at(url: str, path: str) -> str:
    """A path on an ssh host, as rsync names it."""
    return f"{parts_of(url)['login']}:{path}"


def rsync(url: str, *words: str) -> None:
    """Run rsync to or from an ssh host, with its progress. words: options, from where, to where (`at`)."""
    host, port = parts_of(url).group("host", "port")
    shell = shlex.join(["ssh", *OPTIONS, *(("-p", port) if port else ())])
    argv = [require_program("rsync", package="rsync"), "--info=progress2", f"--rsh={shell}", *words]
    shown = "looking at what is there"
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(argv, bufsize=0, stdout=subprocess.PIPE, stderr=errors) as process,
        ticking(lambda: say(f"  rsync, {host}: {shown}")),
    ):
        assert process.stdout
        while lines := process.stdout.read(4096):
            shown = lines.decode(errors="replace").rpartition("\r")[2].strip() or shown
        if process.wait():
            errors.seek(0)
            cause = " ".join(errors.read().decode(errors="replace").split())[-600:] or "rsync failed"
            if "No space left" in cause:
                raise DiskError(f"{host}: {cause}", next_step="free space, then the same command again")
            step = "the same command again, which continues where it was; rsync must be installed there as well"
            raise NetworkError(f"{host}: {cause}", next_step=step)
