"""What of a bump needs neither an index nor an engine: is it slower, and what does it by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from places import PROJECT
from report_samples import HOST

from sparkpin.core.errors import BumpError
from sparkpin.measure.bench.record import Comparison, Conditions
from sparkpin.measure.bench.run import ALL, ratio
from sparkpin.measure.bench.text import UNITS
from sparkpin.pins import manifests
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.upgrade.bump_run import moving_of
from sparkpin.upgrade.bump_steps import judge_speed

NOISY = [10.0, 13.0, 8.0, 11.0]  # the machine's own, which both sides of a round have


def compared(metric: str, factors: Sequence[float], failed: int = 0) -> Comparison:
    before = NOISY[: len(factors)]
    rows = [ratio(ALL, metric, before, [one * factor for one, factor in zip(before, factors, strict=True)])]
    rows.append(ratio("one prompt", metric, NOISY, [one / 2 for one in NOISY]))  # a single one decides nothing
    known = Conditions(release="", image="", host=HOST, vllm="", argv=(), env={}, server="started")
    return Comparison(timestamp="", a=known, b=known, order="ABBAABBA", failed=failed, ratios=tuple(rows))


@pytest.mark.parametrize(
    ("metric", "factors", "slower"),
    [
        ("decode_rate", (0.90, 0.91, 0.89, 0.90), True),
        ("decode_rate", (0.98, 0.985, 0.98, 0.979), False),  # sure, and too little to matter
        ("decode_rate", (0.6, 1.3, 0.9, 0.7), None),
        ("decode_rate", (0.5,), None),
        ("decode_rate", (1.2, 1.2, 1.21, 1.2), False),
        ("ttft", (1.10, 1.11, 1.09, 1.10), True),
    ],
)
def test_slower_is_what_an_interval_says(metric: str, factors: Sequence[float], slower: bool | None) -> None:
    """None: nobody can tell, which is said."""
    made = compared(metric, factors)
    if not slower:
        said = judge_speed(made)
        assert UNITS[metric] in said and ("cannot be ruled out" in said) == (slower is None)
        return
    with pytest.raises(BumpError, match=UNITS[metric]):
        judge_speed(made)


def test_requests_that_failed_turn_it() -> None:
    with pytest.raises(BumpError, match="2 requests"):
        judge_speed(compared("decode_rate", (1, 1.01, 0.99, 1), failed=2))


@pytest.mark.parametrize("recipe", ["qwen3.5-35b-a3b", "scripted-tiny"])
def test_a_model_whose_pin_or_recipe_names_a_commit_does_not_move(recipe: str) -> None:
    own = manifests.load_recipe(PROJECT, recipe)
    assert bool(moving_of(own, manifests.model_of(PROJECT, own))) == (own.model_revision == UNRESOLVED)
