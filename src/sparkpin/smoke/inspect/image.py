"""The files of an image that is not run, and what is known of it beforehand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import progress
from sparkpin.core.scratch import saving_folder
from sparkpin.core.terminal import Say
from sparkpin.host import image_files
from sparkpin.host.engine import Engine
from sparkpin.smoke.inspect.tree import FoundPath, in_archive, in_folders

STACK, STAGE = "sparkpin.stack", "sparkpin.stage"  # labels


@dataclass(frozen=True)
class Opened:
    files: Iterator[FoundPath]  # each may be read until the next one is asked for
    platform: str = ""  # "linux/arm64"; "" where nothing says it
    env: Mapping[str, str] = field(default_factory=dict)
    stack: str = ""
    stage: str = ""


@contextlib.contextmanager
def open_image(paths: Paths, engine: Engine, ref: str, say: Say) -> Iterator[Opened]:
    """An image of the engine. Its layers' folders are read where they lie, where that is possible; else the engine
    exports all files, from a container that never runs."""
    info = engine.image(ref)
    if info is None:
        raise InputError(
            f"the engine has no image {ref}", next_step="invoke images lists the releases and their images"
        )
    env = dict(row.partition("=")[::2] for row in info.config.get("Env") or ())
    with contextlib.ExitStack() as stack:
        folders = image_files.layer_folders(engine, ref)
        if folders:
            say(f"reading {len(folders)} layers where the engine keeps them")
            files = in_folders(folders)
        else:
            say("the engine exports the files")
            work = stack.enter_context(saving_folder(paths))
            came = stack.enter_context(progress(say, info.size))
            files = in_archive(stack.enter_context(image_files.exported(engine, ref, came)), work)
        platform = f"{info.os}/{info.architecture}"
        yield Opened(files, platform, env, info.labels.get(STACK, ""), info.labels.get(STAGE, ""))
