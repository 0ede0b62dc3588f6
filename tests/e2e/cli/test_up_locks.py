"""`up` of a recipe whose model nobody has locked, or of a model without a recipe, against a local Hub."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import hub
import pytest
from checkout import INVOKE, Checkout
from places import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.fetch.model import generated
from sparkpin.pins import manifests
from sparkpin.releases.record import Releases

pytestmark = pytest.mark.slow

TRIAL = f"unlocked-{uuid.uuid4().hex[:8]}"
OURS, THEIRS = "sparkpin/scripted-tiny", f"{TRIAL}/scripted-tiny"


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    """Its only model is on a Hub, with the files of the generated one under another owner's name."""
    made = Checkout.make(tmp_path / "copy")
    made.add_recipe(TRIAL)
    pins = made.folder / "pins/models"
    text = (pins / "scripted-tiny.yaml").read_text().replace(OURS, THEIRS)
    kept = [line for line in text.splitlines() if not line.startswith(("packed:", "smoke:"))]
    kept = [line.partition("revision:")[0] + "revision: unresolved" if "revision:" in line else line for line in kept]
    (pins / f"{TRIAL}.yaml").write_text("\n".join(kept) + "\n")
    recipe = made.folder / f"recipes/{TRIAL}.yaml"
    lines = recipe.read_text().replace(OURS, THEIRS).splitlines()
    lines = ["model_revision: unresolved" if line.startswith("model_revision:") else line for line in lines]
    recipe.write_text("\n".join(lines) + "\n")
    # Of a model that is not known to be the scripted one the checks ask for longer answers than this one has.
    made.ask_only("completion", "drift", "mods")
    machine = Paths.from_env(PROJECT)
    shutil.copytree(machine.images, made.home / "images")  # the image of the first stage is there
    yield made
    made.remove_built(TRIAL)
    shutil.rmtree(machine.models / TRIAL, ignore_errors=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    paths = Paths(PROJECT, tmp_path / "generated", tmp_path / "home")
    with generated(paths, manifests.load_model(PROJECT, "scripted-tiny"), None) as made:
        shutil.copytree(made / "sparkpin", tmp_path / "hub" / TRIAL)
    with hub.serve(tmp_path / "hub") as url:
        yield url


def base_files() -> list[Path]:
    return list((Paths.from_env(PROJECT).models / f"{THEIRS}-int4-AutoRound").rglob("model-*.safetensors"))


def test_a_model_without_a_recipe_is_added_and_goes_through(copy: Checkout, site: str) -> None:
    for file in (f"pins/models/{TRIAL}.yaml", f"recipes/{TRIAL}.yaml"):
        (copy.folder / file).unlink()
    model = f"hf:{THEIRS}-int4-AutoRound"
    done = copy.invoke("up", "--model", model, "--recipe", TRIAL, "--stack", "cpu", "--yes", HF_ENDPOINT=site)
    assert done.returncode == 0, done.stdout + done.stderr
    (release,) = Releases(Paths(copy.folder, copy.home, copy.home)).of_recipe(TRIAL)
    assert release.smoke_passed and release.state == "current"


def test_an_unlocked_recipe_is_locked_asked_for_once_and_goes_through(copy: Checkout, site: str) -> None:
    releases = Releases(Paths(copy.folder, copy.home, copy.home))
    env = {"HF_ENDPOINT": site}
    up = ("up", "--recipe", TRIAL, "--stage", "base")
    lock = copy.folder / f"pins/models/{TRIAL}.lock"

    ahead = copy.invoke(*up, "--dry-run", **env)
    assert ahead.returncode == 0 and f"invoke lock --model {TRIAL}" in ahead.stdout and not lock.exists()

    refused = copy.invoke(*up, **env)
    assert refused.returncode == 2 and lock.is_file(), refused.stderr
    assert "--yes" in refused.stderr
    assert "Download: " in refused.stdout and "Disk, with checkpoints" in refused.stdout
    assert not base_files(), "nothing is fetched unasked"

    controller, terminal = pty.openpty()
    os.write(controller, b"no\n")
    declined = subprocess.run(
        [*INVOKE, *up], cwd=copy.folder, env={**copy.env, **env}, stdin=terminal, capture_output=True, text=True
    )
    os.close(terminal)
    os.close(controller)
    assert declined.returncode == 2 and declined.stdout.count("[y/N]") == 1
    assert not base_files() and not releases.recipes()

    done = copy.invoke(*up, "--yes", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert base_files() and "[y/N]" not in done.stdout
    (release,) = releases.of_recipe(TRIAL)
    assert release.smoke_passed and release.state == "current"
    again = copy.invoke(*up, **env)
    assert again.returncode == 0 and "Download: " not in again.stdout, "what is here is not asked for again"
