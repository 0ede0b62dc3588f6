"""One combination of changes: built where it must be, started where that is asked for, and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.make import at_work, build_images, checkpoint_of, fetch_missing
from sparkpin.core import files
from sparkpin.core.errors import BuildError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import engine_of
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.container import ready_timeout, require_readable
from sparkpin.releases.current import present_ref
from sparkpin.releases.record import Release, release_key, to_json
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve.socket_port import listening
from sparkpin.smoke.client import Client
from sparkpin.smoke.server import alone
from sparkpin.smoke.server import started as start_server
from sparkpin.smoke.startup import StartFault
from sparkpin.upgrade.bisect.changes import ReleaseChange
from sparkpin.upgrade.bisect.plan import BisectPlan
from sparkpin.upgrade.bisect.search import Verdict
from sparkpin.upgrade.bisect.state import Trial

UNFIT = (BuildError, InputError, ManifestError)
"""What says that a combination does not fit together. All else (no disk, no engine, no network) ends the search."""
SKIP, CANNOT = 125, (126, 127)


@dataclass(frozen=True)
class Bench:
    """How combinations are tried."""

    paths: Paths
    plan: BisectPlan
    check: str
    serve: bool  # start a server for the check
    unstarted_is_bad: bool  # one that does not become ready, which is unresolved otherwise
    limit: float  # seconds that the check may take
    folder: Path  # of the logs
    say: Say

    def attempt(self, chosen: Sequence[ReleaseChange], number: int) -> Trial:
        began = time.monotonic()
        verdict, how, started = self.outcome(chosen, log := self.folder / f"{number:03}.log")
        seconds, ids = round(time.monotonic() - began, 1), sorted(change.id for change in chosen)
        return Trial(chosen=ids, verdict=verdict, how=how, started=started, seconds=seconds, log=log.name)

    def outcome(self, chosen: Sequence[ReleaseChange], log: Path) -> tuple[Verdict, str, bool]:
        """Verdict, how that was seen, and whether a server became ready, or none was to."""
        log.unlink(missing_ok=True)  # of a run that was killed within this trial
        try:
            release, ref = self.made(chosen)
        except UNFIT as error:
            log.write_text(f"{error}\n")
            return "unresolved", f"cannot be made: {error.message.splitlines()[0]}", True
        try:
            verdict, how = self.judged(release, ref, chosen, log)
        except StartFault as fault:
            log.write_text(f"{fault}\n")
            word: Verdict = "bad" if self.unstarted_is_bad else "unresolved"
            return word, f"does not start: {str(fault).splitlines()[0]}", False
        return verdict, how, True

    def judged(self, release: Release, ref: str, chosen: Sequence[ReleaseChange], log: Path) -> tuple[Verdict, str]:
        with self.started(release, chosen, log) as endpoint:
            return run_check(self.check, self.check_env(release, ref, endpoint, log), log, limit=self.limit)

    def made(self, chosen: Sequence[ReleaseChange]) -> tuple[Release, str]:
        """The combination as a release that has no record, and the name of its image in the engine.

        Nothing is asked of an engine where image and check need none.
        """
        plan = self.plan
        argv, env = plan.argv(chosen), plan.env(chosen)
        checkpoint = plan.checkpoint_of(chosen).checkpoint_key
        if base := plan.image_of(chosen):
            ref = base.tag
        else:
            assert plan.mixture
            with plan.mixture.pairings(plan.of_image(chosen)) as (project, pairings):
                mixed = dataclasses.replace(self.paths, project=project)
                with at_work(mixed) as engine:
                    fetch_missing(mixed, engine, pairings)
                    built = build_images(mixed, engine, pairings)[-1]
            ref = built.ref
            base = dataclasses.replace(
                plan.good,
                build_key=pairings[-1].rendered.key,
                image=built.config_digest,
                diff_ids=built.diff_ids,
                size=built.size,
            )
        made = dataclasses.replace(
            base,
            key=release_key(base.build_key, checkpoint, argv, env),
            checkpoint_key=checkpoint,
            argv=argv,
            env=env,
            smoke=None,
            state="built",
        )
        return made, ref

    @contextlib.contextmanager
    def started(self, release: Release, chosen: Sequence[ReleaseChange], log: Path) -> Iterator[str]:
        """The address of its server, once it answers; "" where none is asked for. StartFault where it does not.

        It is the smoke test's container, which has no network, behind a port of 127.0.0.1. Waits for a smoke test of
        the same home to end, and removes what killed runs left. The server's log is kept, however that ends.
        """
        if not self.serve:
            yield ""
            return
        paths, say, engine = self.paths, self.say, engine_of(self.paths)
        if why := obstacle(paths, engine, release):
            raise InputError(f"{release.tag} cannot be served here: {why}", next_step="leave --serve out, or go there")
        checkpoint = checkpoint_of(paths, self.plan.checkpoint_of(chosen))
        gpus = uses_gpu(paths, release)
        if (ref := present_ref(engine, release)) is None:
            raise IntegrityError(
                f"the image of {release.tag} is not in the engine", next_step=f"invoke reproduce {release.tag} --keep"
            )
        named = dataclasses.replace(release, tag=ref)  # a combination has no tag of its own
        require_readable(checkpoint)
        with alone(paths, engine, say):
            timeout = ready_timeout(checkpoint)
            with start_server(paths, engine, named, checkpoint, gpus=gpus, timeout=timeout, say=say) as server:
                try:
                    with Client.unix(server.socket) as client:
                        server.wait_ready(client)
                    with listening(server.socket) as port:
                        yield f"http://127.0.0.1:{port}"
                finally:
                    log.with_name(f"{log.stem}-server.log").write_bytes(server.log())

    def check_env(self, release: Release, ref: str, endpoint: str, log: Path) -> dict[str, str]:
        """The environment of the check."""
        record = log.with_suffix(".json")
        files.write_json(record, to_json(release))
        return {
            "SPARKPIN_RELEASE": f"{release.recipe}:{release.name}",
            "SPARKPIN_IMAGE": ref,
            "SPARKPIN_COMMAND": shlex.join(release.argv),
            "SPARKPIN_ENV": json.dumps(release.env, sort_keys=True),
            "SPARKPIN_RECORD": str(record),
            "SPARKPIN_MODEL": served_name(release.argv),
            "SPARKPIN_ENDPOINT": endpoint,
        }


def run_check(command: str, env: Mapping[str, str], log: Path, *, limit: float) -> tuple[Verdict, str]:
    """The verdict on the user's own command, and what was seen: as for `git bisect run` 0 is good, 125 unresolved, any
    other up to 124 bad. What the command prints goes into the log; what it left behind ends with it.

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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code in CANNOT or code < 0 or code > 127:
        why = f"signal {-code} ended it" if code < 0 else f"exit code {code}"
        step = "correct --check, then run the same command again"
        raise InputError(f"the check {command!r} did not run: {why} ({last_line(log)})", next_step=step)
    if code == SKIP:
        return "unresolved", "the check says so (125)"
    return ("good", "exit code 0") if code == 0 else ("bad", f"exit code {code}: {last_line(log)}")


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it printed nothing")
