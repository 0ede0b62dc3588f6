"""The pins of real models in their full size, 112,901 tensors, and the tasks with a plain one."""

from __future__ import annotations

from checkout import PROJECT
from qwen_samples import EXTRA, G122B, listings, plan_of

from sparkpin.checkpoint.plan import donor_tensors
from sparkpin.pins import manifests

LARGE = "qwen3.5-122b-a10b"


def test_the_plan_of_the_122b_pair() -> None:
    plan = plan_of(manifests.load_model(PROJECT, LARGE), listings(G122B))
    seen = plan.counts
    assert (seen["replaced"], seen["added"], seen["dropped"], seen["listed"]) == (144, 144, 0, 0)
    sources = donor_tensors(plan)["fp8"]
    assert (len(sources), sum(source.info.nbytes for source in sources)) == (288, 453_040_128)
    assert len(plan.shards) == 14
    assert EXTRA in [link.path for link in plan.links]
