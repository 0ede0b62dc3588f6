"""Benchmarks without vLLM: plans, the load on a server that is played, ratios, records, what is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_vllm
import made_releases
import numpy
import pytest

from sparkpin.core.errors import BusyError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.measure.bench import load, plan, record, run
from sparkpin.measure.bench import text as words
from sparkpin.measure.bench.load import BenchTarget, TimedAnswer
from sparkpin.measure.bench.plan import BenchPlan
from sparkpin.measure.bench.record import BenchRecord, Cell, CellResult, Comparison, Conditions, Metric
from sparkpin.smoke.client import Client, Exchange, Fault

HOST = Fingerprint(
    machine="NVIDIA DGX Spark", arch="aarch64", cpu="Cortex", cores=20, memory=128 * 10**9, gpus=(), kernel="6.14",
    os="ubuntu 24.04", docker="28.3",
)  # fmt: skip
QA = Cell(name="Q&A", kind="prompt", prompt="Why?", response_size=256)
SWEEP = Cell(name="128 x 2", kind="sweep", prompt_size=128, response_size=9, concurrency=2, batches=2, ignore_eos=True)


def conditions(**changes: Any) -> Conditions:
    found = {
        "release": "sparkpin/tiny:v2-1", "image": "sha256:1", "host": HOST, "vllm": "0.33.0",
        "argv": ("vllm", "serve", "/model", "--max-num-seqs", "4"), "env": {"A": "b"}, "server": "started",
    }  # fmt: skip
    return Conditions(**{**found, **changes})


def row(cell: Cell = QA, rate: float = 40.0, **changes: Any) -> CellResult:
    """rate: tokens a second of each request."""
    found = {
        "seconds": 256 / rate, "completed": 1, "failed": 0, "output_tokens": 256, "later_parts": 100,
        "later_tokens": 253, "pp_throughput": Metric.of([200.0]), "pp_req_throughput": Metric.of([200.0]),
        "tg_throughput": Metric.of([rate]), "tg_req_throughput": Metric.of([rate]), "ttfr": Metric.of([100.0]),
        "e2e_ttft": Metric.of([100.0]),
    }  # fmt: skip
    return CellResult(**{**vars(cell), **found, **changes})


def made(*rows: CellResult, **changes: Any) -> BenchRecord:
    found: dict[str, Any] = {
        "timestamp": "2026-11-22T07:01:08.508Z", "model": "tiny", "max_concurrency": 1,
        "benchmarks": rows, "conditions": conditions(), "start_seconds": 29.9, "memory": 3_000_000_000,
    }  # fmt: skip
    return BenchRecord(**{**found, **changes})


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path / "cache", tmp_path / "home")


def planned(length: int, sequences: int, **how: bool) -> BenchPlan:
    argv = ["vllm", "serve", "/model", "--max-model-len", str(length), "--max-num-seqs", str(sequences)]
    return plan.make_plan(argv, 262_144, **how)


def cells(kind: str, *limits: int, **how: bool) -> tuple[Cell, ...]:
    return tuple(cell for cell in planned(*limits, **how).cells if cell.kind == kind)


def test_the_five_prompts_have_the_published_lengths() -> None:
    found = cells("prompt", 200_000, 16)
    assert [(cell.name, cell.response_size) for cell in found] == [
        ("Q&A", 256), ("Code", 512), ("JSON", 1024), ("Math", 64), ("LongCode", 2048),
    ]  # fmt: skip
    assert all(cell.prompt and not cell.ignore_eos and cell.concurrency == 1 for cell in found)


def test_a_sweep_goes_as_far_as_the_release_allows() -> None:
    def pairs(*limits: int, **how: bool) -> set[tuple[int, int]]:
        return {(cell.prompt_size, cell.concurrency) for cell in cells("sweep", *limits, **how)}

    found = pairs(196_608, 16)
    assert {(128, n) for n in (1, 2, 4, 8, 16)} <= found and {(131072, 1), (131072, 2), (32768, 8)} <= found
    assert (32768, 16) not in found and (131072, 4) not in found  # an hour of prefill
    assert pairs(2048, 4) == {(n, c) for n in (128, 1024) for c in (1, 2, 4)}
    assert max(pairs(131072, 1)) == (32768, 1)  # no room to answer
    assert pairs(2048, 1, quick=True) == {(128, 1)}
    assert cells("prompt", 512, 4) == () and cells("sweep", 512, 4)
    with pytest.raises(InputError):
        planned(64, 4)


@pytest.mark.parametrize(("flags", "context"), [(["--max-model-len", "auto"], 262_144), ([], 262_144)])
def test_what_the_command_does_not_limit_the_model_does(flags: list[str], context: int) -> None:
    found = plan.make_plan(["vllm", "serve", "/model", *flags], 262_144)
    assert found.context == context and max(cell.concurrency for cell in found.cells) == 16


def test_both_sides_of_a_comparison_are_asked_the_same() -> None:
    both = plan.common(planned(32_768, 16), planned(4096, 4))
    assert both.context == 4096
    assert [cell.name for cell in both.cells] == [
        "Q&A", "Code", "JSON", "Math", "LongCode", "1024 x 1", "1024 x 4",
    ]  # fmt: skip
    scripted, other = (BenchPlan(cells("prompt", 4096, 4, ignore_eos=ignored), 4096) for ignored in (True, False))
    with pytest.raises(InputError):
        plan.common(scripted, other)


class Played(fake_vllm.Handler):
    """A server that drafts: each part of a stream has three tokens, the first has one. `asked` are the completions;
    those whose number is in `bad` get what it says."""

    asked: list[dict[str, Any]]
    bad: dict[int, bytes | int]

    def reply(self, body: dict[str, Any]) -> None:
        status, answer = 200, b"{}"
        if self.path == "/tokenize":
            answer = json.dumps({"tokens": list(range(40))}).encode()
        elif self.path == "/version":
            answer = b'{"version": "0.33.0"}'
        elif self.path == "/metrics":
            tokens = sum(body["max_tokens"] for body in self.asked)
            answer = f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'.encode()
        else:
            self.asked.append(body)
            most, wrong = body["max_tokens"], self.bad.get(len(self.asked))
            sizes = [1, *[3] * ((most - 1) // 3)]
            sizes += [most - sum(sizes)] if most > sum(sizes) else []
            events = [json.dumps({"choices": [{"text": "x", "token_ids": [7] * size}]}) for size in sizes]
            answer = b"".join(f"data: {event}\n\n".encode() for event in [*events, "[DONE]"])
            status = wrong if isinstance(wrong, int) else 200
            answer = wrong if isinstance(wrong, bytes) else answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchTarget]:
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(Played, "asked", [], raising=False)
    monkeypatch.setattr(Played, "bad", {}, raising=False)
    release = made_releases.release(1, argv=("vllm", "serve", "/model", "--served-model-name", "tiny"))
    socket = tmp_path / "s"
    with (
        fake_vllm.serving(fake_vllm.UnixServer(str(socket), Played)),
        Client.unix(socket) as client,
    ):
        yield BenchTarget(release, cast(Any, None), client, 1.0)


def measured(target: BenchTarget, *cells: Cell, context: int = 2048, seed: int = 0) -> list[CellResult]:
    return list(load.measure_cells(target, BenchPlan(cells, context), seed))


def test_tokens_are_counted_and_not_parts(target: BenchTarget) -> None:
    prompt, sweep = measured(target, QA, SWEEP)
    assert (prompt.completed, prompt.prompt_size, prompt.output_tokens) == (1, 40, 256)
    assert prompt.later_tokens <= 255 and prompt.others == 0
    assert (sweep.completed, sweep.failed, sweep.output_tokens, sweep.others) == (4, 0, 36, 0)
    assert [len(metric.values) for metric in (sweep.e2e_ttft, sweep.pp_throughput)] == [4, 2]  # requests, batches


class Recorded:
    """In the place of a client: parts of 1, 3, 3 and 2 tokens, of which so many came in the first read."""

    def __init__(self, at_once: int) -> None:
        events = [json.dumps({"choices": [{"token_ids": [7] * size}]}) for size in (1, 3, 3, 2)]
        texts = [f"data: {event}\n\n".encode() for event in [*events, "[DONE]"]]
        first = len(b"".join(texts[:at_once])) + (at_once < 5)
        self.reply = Exchange("POST", "", None, 200, "", b"".join(texts), 2.0, first=1.0, first_bytes=first)

    def post(self, path: str, body: object, timeout: float) -> Exchange:
        return self.reply


@pytest.mark.parametrize(("at_once", "parts"), [(0, (1, 3, 3, 2)), (1, (1, 3, 3, 2)), (3, (7, 2)), (5, (9,))])
def test_what_came_with_the_first_part_has_no_time(at_once: int, parts: tuple[int, ...]) -> None:
    """A busy server joins parts."""
    found = load.attempt(cast(Any, Recorded(at_once)), 1.0, {"prompt": [1, 2]})
    assert isinstance(found, TimedAnswer)
    assert (found.parts, found.prompt) == (parts, 2) and found.end - found.first == pytest.approx(1)


def test_no_prefix_cache_answers_and_both_sides_of_a_round_get_the_same_texts(target: BenchTarget) -> None:
    for seed in (0, 0, 1):
        measured(target, QA, SWEEP, seed=seed)
    salts = [body["cache_salt"] for body in Played.asked]
    assert len(salts) == len(set(salts)) == 3 * (2 + 5)
    rounds = [sorted(body["prompt"] for body in Played.asked[start : start + 7]) for start in (0, 7, 14)]
    assert rounds[0] == rounds[1] != rounds[2] and {len(text) for text in rounds[0]} == {40, 128}


def test_an_answer_ends_before_the_context_does(target: BenchTarget) -> None:
    measured(target, QA, context=100)
    assert {body["max_tokens"] for body in Played.asked} == {100 - plan.SLACK - 40}


@pytest.mark.parametrize(
    "wrong", [500, b'data: {"choices": []}\n\n', b"data: [DONE]\n\n", b'data: {"error": "gone"}\n\ndata: [DONE]\n\n']
)
def test_an_answer_that_is_not_whole_has_failed(target: BenchTarget, wrong: bytes | int) -> None:
    Played.bad[3] = wrong
    (found,) = measured(target, SWEEP)
    assert (found.completed, found.failed, found.output_tokens) == (3, 1, 27)
    Played.bad.update(dict.fromkeys(range(100), wrong))
    with pytest.raises(Fault, match=SWEEP.name):
        measured(target, SWEEP)


def test_rates_are_those_of_llama_benchy() -> None:
    """Two requests that begin together: prompts until the last first part, answers after the first part of any."""
    batch = [TimedAnswer(100, (2, 3, 3), 10.0, 10.5, 12.5), TimedAnswer(100, (1, 3), 10.0, 11.0, 12.0)]
    assert load.rates(batch) == (200 / 1.0, 9 / 2.0)
    assert load.rates(batch[:1]) == (100 / 0.5, 6 / 2.0)
    assert load.rates([TimedAnswer(100, (5,), 10.0, 10.5, 10.5)]) == (200, None)  # nothing to see of its decode
    found = load.result_of(SWEEP, [batch, ["broken"]], "", "")
    assert (found.seconds, found.output_rate, found.ttft, found.decode_rate) == (2.5, 12 / 2.5, 750, 3)
    assert found.tg_throughput and found.tg_throughput.values == (4.5,)


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


def test_acceptance_is_what_the_counters_grew_by() -> None:
    answers = [[TimedAnswer(128, (1, 17), 0.0, 1.0, 2.0)]]
    one = load.result_of(SWEEP, answers, BEFORE, AFTER)
    assert (one.drafted, one.accepted, one.acceptance) == (20, 15, 0.75)
    assert one.accepted_by_position == (0.9, 0.6)
    assert one.others == 3  # 21 were made, 18 were ours
    plain = load.result_of(SWEEP, answers, "", "")
    assert (plain.drafted, plain.acceptance, plain.accepted_by_position, plain.others) == (None, None, (), None)
    assert load.result_of(SWEEP, answers, "", AFTER).drafted == 40  # a counter appears with its first value


def test_memory_is_counted_without_the_page_cache() -> None:
    assert run.container_bytes({"memory_stats": {"usage": 100, "stats": {"inactive_file": 30}}}) == 70
    assert run.container_bytes({}) is None


def test_the_interval_is_a_paired_one_of_the_logarithms() -> None:
    """Student's t, 3.182446 at 97.5 % and three degrees of freedom, or a little wider."""
    one = run.ratio("x", "ttft", [1, 1, 1, 1], [1.1, 1.2, 1.3, 1.25])
    logs = numpy.log([1.1, 1.2, 1.3, 1.25])
    reach = 3.182446 * logs.std(ddof=1) / 2
    assert one.ratio == pytest.approx(numpy.exp(logs.mean())) and one.low and one.high
    for end in (logs.mean() - math.log(one.low), math.log(one.high) - logs.mean()):
        assert reach * 0.999 < end < reach * 1.5
    assert run.ratio("x", "ttft", [2], [3]).low is None


def ratios(a: Sequence[Sequence[CellResult]], b: Sequence[Sequence[CellResult]]) -> dict[tuple[str, str], record.Ratio]:
    return {(one.cell, one.metric): one for one in run.ratios_of(a, b)}


def test_drift_of_the_machine_falls_out_of_paired_ratios() -> None:
    """Each turn is slower than the one before it by 1 %, and B is twice as fast as A."""
    assert run.order_of(1) == "AB"
    order = run.order_of(4)
    assert order == "ABBAABBA"
    turns = [(letter, 40 * 0.99**place * (2 if letter == "B" else 1)) for place, letter in enumerate(order)]
    a, b = ([[row(rate=rate)] for letter, rate in turns if letter == side] for side in "AB")
    one = ratios(a, b)["Q&A", "decode_rate"]
    assert one.ratio == pytest.approx(2, rel=0.03) and one.low and one.high and one.low < 2 < one.high
    assert len(one.a) == len(one.b) == 4


def test_the_prompts_come_together_and_each_cell_by_itself() -> None:
    code = Cell(name="Code", kind="prompt", prompt="Write", response_size=512)
    a = [[row(QA, 40), row(code, 10), row(SWEEP, 50)]]
    b = [[row(QA, 80), row(code, 5), row(SWEEP, 60)]]
    found = ratios(a, b)
    assert found[run.ALL, "output_rate"].ratio == pytest.approx(1.0)
    assert found["128 x 2", "output_rate"].ratio == pytest.approx(1.2)
    lacking = [[row(QA, 40), row(code, 10, tg_req_throughput=None)]]
    assert {name for name, metric in ratios(lacking, lacking) if metric == "decode_rate"} == {"Q&A"}


def test_a_record_comes_back_as_it_was(paths: Paths) -> None:
    release = made_releases.release(1)
    first, second = made(row()), made(row(), row(SWEEP, accepted_by_position=(0.9, 0.6)), timestamp="2026-12-01T00:00Z")
    for one in (second, first, comparison()):
        record.save(paths, release, one)
    assert record.history(paths, release) == (first, second)
    assert record.newest(paths, release) == second
    assert second.decode_rate == 40.0 and math.isclose(second.benchmarks[0].output_rate, 40)


@pytest.mark.parametrize(("key", "value"), [("benchmarks.0.seconds", 0.0), ("schema", 2)])
def test_a_damaged_record_is_named_with_its_key(paths: Paths, key: str, value: object) -> None:
    path = record.save(paths, made_releases.release(1), made(row()))
    whole = json.loads(path.read_text())
    (whole["benchmarks"][0] if "." in key else whole)[key.rpartition(".")[2]] = value
    path.write_text(json.dumps(whole))
    with pytest.raises(ManifestError, match=key):
        record.read(path)


def test_a_record_is_a_report_of_llama_benchy(paths: Paths) -> None:
    """The required keys of its `BenchmarkReport`, `BenchmarkRun` and `BenchmarkMetric` (0.4.0), with their types."""
    value = json.loads(record.save(paths, made_releases.release(1), made(row(SWEEP))).read_text())
    kinds = {"version": str, "timestamp": str, "latency_mode": str, "latency_ms": float, "model": str,
             "prefix_caching_enabled": bool, "max_concurrency": int}  # fmt: skip
    assert {key: type(value[key]) for key in kinds} == kinds
    one = value["benchmarks"][0]
    sizes = ("concurrency", "context_size", "prompt_size", "response_size")
    assert [one[key] for key in sizes] == [2, 0, 128, 9] and one["is_context_prefill_phase"] is False
    for key in ("pp_throughput", "pp_req_throughput", "tg_throughput", "tg_req_throughput", "ttfr", "e2e_ttft"):
        assert one[key].keys() == {"mean", "std", "values"} and type(one[key]["mean"]) is float
    assert one["e2e_ttft"]["mean"] == 100  # milliseconds


def comparison() -> Comparison:
    found = run.ratios_of([[row(rate=40)], [row(rate=41)]], [[row(rate=44)], [row(rate=46)]])
    b = conditions(release="sparkpin/tiny:v3-1")
    return Comparison(timestamp="2026-11-22T07:01:08Z", a=conditions(), b=b, order="ABBA", ratios=found, failed=1)


def test_what_is_printed_has_its_machine_and_what_makes_it_doubtful(capsys: pytest.CaptureFixture[str]) -> None:
    early = row(output_tokens=100, drafted=100, accepted=80, accepted_by_position=(0.9, 0.7), others=7)
    words.show_record(made(early, row(SWEEP, failed=1), conditions=conditions(server="served"), slowed=("heat",)))
    words.show_comparison(comparison())
    text = capsys.readouterr().out
    facts = (HOST.line, "0.33.0", "--max-num-seqs 4", "80%", "1 FAILED", "100 of 256", "7 more", "heat", "ABBA")
    assert [fact for fact in facts if fact not in text] == []


@pytest.mark.parametrize("under_way", [None, 2])
def test_a_service_that_is_not_known_to_be_quiet_is_not_measured(
    under_way: int | None, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = made_releases.release(1)
    known = SimpleNamespace(release=ours.tag, ready=True, container="c", proxy=SimpleNamespace())
    monkeypatch.setattr(run.served, "find", lambda *_: SimpleNamespace())
    monkeypatch.setattr(run.served, "describe", lambda *_: known)
    monkeypatch.setattr(run, "requests_under_way", lambda _: under_way)
    with pytest.raises(BusyError), run.target_of(paths, None, ours):  # type: ignore[arg-type]
        pass
