"""`invoke add` and `recipe export` as a person runs them, with a real Hub on 127.0.0.1."""

from __future__ import annotations

import json
from pathlib import Path

import hub
from checkout import Checkout
from checkpoint_samples import base_config, base_shards, write_repository
from foreign_recipe import V1, written

from sparkpin.build.pair import pair
from sparkpin.pins import manifests, vllm_flags
from sparkpin.recipes import recipe, render


def test_the_hub_pins_the_model_and_the_recipe_can_be_exported(tmp_path: Path) -> None:
    """The whole way, as a person goes it: add with a real Hub, plan a release of it, give it to both tools."""
    copy = Checkout.make(tmp_path / "copy")
    remote = tmp_path / "remote"
    write_repository(remote / "acme/sample-int4", base_shards(), base_config(), repository="int4")
    commit = hub.scan(remote / "acme/sample-int4", "acme/sample-int4").commit
    file = written(tmp_path, V1)
    cache = str(tmp_path / "cache")
    lost = copy.invoke("add", file, HF_HUB_OFFLINE="1", SPARKPIN_CACHE=cache)
    assert lost.returncode == 6, lost.stderr
    assert not (copy.folder / "pins/models/sample-int4.yaml").exists()
    with hub.serve(remote) as url:
        done = copy.invoke("add", file, HF_ENDPOINT=url, SPARKPIN_CACHE=cache)
    assert done.returncode == 0, done.stderr
    assert f"acme/sample-int4 at {commit}" in done.stdout
    assert "invoke up --recipe some-recipe --serve" in done.stdout
    assert manifests.load_recipe(copy.folder, "some-recipe").model_revision == commit
    lock = json.loads((copy.folder / "pins/models/sample-int4.lock").read_text())
    assert lock["repositories"]["base"]["revision"] == commit
    last = pair(copy.folder, "some-recipe")[-1]
    for form in ("v1", "v2"):
        output = tmp_path / f"{form}.yaml"
        copy.done("recipe", "export", "some-recipe", "--format", form, "--output", str(output))
        loaded = recipe.load(output)
        made = render.render(loaded, single=True)
        assert loaded.container == last.tag and f":base-{last.key[:12]}" in last.tag
        host = "0.0.0.0" if form == "v2" else "127.0.0.1"  # sparkrun asks the machine's own address whether it is up
        own = vllm_flags.set_flag(last.argv, "--host", host)[3:]
        assert made.argv == ("vllm", "serve", "acme/sample-int4", "--revision", commit, *own)
        assert made.env | last.env == made.env
        checked = copy.invoke("recipe", "check", str(output))
        assert checked.returncode == 0, checked.stdout
        copy.done("add", str(output), "--name", f"again-{form}")
        again = pair(copy.folder, f"again-{form}")[-1]
        assert (again.key, again.recipe.model_revision) == (last.key, commit)
    assert copy.invoke("recipe", "check", "some-recipe").returncode == 0
