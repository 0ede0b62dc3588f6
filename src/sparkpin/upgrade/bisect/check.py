"""The user's own command as the judge of a combination, with a server of it where that is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.files import sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.measure.own_server import own_server
from sparkpin.pins.manifests import digest_of
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.record import PRIVATE, Release, to_json
from sparkpin.serve.socket_port import listening
from sparkpin.upgrade.bisect.plan import BisectPlan
from sparkpin.upgrade.bisect.search import Verdict
from sparkpin.upgrade.bisect.state import Trial

SKIP, CANNOT = 125, (126, 127)


@dataclass(frozen=True)
class Check:
    command: str
    serve: bool  # start a server for it
    unstarted_is_bad: bool  # a server that does not become ready, which is unresolved otherwise
    limit: int  # seconds that it may take

    def identity(self, plan: BisectPlan) -> str:
        """Names a search: the same one goes on where it was broken off. Files that the check names count by content."""
        try:
            words = ["", *shlex.shlex(self.command, posix=True, punctuation_chars=True)]
        except ValueError as error:
            raise InputError(f"--check: {error}", next_step="quote the command for your shell") from None
        read = [word for before, word in pairwise(words) if ">" not in before]  # the others are written
        scripts = [Path(os.path.expanduser(word)) for word in read]
        content = [sha256_file(path)[0] for path in scripts if os.path.isfile(path)]
        ends = [plan.good.key, plan.bad.key, *(change.id for change in plan.changes)]
        return digest_of([ends, dataclasses.asdict(self), content, os.getcwd()])[:12]

    def judge(self, paths: Paths, release: Release, log: Path) -> Trial:
        """The server of a combination has no network, and is behind a port of 127.0.0.1; its log is kept."""
        if not self.serve:
            return run_check(self.command, environment(release, "", log), log, limit=self.limit)
        try:
            with own_server(paths, engine_of(paths), release, 0) as own, listening(own.server.socket) as port:
                try:
                    env = environment(release, f"http://127.0.0.1:{port}", log)
                    return run_check(self.command, env, log, limit=self.limit)
                finally:
                    log.with_name(f"{log.stem}-server.log").write_bytes(own.server.log())
        except SmokeError as error:
            log.write_text(f"{error.message}\n")
            verdict: Verdict = "bad" if self.unstarted_is_bad else "unresolved"
            return Trial(verdict=verdict, how=f"does not start: {error.message.splitlines()[0]}", started=False)


def environment(release: Release, endpoint: str, log: Path) -> dict[str, str]:
    """What the check gets besides this process's own environment."""
    write_json(record := log.with_suffix(".json"), to_json(release), PRIVATE)
    return {
        "SPARKPIN_RELEASE": f"{release.recipe}:{release.name}",
        "SPARKPIN_IMAGE": release.tag,
        "SPARKPIN_COMMAND": shlex.join(release.argv),
        "SPARKPIN_RECORD": str(record),
        "SPARKPIN_MODEL": served_name(release.argv),
        "SPARKPIN_ENDPOINT": endpoint,
    }


def run_check(command: str, env: Mapping[str, str], log: Path, *, limit: float) -> Trial:
    """As for `git bisect run` 0 is good, 125 unresolved, any other up to 124 bad. What the command prints goes into the
    log; what it left behind ends with it.

    InputError where the shell cannot run it, or a signal ended it: that shows nothing about a release.
    """
    argv, environ = ["/bin/sh", "-c", command], {**os.environ, **env}
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return Trial(verdict="unresolved", how=f"the check took more than {limit:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = next(
        (line.strip()[:200] for line in reversed(log.read_text(errors="replace").split("\n")) if line.strip()), ""
    )
    if code in CANNOT or not 0 <= code <= 127:
        why = f"signal {-code} ended it" if code < 0 else f"exit code {code}"
        step = "correct --check, then run the same command again"
        raise InputError(f"the check {command!r} did not run: {why} ({last})", next_step=step)
    if code == SKIP:
        return Trial(verdict="unresolved", how="exit code 125")
    return Trial(verdict="bad" if code else "good", how=f"exit code {code}" + f": {last}" * bool(code and last))
