"""The user's own command, as `git bisect run` takes one: 0 is good, 125 is unresolved, any other up to 124 is bad."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from sparkpin.core.errors import InputError
from sparkpin.history.bisect.search import Verdict

SKIP, CANNOT = 125, (126, 127)
STEP = "correct --check, then run the same command again"


def run_check(command: str, env: Mapping[str, str], log: Path, *, limit: float) -> tuple[Verdict, str]:
    """The verdict and what was seen. What the command prints goes into the log; its group ends with it.

    InputError where the shell cannot run it, or a signal ended it: that says nothing of a release.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return "unresolved", f"the check took more than {limit:.0f} s"
        finally:
            end(process)
    if code in CANNOT or code < 0 or code > 127:
        why = f"signal {-code} ended it" if code < 0 else f"exit code {code}"
        raise InputError(f"the check {command!r} did not run: {why} ({last_line(log)})", next_step=STEP)
    if code == SKIP:
        return "unresolved", "the check says so (125)"
    return ("good", "exit code 0") if code == 0 else ("bad", f"exit code {code}: {last_line(log)}")


def end(process: subprocess.Popen[bytes]) -> None:
    """With what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")
