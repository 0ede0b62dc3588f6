"""What mods/guard refuses before vLLM sees it; that it had to be, tests/adversary shows on a real server."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from heard import heard
from places import PROJECT
from request_trials import CHAT, CITY, COMPLETE, HELLO, TABLE, TRIALS, Trial, chat, nested, refused_before, schema, text
from sparkpin_guard.rows import Row, refusal

from benchmarks.scripted_tiny.scripts import WEATHER_TOOL
from sparkpin.cli.serve import GUARD, warn_unguarded
from sparkpin.pins import manifests

PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 8_000_000}}]
NAMED = {"type": "string", "pattern": r"^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"}
TALL = {"type": "object", "properties": {f"p{i}": {**NAMED, "description": "x" * 200} for i in range(100)}}
HONEST = (
    chat("a turn of 200,000 tokens", messages=[{"role": "user", "content": "code " * 200_000}], max_tokens=32_000),
    chat("a hundred tools", tools=[{**WEATHER_TOOL, "index": i, "text": "x" * 900} for i in range(100)], stream=True),
    chat("two pictures", messages=[{"role": "user", "content": PICTURE * 2}]),
    chat("a large schema", response_format=schema(TALL)),
    chat("sampling", n=1, temperature=0.7, top_p=0.95, seed=2**63 - 1, logprobs=True, top_logprobs=20, stop=["x"]),
    text("tokens", prompt=list(range(1000)), n=4, logit_bias={"5": -100, "6": 1}),
    text("prompts", prompt=["a", "b"], n=2),
    text("no prompt", prompt=[], n=None, structured_outputs=None),
    chat("a tool of a tool", messages=[*HELLO, {"role": "assistant", "text": "/generative_scoring"}]),
)


@pytest.mark.parametrize(
    ("flags", "warnings"),
    [([], 1), (["--middleware", "mine.Own"], 1), (["--middleware=sparkpin_guard.Guard"], 0)],
)
def test_a_release_without_it_is_served_with_a_warning(flags: list[str], warnings: int) -> None:
    lines, release = heard(), SimpleNamespace(tag="sparkpin/r:base-1", argv=("vllm", "serve", "/model", *flags))
    warn_unguarded(release)  # type: ignore[arg-type]
    assert len(lines) == warnings


@pytest.mark.parametrize("stack", [file.stem for file in (PROJECT / "pins/stacks").glob("*.yaml")])
def test_a_stack_of_ours_has_its_flag(stack: str) -> None:
    assert manifests.load_stack(PROJECT, stack).serve.flags["--middleware"] == GUARD


@pytest.mark.parametrize("trial", HONEST, ids=lambda trial: trial.name)
def test_what_agents_send_is_let_through(trial: Trial) -> None:
    assert refused_before(trial) is None


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.reason)
def test_each_row_is_met_by_a_trial(row: Row) -> None:
    assert any(isinstance(trial.body, dict) and row.meets(trial.path, trial.body) for trial in TRIALS)


@pytest.mark.parametrize("trial", [trial for trial in TRIALS if trial.kills], ids=lambda trial: trial.name)
def test_what_ends_or_stalls_vllm_is_refused_with_a_reason_unless_the_mod_mends_it(trial: Trial) -> None:
    assert bool(refused_before(trial)) == trial.must_be_refused


def test_the_field_is_named() -> None:
    assert refusal(TABLE, CHAT, {"logprob_token_ids": [5]}).startswith("logprob_token_ids: ")


@pytest.mark.parametrize("body", [{"n": 100, "sampling_params": {"n": 1}}, {"n": 1, "sampling_params": {"n": 100}}])
def test_sampling_parameters_hide_nothing_and_are_asked_themselves(body: dict[str, Any]) -> None:
    assert refusal(TABLE, "/inference/v1/generate", body) and refusal(TABLE, COMPLETE, body)


def test_it_needs_no_recursion() -> None:
    body: dict[str, Any] = {"response_format": CITY}
    for _ in range(10 * sys.getrecursionlimit()):
        body = {"x": body}
    assert refusal(TABLE, COMPLETE, body) is None
    with pytest.raises((ValueError, RecursionError)):
        json.loads(nested(10_000))
