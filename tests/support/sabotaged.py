"""A server whose checkpoint holds the plugin of `sabotage/`: broken in one way at a time, and mended again."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

from places import PROJECT

from sparkpin.releases.record import Release

PLUGIN = PROJECT / "tests/support/sabotage"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: sparkpin-sabotage\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nsabotage = sparkpin_sabotage:register\n",
}
SECONDS = 300.0  # the engine looks for objects while it may be busy


def installed(release: Release, model: Path) -> Release:
    """The release with the plugin, in the folder of its checkpoint, which the container's user may read now."""
    plugin = model / "sabotage"
    (plugin / "sparkpin_sabotage-0.dist-info").mkdir(parents=True)
    for file in PLUGIN.glob("*.py"):
        shutil.copy(file, plugin)
    for name, text in INFO.items():
        (plugin / "sparkpin_sabotage-0.dist-info" / name).write_text(text)
    readable(model)
    return dataclasses.replace(release, env={**release.env, "PYTHONPATH": "/model/sabotage"})


def readable(model: Path) -> None:
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def switch(folder: Path, name: str) -> None:
    """Return once each process of the server says that it is so; "" mends it. No answer to an earlier call is taken.

    folder: of the server's socket.
    """
    wanted = f"{name} {time.monotonic_ns()}"
    new = folder / "sabotage.new"
    new.write_text(wanted)
    new.rename(folder / "sabotage")
    until = time.monotonic() + SECONDS
    for role in ("api", "engine"):
        done = folder / f"done-{role}"
        while not (said := done.read_text() if done.exists() else "").startswith(wanted):
            assert time.monotonic() < until, f"{role} did not do {wanted!r}: {said}"
            time.sleep(0.05)
        assert said == wanted, said
