"""A release of an earlier commit of the project, built again by that commit's own code in an engine of its own.

Today's sparkpin gives the private engine, the store (each file held against the old lock) and the comparison. The old
code runs with the packages of this environment; where they are others than it locked, that is said.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build import digests
from sparkpin.build.make import fetch_locked
from sparkpin.build.record import BuildRecord, read_record, records_with_key
from sparkpin.build.reproduce import Reproduction, StageResult, clear_leftovers, private_engine, scratch
from sparkpin.core.errors import BuildError, HostError, InputError, ManifestError
from sparkpin.core.files import disk_errors
from sparkpin.core.paths import PROJECT, Paths
from sparkpin.core.terminal import Say
from sparkpin.host.machine import this_platform
from sparkpin.pins import manifests

SHOWN = re.compile(r"^# (sparkpin/stack-(?P<stack>.+):.+-(?P<key>[0-9a-f]{12}))$", re.M)
"""What `invoke render` has always begun with."""


@dataclass(frozen=True)
class Made:
    """One image that the old code built, read of its record as plain JSON: that of another time may have other keys."""

    stage: str
    key: str
    image: str
    diff_ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Code:
    """A commit's own code in a folder of its own. env: of its processes."""

    commit: str
    folder: Path
    env: Mapping[str, str]

    def run(self, *arguments: str, **env: str) -> str:
        """What a task prints; its progress goes where ours does. BuildError when it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "invoke", *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise BuildError(
                f"the code of {self.commit[:12]}: invoke {' '.join(arguments)} ended with {done.returncode}, for the "
                "reason above",
                next_step="name a --recipe and --stage of that commit; or mend what it says, and the same again",
            )
        return done.stdout


def reproduce_commit(paths: Paths, commit: str, recipe: str | None, stage: str | None, say: Say) -> Reproduction:
    """Build what a commit's pins, stages and mods give, and hold it against what was published then, or recorded here.

    InputError for an unknown commit, a project that is no checkout of Git, and where there is nothing to compare with.
    """
    full = commit_of(paths.project, commit)
    say(f"building commit {full[:12]} again by its own code, in an engine of its own")
    chosen = [*(("--recipe", recipe) if recipe else ()), *(("--stage", stage) if stage else ())]
    clear_leftovers(paths, say)
    with scratch(paths, say) as own:
        code = code_of(paths.project, full, own)
        shown = SHOWN.search(code.run("render", *chosen))
        if shown is None:
            raise BuildError(f"{full[:12]}: its `invoke render` does not name the image", next_step="a newer commit")
        stack = shown["stack"]
        where = f"{digests.file_of(stack)} of {full[:12]}"
        wanted = digests.load(code.folder, stack)
        if wanted is None:
            where, wanted = f"the records of {paths.images}", recorded(paths, stack, shown["key"])
        if wanted is None:
            raise InputError(
                f"{full[:12]} publishes no digests ({digests.file_of(stack)}), and no build of {shown[1]} is recorded "
                f"in {paths.images}: there is nothing to compare with",
                next_step=f"a commit of: git log --oneline -- {digests.FOLDER}",
            )
        notes = [f"built by the code of {full[:12]}, compared with {where}", packages(code.folder, paths.project)]
        notes += fetched(Paths(code.folder, paths.cache, paths.home), stack)
        with private_engine(paths, own, say) as (engine, version):
            code.run("build", *chosen, **engine.host)
        if not (chain := made_in(own.images)):
            raise BuildError(f"{full[:12]}: its build left no record in {own.images}", next_step="a newer commit")
        results = [result(wanted, chain[:end], where) for end in range(1, len(chain) + 1)]
    return Reproduction(f"{shown[1]} of {full[:12]}", version, tuple(results), tuple(notes))


def git(project: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    if shutil.which("git") is None:
        raise HostError("an earlier commit is read by git, which is not there", next_step="apt-get install git")
    # As root in a user's clone: its code is run by root anyway.
    safe = f"safe.directory={project.resolve()}"
    return subprocess.run(["git", "-c", safe, "-C", project, *arguments], capture_output=True)


def commit_of(project: Path, commit: str) -> str:
    top = git(project, "rev-parse", "--show-toplevel")
    if top.returncode or Path(os.fsdecode(top.stdout.rstrip(b"\n"))).resolve() != project.resolve():
        said = os.fsdecode(top.stderr).strip().partition("\n")[0]
        raise InputError(
            f"{project} is no checkout of Git{f' ({said})' if said else ''}: it has no earlier commits",
            next_step="run it in a clone of the project",
        )
    found = git(project, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if found.returncode:
        raise InputError(
            f"--commit: saw {commit!r}, wanted a commit that {project} has",
            next_step="git log --oneline names them; git fetch --unshallow brings those that a shallow clone lacks",
        )
    return found.stdout.decode().strip()


def code_of(project: Path, commit: str, own: Paths) -> Code:
    """The commit's files beside its state folders, without Git's. No key of ours signs what it builds."""
    folder = own.cache.parent / "project"
    with disk_errors(own.cache.parent):
        folder.mkdir()
    archive = git(project, "archive", "--format=tar", commit)
    if archive.returncode:
        raise HostError(f"git archive {commit[:12]}: {os.fsdecode(archive.stderr).strip()}", next_step="git fsck")
    with disk_errors(folder), tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    if not (folder / "src/sparkpin").is_dir() or not (folder / "tasks.py").is_file():
        raise InputError(f"{commit[:12]} holds no sparkpin: no src/sparkpin and tasks.py", next_step="a newer commit")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPARKPIN_")}
    state = {"SPARKPIN_CACHE": str(own.cache), "SPARKPIN_HOME": str(own.home), "XDG_CONFIG_HOME": str(own.home)}
    return Code(commit, folder, {**env, **state, "PYTHONPATH": str(folder / "src"), PROJECT: str(folder)})


def recorded(paths: Paths, stack: str, key: str) -> digests.Published | None:
    """What this machine built under a build key (its first 12 digits), and below it."""
    chain: list[BuildRecord] = []
    found = [read_record(path) for path in sorted(paths.images.glob(f"{stack}-*-{key}.json"))]
    while found:
        chain.insert(0, found[0])
        parent = found[0].parent_key
        found = [record for _, record in records_with_key(paths, stack, parent)] if parent else []
    below = [0, *(len(record.diff_ids) for record in chain)]
    images = {one.stage: digests.entry_of(one, under) for one, under in zip(chain, below, strict=False)}
    return digests.Published(images=images) if images else None


def packages(folder: Path, project: Path) -> str:
    """What the code ran with, beside what the commit locked: uv, of them, goes into the build keys."""
    locks = [file.read_text() if (file := one / "requirements.lock").is_file() else "" for one in (folder, project)]
    then, now = (set(re.findall(r"^[\w.-]+==\S+", lock, re.M)) for lock in locks)
    if not then:
        return "that commit locks no packages of its own; it ran with today's"
    other = sorted(then - now)
    return f"it ran with today's packages, not with {', '.join(other)}" if other else "it ran with what it locked"


def fetched(paths: Paths, stack: str) -> Iterator[str]:
    """The store gets what it lacks of the old lock; what nobody offers any more is told with where a copy is."""
    try:
        wanted = manifests.load_stack(paths.project, stack)
        fetch_locked(paths, wanted, manifests.load_stack_lock(paths.project, wanted), this_platform())
    except (ManifestError, InputError) as error:
        yield f"today's sparkpin cannot read those pins, so the old code fetched by itself ({error.message})"


def made_in(images: Path) -> list[Made]:
    """First stage first: each stands on the layers of the one before."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in images.glob("*.json")]
    parents = {row["parent_key"]: row for row in rows}
    chain, row = list[Made](), parents.get(None)
    while row:
        ids = tuple(row["diff_ids"])
        chain.append(Made(row["stage"], row["key"], row["config_digest"], ids, float(row["seconds"])))
        row = parents.get(row["key"])
    return chain


def result(wanted: digests.Published, chain: list[Made], where: str) -> StageResult:
    made, known = chain[-1], wanted.images.get(chain[-1].stage)
    held = digests.hold(wanted, chain, made.image, made.diff_ids)
    lines: tuple[str, ...] = ()
    if held is None:
        other = "another build key" if known else "nothing"
        lines = (f"{where}: {other} for this stage; here it is {made.key}, as tools of the build are others",)
    elif held.difference:
        lines = (held.difference,)
    asked = held.wanted if held else known.image if known else ""
    same = held is not None and not held.difference
    return StageResult(
        made.stage, "identical" if same else "different", asked, made.image, len(made.diff_ids), made.seconds, lines
    )
