"""Changes of a home by hand, each of which keeps a release from being what its record says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkpin.build.record import BuildRecord, record_file, records_of
from sparkpin.checkpoint.layout import RECORD
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases, release_key

Tamper = Callable[[Paths, Release], None]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def record(change: Callable[[dict[str, Any], BuildRecord], object]) -> Tamper:
    """Of the release's record. change: is given the build record of the stage below, too."""

    def tamper(paths: Paths, release: Release) -> None:
        below = records_of(paths, release)[-2]
        edit(Releases(paths).record_path(release), lambda value: change(value, below))

    return tamper


def build(change: Callable[[dict[str, Any]], object]) -> Tamper:
    return lambda paths, release: edit(record_file(paths, records_of(paths, release)[-1]), change)


def with_key(value: dict[str, Any], **changes: Any) -> None:
    """As a careful enemy: the key fits what was changed."""
    value.update(changes)
    value["key"] = release_key(value["build_key"], value["checkpoint_key"], value["argv"], value["env"])
    value["tag"] = f"{value['tag'][:-12]}{value['key'][:12]}"


def image_of(below: BuildRecord) -> dict[str, Any]:
    return {"image": below.config_digest, "diff_ids": below.diff_ids}


def one_byte(paths: Paths, release: Release) -> None:
    """Of the configuration, whose size stays."""
    path = Releases(paths).checkpoint(release) / "config.json"
    data = path.read_bytes()
    path.unlink()  # it may be a hard link to the cache's file
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def added_file(paths: Paths, release: Release) -> None:
    (Releases(paths).checkpoint(release) / "modeling_own.py").write_text("import os\n")


def missing_file(paths: Paths, release: Release) -> None:
    (Releases(paths).checkpoint(release) / "config.json").unlink()


def other_hash(paths: Paths, release: Release) -> None:
    """Of a file, as its own record names it."""
    path = Releases(paths).checkpoint(release) / RECORD
    data = path.read_text()
    path.unlink()
    path.write_text(data)
    edit(path, lambda value: value["files"]["config.json"].update(sha256="0" * 64))


REMOTE = "--trust-remote-code"
RUN: dict[str, Tamper] = {  # what the four commands have to refuse
    "a flag more": record(lambda value, _: value["argv"].append(REMOTE)),
    "a flag more, and a key that fits": record(lambda value, _: with_key(value, argv=[*value["argv"], REMOTE])),
    "a variable more": record(lambda value, _: value["env"].update(PYTHONPATH="/model")),
    "another image": record(lambda value, below: value.update(image=below.config_digest)),
    "another image and its layers": record(lambda value, below: value.update(image_of(below))),
    "another build": record(lambda value, below: value.update(image_of(below), build_key=below.key)),
    "another checkpoint": record(lambda value, _: value.update(checkpoint_key="0" * 64)),
    "another stack": record(lambda value, _: value.update(stack="spark")),
    "a build record with another configuration": build(lambda value: value.update(config=value["config"] + " ")),
    "a build record without its parent": build(lambda value: value.update(parent_key=None)),
    "a build record of other layers": build(lambda value: value.update(diff_ids=value["diff_ids"][:-1])),
    "no build record": lambda paths, release: record_file(paths, records_of(paths, release)[-1]).unlink(),
    "a byte of the checkpoint": one_byte,
    "a hash in the checkpoint's record": other_hash,
}
MENDED: dict[str, Tamper] = {  # what promote and rollback have to refuse: serve and smoke make it anew
    "a file more in the checkpoint": added_file,
    "a file less in the checkpoint": missing_file,
}
