"""One combination of changes: built where it must be, started where that is asked for, and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.make import at_work, build_images, checkpoint_of, fetch_missing
from sparkpin.core import files
from sparkpin.core.errors import BuildError, InputError, IntegrityError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.history.bisect.changes import ReleaseChange
from sparkpin.history.bisect.check import run_check
from sparkpin.history.bisect.endpoint import served
from sparkpin.history.bisect.plan import BisectPlan
from sparkpin.history.bisect.search import Verdict
from sparkpin.host.engine import Engine, engine_of
from sparkpin.pins.vllm_command import served_name
from sparkpin.releases.current import present_ref
from sparkpin.releases.record import Release, release_key, to_json
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve.choose_loader import with_loader
from sparkpin.smoke.server import StartFault

UNFIT = (BuildError, InputError, ManifestError)
"""What says that a combination does not fit together. All else (no disk, no engine, no network) ends the search."""


@dataclass(frozen=True)
class Bench:
    """How combinations are tried. serve: start a server for the check; unstarted_is_bad: one that does not become
    ready, which is unresolved otherwise; limit: seconds that the check may take; folder: of the logs."""

    paths: Paths
    plan: BisectPlan
    check: str
    serve: bool
    unstarted_is_bad: bool
    limit: float
    folder: Path
    say: Say

    def attempt(self, chosen: Sequence[ReleaseChange], number: int) -> tuple[Verdict, str, str]:
        """Verdict, how that was seen, and the log's name."""
        log = self.folder / f"{number:03}.log"
        log.unlink(missing_ok=True)  # of a run that was killed within this trial
        try:
            release, ref = self.made(chosen)
        except UNFIT as error:
            log.write_text(f"{error}\n")
            return "unresolved", f"cannot be made: {first_line(error)}", log.name
        try:
            with self.started(release, chosen, log) as endpoint:
                verdict, how = run_check(self.check, self.told(release, ref, endpoint, log), log, limit=self.limit)
        except StartFault as fault:
            log.write_text(f"{fault}\n")
            word: Verdict = "bad" if self.unstarted_is_bad else "unresolved"
            return word, f"does not start: {str(fault).splitlines()[0]}", log.name
        return verdict, how, log.name

    def made(self, chosen: Sequence[ReleaseChange]) -> tuple[Release, str]:
        """The combination as a release that has no record, and the name of its image in the engine.

        Nothing is asked of an engine where image and check need none.
        """
        plan = self.plan
        argv, env = plan.argv(chosen), plan.env(chosen)
        own = plan.image_of(chosen)
        checkpoint = plan.checkpoint_of(chosen).checkpoint_key
        if own is not None:
            base, image = own, (own.build_key, own.image, own.diff_ids, own.size)
            ref = own.tag
        else:
            assert plan.mixture
            base = plan.good
            with plan.mixture.pairings(plan.of_image(chosen)) as (project, pairings):
                mixed = dataclasses.replace(self.paths, project=project)
                with at_work(mixed) as engine:
                    fetch_missing(mixed, engine, pairings)
                    built = build_images(mixed, engine, pairings)[-1]
            image = (pairings[-1].rendered.key, built.config_digest, built.diff_ids, built.size)
            ref = built.ref
        build_key, digest, diff_ids, size = image
        made = dataclasses.replace(
            base,
            key=release_key(build_key, checkpoint, argv, env),
            build_key=build_key,
            image=digest,
            diff_ids=diff_ids,
            size=size,
            checkpoint_key=checkpoint,
            argv=argv,
            env=env,
            smoke=None,
            state="built",
        )
        return made, ref

    @contextlib.contextmanager
    def started(self, release: Release, chosen: Sequence[ReleaseChange], log: Path) -> Iterator[str]:
        """The address of its server; "" where none is asked for."""
        if not self.serve:
            yield ""
            return
        engine = engine_of(self.paths)
        if why := obstacle(self.paths, engine, release):
            raise InputError(f"{release.tag} cannot be served here: {why}", next_step="leave --serve out, or go there")
        checkpoint = checkpoint_of(self.paths, self.plan.checkpoint_of(chosen))
        gpus = uses_gpu(self.paths, release)
        named = dataclasses.replace(release, tag=self.image_name(engine, release))
        loaded = with_loader(self.paths, named, checkpoint, self.say, gpus=gpus)
        own = log.with_name(f"{log.stem}-server.log")
        with served(self.paths, engine, loaded, checkpoint, self.say, gpus=gpus, log=own) as address:
            yield address

    def image_name(self, engine: Engine, release: Release) -> str:
        """A name under which the engine holds it: a combination has no tag of its own."""
        if (found := present_ref(engine, release)) is None:
            raise IntegrityError(
                f"the image of {release.tag} is not in the engine", next_step=f"invoke rebuild {release.tag}"
            )
        return found

    def told(self, release: Release, ref: str, endpoint: str, log: Path) -> dict[str, str]:
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


def first_line(error: SparkpinError) -> str:
    return error.message.splitlines()[0]
