"""Drafting from part of the vocabulary in real servers: what is not listed is not drafted, and said all the same.

The stage's own list is longer than the scripted model's vocabulary, so these have shorter ones.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import Checkout

from benchmarks.scripted_tiny.vocabulary import vocabulary

pytestmark = pytest.mark.slow

TRIAL = f"trial-{uuid.uuid4().hex[:8]}"
STAGE, FILE = "v2-vocab", "stages/v2-vocab.yaml"
WORDS = vocabulary()
SCRIPTED = sorted({token for chain in WORDS.chains.values() for token in chain if token < WORDS.first_added})


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    made.add_recipe(TRIAL, **{"stage: v2-tq": f"stage: {STAGE}"})
    yield made
    made.remove_tags(TRIAL)


def smoked(copy: Checkout) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
    """The result, the mod's reports, and the answers' verdicts by check. It must have passed."""
    copy.done("build", "--recipe", TRIAL)
    tag = copy.release(stage=STAGE)["tag"]
    copy.done("smoke", tag)
    evidence = copy.evidence(tag)
    result = json.loads((evidence / "result.json").read_text())
    lines = (line.partition("SPARKPIN_MOD ")[2] for line in (evidence / "server.log").read_text().splitlines())
    reports = [json.loads(line) for line in lines if '"mod":"draft-vocabulary"' in line]
    return result, reports, {check["name"]: check["detail"] for check in result["checks"]}


def test_what_is_listed_is_drafted_as_ever(copy: Checkout) -> None:
    """A list that ends with the last of the scripts' tokens."""
    listed = SCRIPTED[-1] + 1
    copy.replace(FILE, "first: 65536", f"first: {listed}")
    result, [report], verdicts = smoked(copy)
    assert (report["event"], report["of"], report["special"]) == ("active", 1024, len(WORDS.added))
    assert report["rows"] == "Int8LMHeadMethod"
    assert report["tokens"] == listed + len(WORDS.added) < report["of"]
    assert result["acceptance"] == 1 and result["drafted_tokens"] > 100, verdicts["acceptance"]


def test_what_is_not_listed_is_said_all_the_same(copy: Checkout) -> None:
    """Bytes, the first script's few tokens and the added ones: of the other scripts no draft can be right but those.

    On stage mtp, so beside a 16-bit head.
    """
    copy.replace(FILE, "parent: v2", "parent: mtp")
    copy.replace(FILE, "first: 65536", "first: 280")
    copy.replace(FILE, "acceptance_floor: 0.8", "acceptance_floor: 0.0")
    copy.replace(FILE, "position_floors: [0.8, 0.6]", "position_floors: [0.0, 0.0]")
    result, [report], verdicts = smoked(copy)
    assert report["tokens"] == 280 + len(WORDS.added) and report["rows"] != "Int8LMHeadMethod"
    assert set(result["mods"]) == {"guard", "vllm-cpu", "hybrid-int4-fp8", "draft-vocabulary"}
    assert verdicts["chat"] == "24 tokens, exact" and verdicts["determinism"] == "4 times the same 24 tokens"
    assert 0 < result["acceptance"] < 0.3 and result["drafted_tokens"] > 1000, verdicts["acceptance"]
