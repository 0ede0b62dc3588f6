"""A release that this machine cannot serve, with a real engine: it is inspected, and says what is wanting."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import pytest
from private_engine import load_image

from sparkpin.cli import serve as commands_serve
from sparkpin.cli import smoke as task
from sparkpin.core.errors import HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.inspect.run import inspect

pytest_plugins = ["fake_release"]
WHY = "stack spark is for linux/arm64, and this engine's machine is linux/amd64"
PASSED = {"passed": True, "seconds": 20.0, "checks": []}


def test_a_release_for_another_machine_is_inspected_for_real(
    paths: Paths, fake_engine: Engine, release: Release, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    """The fake image holds parts of this machine's Python; its record says that it is of the stack for a Spark.

    It was not built, so there is no build record to hold it against, as tests/adversary does.
    """
    monkeypatch.setattr(task, "require_consistent", lambda *_, **__: None)
    monkeypatch.setattr(task, "engine_of", lambda _: fake_engine)
    records = Releases(paths)
    records.save(dataclasses.replace(release, stack="spark"))
    (done,) = task.smoke_releases(paths, (records.get(release.tag),))
    assert (done.state, done.smoke_why) == ("failed", WHY)
    folder = records.evidence(done) / "smoke"
    assert sorted(file.name for file in folder.iterdir()) == ["inspection.json", "load.log", "result.json"]
    found = json.loads((folder / "inspection.json").read_text())["findings"]
    errors = {(one["rule"], one["subject"]) for one in found if one["severity"] == "error"}
    assert errors == {("files", "/"), ("run", "run start")}
    result = json.loads((folder / "result.json").read_text())
    assert (result["inspected"], result["passed"], result["image"]) == (False, False, release.image)
    monkeypatch.setattr(commands_serve, "engine_of", lambda _: fake_engine)
    with pytest.raises(InputError, match="cannot be served here: stack spark is for linux/arm64"):
        commands_serve.serve(paths, release.tag)
    records.smoked(done.tag, PASSED)
    with pytest.raises(InputError, match="has passed its smoke test, and here it can only be inspected"):
        task.smoke_releases(paths, (records.get(release.tag),))


def test_a_machine_that_cannot_run_the_image_s_programs_is_told_what_to_install(
    paths: Paths, fake_engine: Engine, release: Release
) -> None:
    """As without qemu-user: the kernel knows no way to run the image's Python."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("usr/local/bin/python")
        member.size, member.mode = 8, 0o755
        tar.addfile(member, io.BytesIO(b"\x7fNO-ELF\n"))
    tag = "sparkpin/fake:unknown-code"
    load_image(fake_engine, tag, [buffer.getvalue()])
    info = fake_engine.image(tag)
    assert info
    try:
        with pytest.raises(HostError, match="runs no programs for linux/amd64") as caught:
            inspect(paths, fake_engine, dataclasses.replace(release, tag=tag, image=info.config_digest))
        assert caught.value.next_step == "invoke doctor --stack cpu --fix"
    finally:
        fake_engine.untag(tag)
