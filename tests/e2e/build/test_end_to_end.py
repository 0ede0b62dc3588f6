"""Faults of the main job, on the real engine with real servers. Needs what ./install.sh leaves."""

from __future__ import annotations

import hashlib
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import Checkout

from sparkpin.host.engine import Engine
from sparkpin.releases.record import Releases

TRIAL = f"trial-{uuid.uuid4().hex[:8]}"  # other checkouts may test beside this one, and the engine has the tags of all


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    yield made
    made.remove_tags(TRIAL)


@pytest.mark.slow
def test_a_mod_that_is_not_at_work_fails_the_smoke_test(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL, **{"stage: v2-tq": "stage: v2"})
    copy.replace("stages/v2.yaml", "smoke:", "serve: {env: {SPARKPIN_MOD_INT8_LM_HEAD: 0}}\nsmoke:")
    copy.ask_only("completion", "long-text", "drift", "mods")
    copy.done("build", "--recipe", TRIAL)
    tag = copy.release(stage="v2")["tag"]
    result = copy.invoke("smoke", tag)
    assert result.returncode == 10
    assert "int8-lm-head" in result.stdout
    row = copy.release(tag=tag)
    assert row["state"] == "failed"
    assert Engine.connect().image(tag) is not None
    assert copy.invoke("promote", tag).returncode == 2


def test_a_full_disk_stops_a_fetch_with_one_clear_error(copy: Checkout, tmpfs: Callable[[str], Path]) -> None:
    small = tmpfs("2m")
    result = copy.invoke("build", "--fetch-only", SPARKPIN_CACHE=str(small))
    assert result.returncode == 11, result.stderr
    assert str(small) in result.stderr
    assert "Traceback" not in result.stderr


def smallest_wheel(copy: Checkout) -> dict[str, Any]:
    lock = json.loads((copy.folder / "pins/stacks/cpu.lock").read_text())
    wheel = min(lock["wheels"], key=lambda row: row["size"])
    assert isinstance(wheel, dict)
    return wheel


def test_a_wheel_with_one_byte_changed_is_told_and_fetched_again(
    main_job: Releases, copy: Checkout, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    subprocess.run(["cp", "--archive", "--link", main_job.paths.store, tmp_path / "store"], check=True)
    cache.mkdir()
    (tmp_path / "store").rename(cache / "store")
    wheel = smallest_wheel(copy)
    stored = cache / "store" / wheel["sha256"][:2] / wheel["sha256"]
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.unlink()  # the link to the real store
    stored.write_bytes(data)
    result = copy.invoke("build", "--fetch-only", SPARKPIN_CACHE=str(cache))
    assert result.returncode == 0, result.stderr
    assert wheel["file"] in result.stderr and hashlib.sha256(data).hexdigest() in result.stderr
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == wheel["sha256"]


def test_a_lock_with_a_wrong_hash_is_refused_and_nothing_of_that_file_is_kept(
    main_job: Releases, copy: Checkout
) -> None:
    wrong = hashlib.sha256(b"other bytes").hexdigest()
    copy.replace("pins/stacks/cpu.lock", smallest_wheel(copy)["sha256"], wrong)
    result = copy.invoke("build", "--fetch-only")
    assert result.returncode == 5, result.stderr
    assert wrong in result.stderr
    assert not list(main_job.paths.store.glob(f"*/{wrong}"))


def test_doctor_finds_nothing_missing_after_the_main_job(main_job: Releases, copy: Checkout) -> None:
    text = copy.done("doctor")
    assert "disk" in text
    assert "MISSING" not in text


def test_the_plan_of_a_checkpoint_is_printed_and_nothing_is_made(main_job: Releases, copy: Checkout) -> None:
    text = copy.done("build", "--checkpoint-only", "--stage", "mtp", "--dry-run")
    assert "12 replaced, 12 added" in text
    assert not (copy.home / "checkpoints").exists()
