"""Benchmarks without a server: plans, figures from what the load generator writes, ratios, records, what is printed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import made_releases
import numpy
import pytest

from sparkpin.cli import measure as task
from sparkpin.core.errors import InputError, ManifestError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.measure.bench import driver, load, measure, plan, ratios, record, target
from sparkpin.measure.bench import text as words
from sparkpin.measure.bench.compare import fit_at_once
from sparkpin.measure.bench.plan import BenchPlan, Limits
from sparkpin.measure.bench.record import (
    BenchRecord,
    Cell,
    CellResult,
    Comparison,
    Conditions,
    PeakMemory,
    Spread,
    Start,
)
from sparkpin.measure.bench.run import require_answers
from sparkpin.releases.container import GIB
from sparkpin.serve import memory_limit

HOST = Fingerprint(
    machine="NVIDIA DGX Spark", arch="aarch64", cpu="Cortex", cores=20, memory=128 * 10**9, gpus=(), kernel="6.14",
    os="ubuntu 24.04", docker="28.3",
)  # fmt: skip
QA = Cell(name="Q&A", kind="prompt", prompt="Why?", output_tokens=256)
SWEEP = Cell(name="128 x 1", kind="sweep", input_tokens=128, output_tokens=9, requests=2)


def conditions(**changes: Any) -> Conditions:
    found = {
        "release": "sparkpin/tiny:v2-1", "image": "sha256:1", "host": HOST, "vllm": "0.33.0", "tool": load.TOOL,
        "argv": ("vllm", "serve", "/model", "--max-num-seqs", "4"), "env": {"A": "b"}, "server": "started",
    }  # fmt: skip
    return Conditions(**{**found, **changes})


def row(cell: Cell = QA, rate: float = 40.0, **changes: Any) -> CellResult:
    found: dict[str, Any] = {
        "cell": cell, "seconds": 6.4, "completed": 1, "failed": 0, "prompt_tokens": 20, "output_tokens": 256,
        "parts": 100, "output_rate": rate, "decode_rate": rate + 1, "ttft": Spread(p50=0.1, p95=0.2),
        "token": Spread(p50=0.02, p95=0.03), "prefill_rate": None,
    }  # fmt: skip
    return CellResult(**{**found, **changes})


def made(*rows: CellResult, **changes: Any) -> BenchRecord:
    found: dict[str, Any] = {
        "time": "2026-11-22T07:01:08.508Z", "conditions": conditions(), "cells": rows,
        "start": Start(seconds=29.9, began={"start": 0.0, "weights": 12.0, "ready": 29.0}),
        "memory": PeakMemory(container=3_000_000_000, gpu=None),
    }  # fmt: skip
    return BenchRecord(**{**found, **changes})


def near(spread: Spread | None, p50: float, p95: float) -> bool:
    return spread is not None and (spread.p50, spread.p95) == (pytest.approx(p50), pytest.approx(p95))


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path / "cache", tmp_path / "home")


def cells(limits: Limits, kind: str = "", **how: bool) -> tuple[Cell, ...]:
    return tuple(cell for cell in plan.cells_of(limits, **how) if kind in ("", cell.kind))


def test_the_five_prompts_have_the_published_lengths() -> None:
    found = cells(Limits(200_000, 16), "prompt")
    assert [(cell.name, cell.output_tokens) for cell in found] == [
        ("Q&A", 256), ("Code", 512), ("JSON", 1024), ("Math", 64), ("LongCode", 2048),
    ]  # fmt: skip
    assert all(cell.prompt and not cell.whole and cell.concurrency == 1 for cell in found)


def test_a_sweep_goes_as_far_as_the_release_allows() -> None:
    def pairs(*limits: int, **how: bool) -> set[tuple[int, int]]:
        return {(cell.input_tokens, cell.concurrency) for cell in cells(Limits(*limits), "sweep", **how)}

    found = pairs(196_608, 16)
    assert {(128, n) for n in (1, 2, 4, 8, 16)} <= found and {(131072, 1), (131072, 2), (32768, 8)} <= found
    assert (32768, 16) not in found and (131072, 4) not in found  # an hour of prefill
    assert pairs(2048, 4) == {(n, c) for n in (128, 1024) for c in (1, 2, 4)}
    assert max(pairs(131072, 1)) == (32768, 1)  # no room to answer
    assert pairs(2048, 1, quick=True) == {(128, 1)}
    assert {cell.kind for cell in cells(Limits(512, 4))} == {"sweep"} and cells(Limits(64, 4)) == ()


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        (["--max-model-len", "196608", "--max-num-seqs", "16"], Limits(196_608, 16)),
        (["--max-model-len", "auto"], Limits(262_144, 256)),
        ([], Limits(262_144, 256)),
    ],
)
def test_limits_are_read_from_the_command(flags: list[str], limits: Limits) -> None:
    assert Limits.of(["vllm", "serve", "/model", *flags], 262_144) == limits


def test_prompts_run_twice_one_round_after_the_other_and_a_sweep_warms_up() -> None:
    other = dataclasses.replace(QA, name="Code")
    steps = plan.steps_of([QA, other, SWEEP])
    assert [(step.cell.name, step.counts) for step in steps] == [
        ("Q&A", False), ("Code", False), ("Q&A", True), ("Code", True), ("128 x 1", False), ("128 x 1", True),
    ]  # fmt: skip
    assert (steps[4].requests, steps[4].output_tokens, steps[5].requests) == (1, 8, 2)
    assert len({step.seed for step in steps}) == len(steps)  # the same random texts would come from the prefix cache


def result(**changes: Any) -> dict[str, Any]:
    """Two answers: 9 tokens in four parts of two after the first, 9 in eight of one; the third request failed."""
    return {
        "duration": 2.0,
        "input_lens": [128, 128, 128],
        "output_lens": [9, 9, 0],
        "ttfts": [0.2, 0.4, 0.0],
        "itls": [[0.1] * 4, [0.1] * 8, []],
        "errors": ["", "", "Traceback ...\nServerDisconnectedError: gone\n"],
        **changes,
    }


BEFORE = """vllm:generation_tokens_total{engine="0"} 100
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 20
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 0
"""
AFTER = """vllm:generation_tokens_total{engine="0"} 121
vllm:spec_decode_num_drafts_total{engine="0"} 20
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 14
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
"""


def test_tokens_are_counted_and_not_parts() -> None:
    one = measure.measured(SWEEP, result(), BEFORE, AFTER)
    assert (one.completed, one.failed, one.output_tokens, one.parts) == (2, 1, 18, 12)
    assert one.output_rate == 9.0
    assert one.tokens_a_part == pytest.approx(16 / 12)
    assert one.decode_rate == pytest.approx((8 / 0.4 + 8 / 0.8) / 2)
    assert near(one.token, 0.1, 0.1)  # 4 of 0.05 s, 8 of 0.1 s
    fast = measure.measured(SWEEP, result(output_lens=[9, 0, 0], errors=["", "e", "e"]), BEFORE, AFTER)
    assert near(fast.token, 0.05, 0.05)


def test_what_an_answer_does_not_tell() -> None:
    """Prefill is of one user and of long prompts; an answer of one token has no decode."""
    assert measure.measured(SWEEP, result(), "", "").prefill_rate == pytest.approx((128 / 0.2 + 128 / 0.4) / 2)
    for cell in (dataclasses.replace(SWEEP, concurrency=2), QA):
        assert measure.measured(cell, result(), "", "").prefill_rate is None
    one = measure.measured(SWEEP, result(output_lens=[1, 1, 0], itls=[[], [], []]), "", "")
    assert (one.decode_rate, one.token, one.tokens_a_part, one.ended_early) == (None, None, None, True)


def test_acceptance_is_what_the_counters_grew_by() -> None:
    one = measure.measured(SWEEP, result(), BEFORE, AFTER)
    assert (one.drafted, one.accepted, one.acceptance) == (20, 15, 0.75)
    assert one.accepted_by_position == (0.9, 0.6)
    assert one.others == 3  # 21 were made, 18 were ours
    plain = measure.measured(SWEEP, result(), "", "")
    assert (plain.drafted, plain.acceptance, plain.accepted_by_position, plain.others) == (None, None, (), None)
    fresh = measure.measured(SWEEP, result(), "", AFTER)  # a counter appears with its first value
    assert fresh.drafted == 40


def test_a_cell_without_an_answer_is_an_error_with_its_reason(paths: Paths) -> None:
    nothing = result(output_lens=[0, 0, 0], errors=["", "Traceback ...\nBad Request", "x"])
    with pytest.raises(SmokeError, match="Bad Request"):
        require_answers(made_releases.release(1), measure.measured(QA, nothing, "", ""), measure.failures_of(nothing))


class CutShort:
    """In the place of a container whose end cuts its log short: one time in ten with a busy Docker 20.10, never when
    wanted."""

    def __init__(self, text: bytes, cuts: list[int]) -> None:
        self.text, self.cuts = text, cuts
        self.status = "created"

    def reload(self) -> None:
        self.status = "running" if self.cuts else "exited"

    def logs(self, **asked: bool) -> list[bytes]:
        assert asked == {"stream": True, "follow": True, "stdout": True, "stderr": False}
        text = self.text[: self.cuts.pop(0)] if self.cuts else self.text
        return [text[start : start + 3] for start in range(0, len(text), 3)]


@pytest.mark.parametrize("cuts", [[], [0], [18, 20], [20, 4]])
def test_what_the_end_of_a_container_cuts_short_is_read_again(cuts: list[int]) -> None:
    text = b'{"begin": 0}\n{"begin": 1}\n'
    assert b"".join(load.output(cast(Any, CutShort(text, cuts)))) == text


def test_each_step_says_all_that_the_driver_reads() -> None:
    release = made_releases.release(1)
    text = json.loads(load.plan_text(release, plan.steps_of([QA, SWEEP]), BenchPlan((QA, SWEEP), 2048), "/v/a/s"))
    assert text["socket"] == "/v/a/s" and text["model"] == "/model" and len(text["steps"]) == 4
    assert text["room"] == 2048 - plan.SLACK
    text["url"] = "http://127.0.0.1:1"  # which the driver opens
    prompt, sweep = (driver.arguments(text, step) for step in (text["steps"][0], text["steps"][-1]))
    assert "--skip-tokenizer-init" in prompt and "--ignore-eos" not in prompt
    assert sweep[sweep.index("--random-input-len") + 1] == "128" and sweep[sweep.index("--num-prompts") + 1] == "2"
    assert [step["limit"] for step in text["steps"]] == [728, 728, 616.8, 634.6]  # a hang ends, a slow machine does not


def test_the_load_generator_asks_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict.fromkeys(("HTTP_PROXY", "https_proxy", "no_proxy", "KEPT"), "x")
    monkeypatch.setattr(os, "environ", environment)
    driver.forget_proxies()
    assert environment == {"KEPT": "x"}


def test_memory_is_counted_without_the_page_cache() -> None:
    assert target.container_bytes({"memory_stats": {"usage": 100, "stats": {"inactive_file": 30}}}) == 70
    old = {"memory_stats": {"usage": 100, "stats": {"inactive_file": 1, "total_inactive_file": 40}}}
    assert target.container_bytes(old) == 60
    assert target.container_bytes({}) is None
    assert target.most(None, 3, 5) == 5 and target.most(None) is None


def test_the_interval_is_students_t_of_the_logarithms() -> None:
    middle, low, high = ratios.interval([1.1, 1.2, 1.3, 1.25])
    logs = numpy.log([1.1, 1.2, 1.3, 1.25])
    half = 3.182446 * logs.std(ddof=1) / 2  # Student's t for three degrees of freedom, 97.5 %
    wanted = tuple(numpy.exp(logs.mean() + half * end) for end in (0, -1, 1))
    assert (middle, low, high) == pytest.approx(wanted, rel=1e-3)
    assert ratios.interval([2.0, 2.0]) == pytest.approx((2, 2, 2))


def test_drift_of_the_machine_falls_out_of_paired_ratios() -> None:
    """Each turn is slower than the one before it by 1 %, and B is twice as fast as A."""
    assert ratios.order_of(1) == "AB"
    order = ratios.order_of(4)
    assert order == "ABBAABBA"
    turns = [(letter, 40 * 0.99**place * (2 if letter == "B" else 1)) for place, letter in enumerate(order)]
    a, b = ([[row(rate=rate)] for letter, rate in turns if letter == side] for side in "AB")
    found = {(one.cell, one.metric): one for one in ratios.ratios_of(a, b)}
    one = found["Q&A", "decode_rate"]
    assert one.ratio == pytest.approx(2, rel=0.03) and one.low and one.high and one.low < 2 < one.high
    assert len(one.a) == len(one.b) == 4


def test_the_prompts_come_together_and_cells_each() -> None:
    code = dataclasses.replace(QA, name="Code")
    a = [[row(QA, 40), row(code, 10), row(SWEEP, 50)]]
    b = [[row(QA, 80), row(code, 5), row(SWEEP, 60)]]
    found = {(one.cell, one.metric): one for one in ratios.ratios_of(a, b)}
    assert found[ratios.ALL, "output_rate"].ratio == pytest.approx(1.0)
    assert found["128 x 1", "output_rate"].ratio == pytest.approx(1.2)
    assert found["128 x 1", "output_rate"].low is None  # of one round
    lacking = [[row(QA, 40), dataclasses.replace(row(code, 10), decode_rate=None)]]
    assert ("Code", "decode_rate") not in {(one.cell, one.metric) for one in ratios.ratios_of(lacking, lacking)}


def test_a_record_comes_back_as_it_was(paths: Paths) -> None:
    release = made_releases.release(1)
    first, second = made(row()), made(row(), row(SWEEP, accepted_by_position=(0.9, 0.6)), time="2026-12-01T00:00:00Z")
    for one in (second, first):
        record.keep(paths, release, one)
    assert record.history(paths, release) == (first, second)
    assert record.newest(paths, release) == second
    assert second.decode_rate == 41.0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cells.0.seconds", "x", "cells.0.seconds"),
        ("schema", 2, "schema"),
    ],
)
def test_a_damaged_record_is_named_with_its_key(paths: Paths, key: str, value: object, said: str) -> None:
    path = record.keep(paths, made_releases.release(1), made(row()))
    whole = json.loads(path.read_text())
    (whole["cells"][0] if "." in key else whole)[key.rpartition(".")[2]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(ManifestError, match=said):
        record.read(path)


def test_a_run_is_printed_with_its_machine_and_with_what_makes_it_doubtful(capsys: pytest.CaptureFixture[str]) -> None:
    early = row(output_tokens=100, drafted=100, accepted=80, accepted_by_position=(0.9, 0.7), others=7)
    words.show_record(made(early, row(SWEEP, failed=1), conditions=conditions(server="served")))
    text = capsys.readouterr().out
    assert all(
        fact in text for fact in (HOST.line, "0.33.0", "--max-num-seqs 4", "80%", "1 FAILED", "100 of 256", "7 more")
    )


def test_a_comparison_says_how_it_was_made(capsys: pytest.CaptureFixture[str], paths: Paths) -> None:
    found = ratios.ratios_of([[row(rate=40)], [row(rate=41)]], [[row(rate=44)], [row(rate=46)]])
    one = Comparison(
        time="2026-11-22T07:01:08Z", a=conditions(), b=conditions(release="sparkpin/tiny:v3-1"), order="ABBA",
        restarted=True, ratios=found, interval=ratios.INTERVAL.format(2), failed=1,
    )  # fmt: skip
    words.show_comparison(one)
    text = capsys.readouterr().out
    assert all(fact in text for fact in ("ABBA", "1 request FAILED", HOST.line))
    release = made_releases.release(1)
    path = record.folder(paths, release) / "compare-1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record.to_json(one)))
    assert record.comparisons(paths, release) == (one,) and record.history(paths, release) == ()


def test_both_sides_of_a_comparison_are_asked_the_same() -> None:
    a = BenchPlan(cells(Limits(32_768, 16)), 32_768)
    b = BenchPlan(cells(Limits(4096, 4)), 4096)
    both = task.common([a, b])
    assert both.context == 4096
    assert [cell.name for cell in both.cells] == [
        "Q&A", "Code", "JSON", "Math", "LongCode", "1024 x 1", "1024 x 4",
    ]  # fmt: skip
    scripted = BenchPlan(cells(Limits(4096, 4), "prompt", whole=True), 4096)
    with pytest.raises(InputError):
        task.common([scripted, dataclasses.replace(scripted, cells=cells(Limits(4096, 4), "prompt"))])


@pytest.mark.parametrize(("platform", "together"), [("cpu", 24), ("cuda", 22)])
def test_both_servers_are_up_only_where_both_plans_fit(
    monkeypatch: pytest.MonkeyPatch, paths: Paths, platform: str, together: int
) -> None:
    """2 GiB of slack for each; what the machine keeps, which is in both plans with a GPU, counts once."""
    releases = [made_releases.release(1), made_releases.release(2)]
    assert not fit_at_once(paths, releases), "nothing of them is there to plan with"
    made_plan = SimpleNamespace(needed=10 * GIB, settings=SimpleNamespace(platform=platform))
    monkeypatch.setattr(memory_limit, "plan_of", lambda paths, release: made_plan)
    for free, fits in ((together * GIB, True), (together * GIB - 1, False)):
        monkeypatch.setattr(memory_limit, "available", lambda free=free: free)
        assert fit_at_once(paths, releases) == fits
