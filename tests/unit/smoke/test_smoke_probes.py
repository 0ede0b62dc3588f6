"""Checks that ask more than once or far up a prompt, against recorded answers and against faults in them."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_vllm import JSON, RECORDED, Fault, Reply, only, text, whole
from smoke_subject import socket as socket
from smoke_subject import subject

from sparkpin.pins.vllm_command import set_flag
from sparkpin.smoke import checks, probes
from sparkpin.smoke.expectations import TURKISH, WORDS, shape_only
from sparkpin.smoke.metrics import by_position
from sparkpin.smoke.subject import SmokeSubject


def run(name: str, socket: Path, fault: Fault, **changes: object) -> checks.CheckResult:
    with subject(socket, fault) as target:
        return checks.run_check(name, dataclasses.replace(target, **changes))  # type: ignore[arg-type]


def logprob(change: Callable[[dict], object], place: int = 3) -> Fault:
    def changed(reply: Reply) -> Reply:
        value = json.loads(reply[2])
        change(value["choices"][0]["logprobs"]["content"][place])
        return reply[0], reply[1], json.dumps(value).encode()

    return only("logprobs", changed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry: entry.update(logprob=float("nan")), "token 3: log-probability nan, wanted a finite one"),
        (lambda entry: entry.update(logprob=float("-inf")), "token 3: log-probability -inf, wanted a finite one"),
        (lambda entry: entry.update(logprob=None), "token 3: log-probability None"),
        (lambda entry: entry.update(logprob=0.5), "token 3: log-probability 0.5, wanted a finite one, 0 at most"),
        (lambda entry: entry.update(logprob=-9999.0), "token 3: log-probability -9999.0 stands for minus infinity"),
        (lambda entry: entry.update(logprob=-2.0), "token 3: -2.000 was chosen at temperature 0, 0.000 was there"),
        (lambda entry: entry["top_logprobs"][1].update(logprob=-0.1), "token 3: the likeliest add up to 1.905"),
        (lambda entry: entry.update(top_logprobs=[]), "token 3: no top_logprobs"),
    ],
)
def test_a_log_probability_that_is_none(change: Callable[[dict], object], reason: str, socket: Path) -> None:
    result = run("logprobs", socket, logprob(change))
    assert not result.passed and reason in result.detail, result


def test_a_log_probability_is_there_for_each_token(socket: Path) -> None:
    result = run("logprobs", socket, only("logprobs", text('"completion_tokens":24', '"completion_tokens":25')))
    assert not result.passed and "saw 24 entries, wanted one for each of 25" in result.detail
    result = run("logprobs", socket.with_name("2"), only("logprobs", lambda _: RECORDED["chat"]))
    assert not result.passed and "logprobs: saw None, wanted an object" in result.detail


def test_another_answer_to_the_same_request(socket: Path) -> None:
    count = itertools.count()
    fault = only("chat", lambda reply: text("works.", "worked.")(reply) if next(count) else reply)
    result = run("determinism", socket, fault)
    assert not result.passed and "content of answer 3 (temperature 0) differs at character 53" in result.detail


def in_use(name: str, *values: float) -> Fault:
    """What /metrics says, one value after the other, the last one for ever."""
    left = list(values)

    def changed(reply: Reply) -> Reply:
        value = left.pop(0) if len(left) > 1 else left[0]
        return text(f'{name}{{engine="0",model_name="scripted-tiny"}} 0.0', f'{name}{{engine="0"}} {value}')(reply)

    return only("acceptance", changed)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("vllm:num_requests_running", (0, 3), "3 requests and 0.00% of the cache are in use 0 s after"),
        ("vllm:num_requests_waiting", (0, 1), "1 requests and 0.00% of the cache are in use 0 s after"),
        ("vllm:kv_cache_usage_perc", (0.25, 0.5), "0 requests and 50.00% of the cache are in use 0 s after the last"),
    ],
)
def test_memory_that_is_never_freed(
    name: str, values: tuple[float, ...], reason: str, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "FREED_SECONDS", 0.0)
    result = run("cancelled", socket, in_use(name, *values))
    assert not result.passed and reason in result.detail, result


def test_memory_that_is_freed_in_time(socket: Path) -> None:
    with subject(socket, in_use("vllm:num_requests_running", 0, 2, 1, 0)) as target:
        result = checks.run_check("cancelled", target)
        broken = [exchange for exchange in target.client.exchanges if exchange.fault]
    assert result.passed and result.detail.startswith("3 broken off, 0.00% of the cache in use as before; then 24 ")
    assert [exchange.fault for exchange in broken] == ["broken off by the test"] * 3
    assert all(exchange.status == 200 and exchange.body.startswith(b"data: {") for exchange in broken)


def test_a_server_that_refuses_what_is_to_be_broken_off(socket: Path) -> None:
    result = run("cancelled", socket, only("chat-stream", lambda _: (503, JSON, b"{}")))
    assert not result.passed and "POST /v1/chat/completions: status 503" in result.detail
    metrics = only("acceptance", lambda _: (200, "text/plain", b"up 1\n"))
    result = run("cancelled", socket.with_name("2"), metrics)
    assert not result.passed and "/metrics has no vllm:kv_cache_usage_perc" in result.detail


LONG = ("vllm", "serve", "/model", "--max-model-len", "40000")


def cached(*hits: float, warm: Callable[[Reply], Reply] = lambda reply: reply) -> Fault:
    """Hits as /metrics tells them one after the other; the second answer changed."""
    metrics, asked = in_use("vllm:prefix_cache_hits_total", *hits), itertools.count()

    def fault(kind: str, reply: Reply) -> Reply:
        if kind == "recall":
            return warm(reply) if next(asked) else reply
        return metrics(kind, reply)

    return fault


def test_cold_and_warm_cache(socket: Path) -> None:
    with subject(socket, cached(0, 100, 4316)) as target:
        result = checks.run_check("prefix-cache", dataclasses.replace(target, argv=LONG))
        asked = [exchange.request for exchange in target.client.exchanges if exchange.request]
    assert result.passed and result.detail.startswith("2 times the same 43 tokens; 4216 of "), result
    assert asked[0] == asked[1] and asked[0]["messages"][0]["content"].count("<|scripted_answer|>") == 1


def test_faults_of_the_prefix_cache(socket: Path) -> None:
    result = run("prefix-cache", socket, cached(0, 0, 0), argv=LONG)
    assert not result.passed and "the second request found none of its" in result.detail
    other = cached(0, 0, 4000, warm=text("güneşli", "bulutlu"))
    result = run("prefix-cache", socket.with_name("2"), other, argv=LONG)
    assert not result.passed and "content of answer 2 (cold, then warm) differs" in result.detail


@pytest.mark.parametrize(
    ("name", "argv", "why"),
    [
        ("prefix-cache", ("--no-enable-prefix-caching",), "--no-enable-prefix-caching stands in the release's command"),
        ("prefix-cache", ("--max-model-len", "4k"),
         "a prompt of 6,000 tokens does not fit: --max-model-len leaves 3,4"),
        ("long-context", ("--max-model-len", "1024"), "--max-model-len leaves 424 tokens for a prompt, wanted 512"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_says_why(name: str, argv: tuple[str, ...], why: str, socket: Path) -> None:
    with subject(socket) as target:
        result = checks.run_check(name, dataclasses.replace(target, argv=("vllm", "serve", "/model", *argv)))
        assert not target.client.exchanges
    assert (result.passed, result.applicable, result.verdict) == (True, False, "not applicable")
    assert why in result.detail


def test_a_call_is_required_beside_drafts_too(socket: Path) -> None:
    drafting = ("vllm", "serve", "/model", "--speculative-config", '{"method":"mtp"}')
    result = run("tool-call-required", socket, whole, argv=drafting)
    assert result.passed and result.applicable
    assert result.detail == 'get_weather({"city": "Van"}), in 10 parts, in one and sampled'


def test_what_is_not_found_far_up(socket: Path) -> None:
    result = run("long-context", socket, only("recall", lambda _: RECORDED["chat"]))
    assert not result.passed and "content differs at character 2" in result.detail
    result = run("long-context", socket.with_name("3"), only("recall-chat", lambda _: RECORDED["recall"]))
    assert not result.passed and """saw "Ankara'da hava""" in result.detail, "an attention that finds nothing"
    short = only("recall", text('"prompt_tokens":14', '"prompt_tokens":1'))
    result = run("long-context", socket.with_name("2"), short)
    assert not result.passed and "tokens, wanted about 1,448" in result.detail


def saying(words: str, prompt: int) -> Fault:
    message = {"role": "assistant", "content": words, "reasoning": "Read."}
    usage = {"completion_tokens": 9, "prompt_tokens": prompt}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    return lambda kind, reply: (200, JSON, body.encode()) if kind in ("recall", "unicode", "image") else reply


def test_an_unknown_model_finds_words_at_each_length_that_the_recipe_allows(socket: Path) -> None:
    long = set_flag(LONG, "--max-model-len", "196608")
    with subject(socket, saying("They are " + ", ".join(WORDS), 131_000)) as target:
        target = dataclasses.replace(target, expect=shape_only(), argv=tuple(long))
        result = checks.run_check("long-context", target)
        asked = [exchange.request["messages"][0]["content"] for exchange in target.client.exchanges if exchange.request]
    assert result.passed and result.detail == "found in prompts of 131,000, 131,000, 131,000 tokens"
    lines = [prompt.splitlines() for prompt in asked]
    assert [len(prompt) for prompt in lines] == [8192 // 16 + 4, 32_768 // 16 + 4, 131_072 // 16 + 4]
    places = [next(i for i, line in enumerate(lines[2]) if word in line) / len(lines[2]) for word in WORDS]
    assert [round(place, 2) for place in places] == [0.05, 0.5, 0.95]
    result = run("long-context", socket.with_name("2"), saying("kestane", 9000), expect=shape_only(), argv=LONG)
    assert not result.passed and "wanted 'mercan' in it" in result.detail


def test_an_unknown_model_says_turkish_again(socket: Path) -> None:
    assert run("unicode", socket, saying(TURKISH, 90), expect=shape_only()).passed
    result = run("unicode", socket.with_name("2"), saying(TURKISH.replace("ğ", "g"), 90), expect=shape_only())
    assert not result.passed and "Pijamalı" in result.detail


def test_a_picture(socket: Path) -> None:
    with subject(socket, saying("It is red.", 90)) as target:
        target = dataclasses.replace(target, expect=shape_only())
        assert checks.run_check("image", target).passed
        request = target.client.exchanges[0].request
    assert request
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    png = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (96, 96)
    length = int.from_bytes(png[33:37])
    assert zlib.decompress(png[41 : 41 + length]) == (b"\0" + b"\xff\0\0" * 96) * 96
    result = run("image", socket.with_name("2"), saying("It is blue.", 90), expect=shape_only())
    assert not result.passed and "wanted 'red' in it" in result.detail


def test_a_server_without_eyes_says_so(socket: Path) -> None:
    refused = (400, JSON, b'{"error":{"message":"scripted-tiny is not a multimodal model"}}')
    result = run("image", socket, only("image", lambda _: refused), expect=shape_only())
    assert not result.applicable and result.detail.startswith('the server says: \'{"error"')
    assert not run("image", socket.with_name("2"), whole).applicable
    result = run("image", socket.with_name("3"), whole, expect=shape_only(), argv=("vllm", "--language-model-only"))
    assert not result.applicable and "--language-model-only stands in" in result.detail
    other = only("image", lambda _: (400, JSON, b'{"error":{"message":"bad"}}'))
    assert not run("image", socket.with_name("4"), other, expect=shape_only()).passed


def test_shares_of_each_position_are_summed_over_engines() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines = [f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} 50.0' for engine in "01"]
    lines += [
        f'{name}{{engine="{engine}",position="{place}"}} {40 - 10 * place}' for engine in "01" for place in (0, 1)
    ]
    assert by_position("\n".join(lines)) == (0.8, 0.6)
    assert by_position("up 1\n") == ()


def test_the_flags_of_a_release_are_read_as_vllm_reads_them() -> None:
    target = SmokeSubject(None, "m", shape_only(), lambda: b"", argv=("vllm", "serve", "/m", "--max_model_len=32K"))  # type: ignore[arg-type]
    assert target.flags.number("--max-model-len") == 32_768
