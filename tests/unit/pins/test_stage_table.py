"""benchmarks/stage_table: what is carried to a GPU, what runs there, and how a profile is read."""

from __future__ import annotations

import itertools
import json
import re
import sys

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import join

import stages
from sparkpin.pins import manifests


@pytest.mark.parametrize("name", ["v2-vocab", "v3"])
def test_what_is_measured_has_the_stages_own_flags(name: str) -> None:
    flags = manifests.load_chain(PROJECT, name)[-1].serve.flags
    made = stages.arguments(stages.STAGES[name])
    assert made["additional_config"] == flags["--additional-config"]
    assert made["speculative_config"] == stages.STAGES[name].speculation | flags["--speculative-config"]
    assert made.get("mamba_ssm_cache_dtype") == flags.get("--mamba-ssm-cache-dtype")
    assert "use_local_argmax_reduction" not in stages.arguments(stages.STAGES["v2"])["speculative_config"]


def test_the_table_is_what_the_kept_runs_say() -> None:
    assert join.TABLE.read_text() == join.text_of(join.joined(join.RUNS))


def test_the_ratios_that_a_page_shows_are_those_of_the_data() -> None:
    page = (PROJECT / "docs/performance.md").read_text(encoding="utf-8")
    runs = {run["name"]: run["stages"] for run in json.loads(join.TABLE.read_text())["runs"]}
    chain = runs["2026-11-22-d-chain"]  # all stages in one call
    for below, stage in itertools.pairwise(stages.CHAIN):
        shown = re.search(rf"^\| {stage}: [^|]*\| (.*) \|$", page, re.MULTILINE)
        decode = [
            [chain[name]["decode"][point]["tokens_per_s"] for name in (below, stage)]
            for point in ("1024:1", "131072:1", "1024:16")
        ]
        assert shown and shown[1] == " | ".join(f"{after / before:.2f}" for before, after in decode)
