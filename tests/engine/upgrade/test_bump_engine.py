"""A bump of a made-up project with real locks, images, evidence, search and promotion.

Only root file system and answers of a server are replaced: the smoke test looks for a file in the image, which a
wheel brings. The images hold no vLLM and their model no tensors, so quality, speed and checkpoint are not looked at.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import stack_samples
import tiny_images
from private_engine import remove_built
from typed import typed
from wheelhouse import Index, make_wheel

from sparkpin.build import consistent, make, rootfs
from sparkpin.build.pair import pair
from sparkpin.build.record import record_file, records_of
from sparkpin.core.errors import IntegrityError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.stack import lock_stack
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bump_record import bumps_of
from sparkpin.upgrade.bump_steps import Candidate

BASE = tiny_images.BASE.replace("FROM {{ parent_ref }} AS config", "{tree}FROM {{ parent_ref }} AS config", 1).replace(
    "{tree}", "FROM scratch AS rest-tree\nCOPY wheels/rest/ /opt/rest/\n"
)
BASE += "COPY --from=rest-tree / /\n"
FAULT = "beta-1.2-py3-none-any.whl"


def look(release: Release) -> str:
    argv = ["docker", "run", "--rm", "--network", "none", release.tag, "/bin/sh", "-c", f"test ! -e /opt/rest/{FAULT}"]
    if subprocess.run(argv).returncode:
        raise SmokeError("chat: no answer")
    return "passed"


@pytest.fixture
def looked() -> list[str]:
    """The releases whose images the smoke test has looked into."""
    return []


@pytest.fixture
def current(
    tmp_path: Path, index: Index, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Paths, str]]:
    name = f"test{uuid.uuid4().hex[:8]}"
    paths = tiny_images.whole(tmp_path, name, name.encode())
    tiny_images.write(paths.project / "dockerfiles/base.j2", BASE)
    stack = paths.project / f"pins/stacks/{name}.yaml"
    tiny_images.write(stack, stack.read_text().replace("requirements: []", "requirements: [app==1.0]"))
    make_wheel(index.folder, "app", requires=["alpha", "beta", "gamma"])
    for part in ("alpha", "beta", "gamma"):
        make_wheel(index.folder, part)
    debs = stack_samples.locked(paths).debs
    tar = tiny_images.make_rootfs(tmp_path / "rootfs.tar")
    monkeypatch.setattr(lock_module, "debian_closure", lambda root, stack: debs)
    monkeypatch.setattr(rootfs, "build_rootfs", lambda *args: tar)
    for key, value in (("PROJECT", paths.project), ("HOME", paths.home), ("CACHE", paths.cache)):
        monkeypatch.setenv(f"SPARKPIN_{key}", str(value))
    (paths.project / f"pins/stacks/{name}.lock").unlink()
    lock_stack(paths, name)
    with make.at_work(paths) as engine:
        pairings = pair(paths.project, name)
        make.fetch_missing(paths, engine, pairings)
        release = list(make.build_releases(paths, engine, pairings))[-1]
    good = {"passed": True, "seconds": 1.0, "checks": []}
    records = Releases(paths)
    records.smoked(release.tag, good)
    records.checkpoint(release).mkdir(parents=True)
    whole = consistent.require_consistent
    monkeypatch.setattr(consistent, "require_consistent", lambda *known, **more: whole(*known))
    with records.locked(name):
        records.point(records.get(release.tag))

    def smoke(self: Candidate, made: Release, *, record: bool) -> str:
        looked.append(made.tag)
        said = look(made)
        if record:
            Releases(self.paths).smoked(made.tag, good)
        return said

    monkeypatch.setattr(Candidate, "smoke", smoke)
    for step in ("inspect", "quality", "speed"):  # the made-up images have no Python
        monkeypatch.setattr(Candidate, step, lambda *_, **options: "not asked")
    yield paths, name
    remove_built(Engine.connect(), paths, name)


def test_a_bad_wheel_among_good_ones_is_named_and_without_it_the_rest_is_promoted(
    current: tuple[Paths, str], looked: list[str], index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, name = current
    records = Releases(paths)
    former = records.current_tag(name)
    for part, version in (("alpha", "1.1"), ("beta", "1.2"), ("gamma", "1.3")):
        make_wheel(index.folder, part, version)
    before = {path: path.read_bytes() for path in paths.project.rglob("*") if path.is_file()}
    line = f"bump --recipe {name} --hold 0 --apply"
    code, out, err = typed(line, capsys)
    assert code == 19 and "~ wheel beta: 1.0 -> 1.2\n" in out, f"{out}\n{err}"
    assert before == {path: path.read_bytes() for path in paths.project.rglob("*") if path.is_file()}
    assert records.current_tag(name) == former
    [refused] = bumps_of(paths, name)
    assert [step.name for step in refused.steps] == ["build", "inspect", "smoke"]
    assert not records.get(refused.release).is_good
    assert refused.verdict == "stay" and refused.reason.startswith("smoke: ")
    assert refused.guilty == "~ wheel beta: 1.0 -> 1.2"
    looked.clear()
    code, out, _ = typed(line, capsys)
    assert code == 19 and refused.guilty in out and not looked, "a refusal is known, and costs nothing again"
    (index.folder / FAULT).unlink()
    code, out, err = typed(line.removesuffix(" --apply"), capsys)
    assert code == 0 and "~ wheel alpha: 1.0 -> 1.1" in out and records.current_tag(name) == former, f"{out}\n{err}"
    assert before == {path: path.read_bytes() for path in paths.project.rglob("*") if path.is_file()}
    looked.clear()
    code, out, err = typed(line, capsys)
    assert code == 0 and not looked, f"{out}\n{err}"
    assert {bump.verdict for bump in bumps_of(paths, name)} == {"stay", "promote"}
    assert records.current_tag(name) not in (former, refused.release)
    text = (paths.project / f"pins/stacks/{name}.lock").read_text()
    assert "alpha-1.1-" in text and "gamma-1.3-" in text and "beta-1.0-" in text
    assert pair(paths.project, name)[-1].tag == records.current_tag(name), "the pins make what is current"


def test_other_bytes_than_the_index_tells_stay(
    current: tuple[Paths, str], index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index names one hash, and sends another file."""
    paths, name = current
    make_wheel(index.folder, "alpha", "1.1")
    index.stale["alpha-1.1-py3-none-any.whl"] = (index.folder / "alpha-1.0-py3-none-any.whl").read_bytes()
    code, _, err = typed(f"bump --recipe {name} --hold 0 --apply", capsys)
    [refused] = bumps_of(paths, name)
    assert code == 19 and "alpha-1.1" in err and [step.name for step in refused.steps] == ["build"], err


def test_a_current_release_that_is_damaged_is_no_verdict(
    current: tuple[Paths, str], index: Index, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the step words its error: the current release itself is looked at."""
    paths, name = current
    make_wheel(index.folder, "alpha", "1.1")

    def damaged(self: Candidate, made: Release, *, record: bool) -> str:
        record_file(paths, records_of(paths, self.current)[-1]).unlink()
        raise SmokeError("something was changed while it was measured")

    monkeypatch.setattr(Candidate, "quality", damaged)
    assert typed(f"bump --recipe {name} --hold 0", capsys)[0] == IntegrityError.exit_code
    assert not bumps_of(paths, name)
