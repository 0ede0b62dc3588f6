"""The user's own command as the judge of a combination, with a server of it where that is asked for."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.files import sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.measure.own_server import own_server
from sparkpin.pins.manifests import digest_of
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.record import PRIVATE, Release, to_json
from sparkpin.upgrade.bisect_plan import BisectPlan
from sparkpin.upgrade.bisect_search import Trial
from sparkpin.upgrade.socket_port import listening

UNRESOLVED = (124, 125)  # of `timeout`, and of `git bisect run`


@dataclass(frozen=True)
class Check:
    command: str
    serve: bool  # start a server for it

    def identity(self, plan: BisectPlan) -> str:
        """Names a search: the same one goes on where it was broken off. Files that the command reads, such as a script,
        count by content; those behind a `>` are written. The releases' keys come first: `prune` goes by them."""
        words = re.split(r"[\s;&|()<'\"]+", re.sub(r">+\s*\S+", "", self.command))
        content = [sha256_file(Path(path))[0] for path in map(os.path.expanduser, words) if os.path.isfile(path)]
        search = digest_of([[*plan.changes], self.command, self.serve, content, os.getcwd()])
        return "-".join(key[:12] for key in (plan.good.key, plan.bad.key, search))

    def judge(self, paths: Paths, release: Release, log: Path) -> Trial:
        """The server of a combination has no network, and is behind a port of 127.0.0.1; its log is kept."""
        if not self.serve:
            return run_check(self.command, environment(release, "", log), log)
        try:
            with own_server(paths, engine_of(paths), release) as (server, _), listening(server.socket) as port:
                try:
                    return run_check(self.command, environment(release, f"http://127.0.0.1:{port}", log), log)
                finally:
                    log.with_name(f"{log.stem}-server.log").write_bytes(server.logs()[0])
        except SmokeError as error:
            log.write_text(f"{error.message}\n")
            how = f"does not start: {error.message.splitlines()[0]}"
            return Trial(verdict="unresolved", how=how, started=False)


def environment(release: Release, endpoint: str, log: Path) -> dict[str, str]:
    """What the check gets besides this process's own environment."""
    write_json(record := log.with_name(f"{log.stem}-release.json"), to_json(release), PRIVATE)
    return {
        "SPARKPIN_RELEASE": f"{release.recipe}:{release.name}",
        "SPARKPIN_IMAGE": release.tag,
        "SPARKPIN_COMMAND": shlex.join(release.argv),
        "SPARKPIN_RECORD": str(record),
        "SPARKPIN_MODEL": served_name(release.argv),
        "SPARKPIN_ENDPOINT": endpoint,
    }


def run_check(command: str, env: Mapping[str, str], log: Path) -> Trial:
    """As for `git bisect run` 0 is good, 125 unresolved, any other up to 123 bad. What the command prints goes into the
    log; what it left behind ends with it.

    InputError where the shell cannot run it, or a signal ended it: that shows nothing about a release.
    """
    argv, environ = ["/bin/sh", "-c", command], {**os.environ, **env}
    with (
        log.open("ab") as out,
        Popen(argv, env=environ, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True) as process,
    ):
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    how = f"exit code {code}: {last[:200]}" if last else f"exit code {code}"
    if not 0 <= code <= max(UNRESOLVED):
        step = "correct --check, then run the same command again"
        raise InputError(f"the check {command!r} did not run ({how}; below 0: a signal)", next_step=step)
    if code in UNRESOLVED:
        return Trial(verdict="unresolved", how=how)
    return Trial(verdict="bad" if code else "good", how=how)
