"""A program that may run for hours: told of while it runs, ended when it says nothing or takes too long."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from sparkpin.core import terminal
from sparkpin.core.terminal import Say

EVERY = 15.0  # seconds between two lines
TAIL = 2000  # bytes


class Overdue(Exception):
    """It was ended. The text says why; `written` is what it had written."""

    def __init__(self, why: str, written: str) -> None:
        super().__init__(why)
        self.written = written


def run(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], limit: float, silent: float, say: Say
) -> subprocess.CompletedProcess[str]:
    """What it wrote to either of its outputs, in order, is `stdout`. What it started ends with it.

    limit: seconds that it may take; silent: without a word. Raises Overdue.
    """
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            why = watch(process, out, limit, silent, say)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        out.seek(0)
        text = out.read().decode(errors="replace")
    if why:
        raise Overdue(why, text)
    return subprocess.CompletedProcess(argv, code, text)


def watch(process: subprocess.Popen[bytes], out: IO[bytes], limit: float, silent: float, say: Say) -> str:
    """Until it ends: "", or why it should."""
    began = spoke = told = time.monotonic()
    size, line = 0, ""
    while True:
        try:
            process.wait(timeout=min(1.0, limit, silent))
            return ""
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if (grown := os.fstat(out.fileno()).st_size) != size:
            size, spoke = grown, now
        if now - began > limit:
            return f"it took more than {limit:.0f} s"
        if now - spoke > silent:
            return f"it said nothing for {silent:.0f} s"
        if now - told > EVERY:
            told, former, line = now, line, last_line(out, size)
            say(f"  {line}" if line != former else f"  {now - began:.0f} s; for {now - spoke:.0f} s nothing new")


def last_line(out: IO[bytes], size: int) -> str:
    """A progress bar draws itself again and again on one line."""
    text = os.pread(out.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    return terminal.printable(lines[-1])[-120:] if lines else ""
