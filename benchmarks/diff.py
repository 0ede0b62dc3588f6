"""How long `invoke diff` takes, from records alone: nothing listens where the engine is looked for.

    .venv/bin/python benchmarks/diff.py [--runs 5] [--recipe scripted-tiny]

Compares the first stage's newest release with the last stage's, and the last one with one whose lowest wheels' layer is
another: a copy of its record and listing with every file of that layer changed, in a home of its own. Each time is that
of a whole process; the same work inside one process, and a bare start of the tasks, stand beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sparkpin.build.record import BuildRecord, layer_file, records_of, write_record
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.history import sides
from sparkpin.image.listing import read_contents, write_contents
from sparkpin.releases.record import Release, Releases, release_key

INVOKE = str(Path(sys.executable).parent / "invoke")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--recipe", default="scripted-tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = Paths.from_env()
        shutil.copytree(paths.home, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "server*"))
        paths = dataclasses.replace(paths, home=Path(folder))
        releases = sorted(Releases(paths).of_recipe(options.recipe), key=lambda release: len(release.diff_ids))
        if len(releases) < 2:
            sys.exit(f"recipe {options.recipe} has fewer than two releases; next: invoke build")
        first, last = releases[0], releases[-1]
        other = with_another_base(paths, last)
        env = {**os.environ, "SPARKPIN_HOME": folder, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
        print(f"{'what':44} {'median':>8}  of {options.runs}, worst")
        report("invoke --list", options.runs, lambda: invoke(env, "--list"))
        for name, before, after in (
            (f"{first.stage} -> {last.stage}, one base", first, last),
            (f"{last.stage}, another {changed_layer(paths, last)[1]}", last, other),
        ):
            files = sides.difference(paths, before.tag, after.tag).contents
            assert files and not files.identical
            print(f"{name}: {len(files.added):,} paths in, {len(files.removed):,} out, {len(files.changed):,} changes")
            report("  invoke diff", options.runs, lambda b=before, a=after: invoke(env, "diff", b.tag, a.tag))
            report("  the same in a process that runs", options.runs, lambda b=before, a=after: compare(paths, b, a))


def compare(paths: Paths, before: Release, after: Release) -> None:
    sides.difference(paths, before.tag, after.tag)


def invoke(env: dict[str, str], *arguments: str) -> None:
    subprocess.run([INVOKE, *arguments], env=env, check=True, stdout=subprocess.DEVNULL)


def report(name: str, runs: int, body: Callable[[], None]) -> None:
    body()  # what the disk has to be asked for once
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - started)
    print(f"{name:44} {statistics.median(seconds):6.2f} s  {max(seconds):.2f} s")


def changed_layer(paths: Paths, release: Release) -> tuple[str, str]:
    """(diff ID, name) of the first stage's largest layer by files."""
    base = records_of(paths, release)[0]
    names = {layer.diff_id: layer.name for layer in base.layers if layer.diff_id}
    largest = max(names, key=lambda diff_id: len(read_contents(layer_file(paths, diff_id))))
    return largest, names[largest]


def with_another_base(paths: Paths, release: Release) -> Release:
    """A release like another, but for the contents of every file in one layer of its first stage."""
    old = changed_layer(paths, release)[0]
    contents = read_contents(layer_file(paths, old))
    new = "sha256:" + hashlib.sha256(old.encode()).hexdigest()
    write_contents(
        layer_file(paths, new),
        tuple(
            dataclasses.replace(entry, sha256=entry.sha256[::-1]) if entry.kind == "file" else entry
            for entry in contents
        ),
    )
    parent: BuildRecord | None = None
    for record in records_of(paths, release):
        key = hashlib.sha256(record.key.encode()).hexdigest()
        parent = record.model_copy(
            update={
                "key": key,
                "parent_key": parent.key if parent else None,
                "config_digest": f"sha256:{key}",
                "diff_ids": [new if diff_id == old else diff_id for diff_id in record.diff_ids],
            }
        )
        write_record(paths, parent)
    assert parent
    key = release_key(parent.key, release.checkpoint_key, release.argv, release.env)
    made = dataclasses.replace(
        release,
        key=key,
        tag=tag_of(release.recipe, release.stage, key),
        build_key=parent.key,
        image=parent.config_digest,
        diff_ids=tuple(parent.diff_ids),
        state="built",
    )
    Releases(paths).save(made)
    return made


if __name__ == "__main__":
    main()
