"""The pins of real models in their full size, 112,901 tensors, and the tasks with a plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import PROJECT, Checkout
from checkpoint_samples import base_config, base_shards, write_repository
from qwen_samples import EXTRA, G122B, listings, plan_of

from sparkpin.checkpoint.plan import donor_tensors
from sparkpin.pins import manifests

LARGE, PLAIN = "qwen3.5-122b-a10b", "qwen3.5-122b-a10b-nvfp4"


def test_the_plan_of_the_122b_pair() -> None:
    plan = plan_of(manifests.load_model(PROJECT, LARGE), listings(G122B))
    seen = plan.counts
    assert (seen["replaced"], seen["added"], seen["dropped"], seen["listed"]) == (144, 144, 0, 0)
    sources = donor_tensors(plan)["fp8"]
    assert (len(sources), sum(source.info.nbytes for source in sources)) == (288, 453_040_128)
    assert len(plan.shards) == 14
    assert EXTRA in [link.path for link in plan.links]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """With a plain model from a folder of this machine in the place of the NVFP4 one, and caches of its own."""
    checkout = Checkout.make(tmp_path / "project")
    monkeypatch.setenv("SPARKPIN_CACHE", str(tmp_path / "cache"))
    folder = write_repository(tmp_path / "mine", base_shards(), base_config(), repository="int4")
    repo = "repo: txn545/Qwen3.5-122B-A10B-NVFP4"
    checkout.replace(f"pins/models/{PLAIN}.yaml", repo, f"{repo}\n    folder: {folder}")
    return checkout


def test_tasks_with_a_plain_model(checkout: Checkout) -> None:
    asked = ("build", "--checkpoint-only", "--recipe", "qwen3.5-122b-nvfp4")
    assert checkout.invoke(*asked, "--dry-run").returncode != 0, "not locked"
    checkout.done("lock", "--model", PLAIN)
    for stage in ("hybrid", "v2"):
        impossible = checkout.invoke(*asked, "--stage", stage, "--dry-run")
        assert impossible.returncode != 0 and f"pins/models/{PLAIN}.yaml: hybrid" in impossible.stderr
    checkout.done(*asked, "--stage", "base", "--dry-run")
    folder = Path(checkout.done(*asked, "--stage", "base").split()[-1])
    assert (folder / EXTRA).samefile(checkout.folder.parent / "mine" / EXTRA)
