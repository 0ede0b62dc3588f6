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
from typing import Any

import pytest
from fake_vllm import JSON, RECORDED, Fault, Reply, only, text, whole
from smoke_subject import Checked, subject
from smoke_subject import checked as checked
from smoke_subject import socket as socket

from sparkpin.pins.vllm_flags import set_flag
from sparkpin.smoke import checks
from sparkpin.smoke.expectations import expectations


def logprob(change: Callable[[dict], object]) -> Fault:
    """Of the fourth token."""

    def changed(reply: Reply) -> Reply:
        value = json.loads(reply[2])
        change(value["choices"][0]["logprobs"]["content"][3])
        return reply[0], reply[1], json.dumps(value).encode()

    return only("logprobs", changed)


def in_use(name: str, *values: float) -> Fault:
    """What /metrics says, one value after the other, the last one for ever."""
    left = list(values)

    def changed(reply: Reply) -> Reply:
        value = left.pop(0) if len(left) > 1 else left[0]
        return text(f'{name}{{engine="0",model_name="scripted-tiny"}} 0.0', f'{name}{{engine="0"}} {value}')(reply)

    return only("acceptance", changed)


def command(*flags: str) -> dict[str, Any]:
    return {"argv": ("vllm", "serve", "/model", *flags)}


LONG = ("vllm", "serve", "/model", "--max-model-len", "40000")


def cached(*hits: float, warm: Callable[[Reply], Reply] = lambda reply: reply) -> Fault:
    """Hits as /metrics tells them one after the other; the second answer changed."""
    metrics, asked = in_use("vllm:prefix_cache_hits_total", *hits), itertools.count()

    def fault(kind: str, reply: Reply) -> Reply:
        if kind == "recall":
            return warm(reply) if next(asked) else reply
        return metrics(kind, reply)

    return fault


def afterwards(kind: str, change: Callable[[Reply], Reply]) -> Fault:
    """The first answer as it is, later ones changed."""
    count = itertools.count()
    return only(kind, lambda reply: change(reply) if next(count) else reply)


def saying(words: str, prompt: int) -> Fault:
    message = {"role": "assistant", "content": words, "reasoning": "Read."}
    usage = {"completion_tokens": 9, "prompt_tokens": prompt}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
    return lambda kind, reply: (200, JSON, body.encode()) if kind in ("recall", "unicode", "image") else reply


TURKISH = expectations("any").cases["unicode"].holds[0]
WORDS = expectations("any").recall(64)[0].holds
FINITE = "expected a finite one"
ANY: dict[str, Any] = {"expect": expectations("any")}
RUNNING, USED = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
FAULTS: list[tuple[str, Fault, dict[str, Any], str]] = [
    ("logprobs", logprob(lambda entry: entry.update(logprob=float("nan"))), {}, f"log-probability nan, {FINITE}"),
    ("logprobs", logprob(lambda entry: entry.update(logprob=None)), {}, "content[3].logprob: None is not of type"),
    ("logprobs", logprob(lambda entry: entry.update(logprob=0.5)), {}, f"log-probability 0.5, {FINITE}, 0 at most"),
    ("logprobs", logprob(lambda entry: entry.update(logprob=-9999.0)), {}, "-9999.0 stands for minus infinity"),
    ("logprobs", logprob(lambda entry: entry.update(logprob=-2.0)), {}, "-2.000 was chosen at temperature 0"),
    ("logprobs", logprob(lambda entry: entry["top_logprobs"][1].update(logprob=-0.1)), {}, "likeliest add up to 1.905"),
    ("logprobs", logprob(lambda entry: entry.update(top_logprobs=[])), {}, "content[3].top_logprobs: [] "),
    ("logprobs", only("logprobs", text('"completion_tokens":24', '"completion_tokens":25')), {},
     "got 24 entries, expected one for each of 25"),
    ("logprobs", only("logprobs", lambda _: RECORDED["chat"]), {}, "logprobs: None is not of type"),
    ("determinism", afterwards("chat", text("works.", "worked.")), {},
     "content of answer 3 (temperature 0) differs at character 53"),
    ("cancelled", in_use(RUNNING, 0, 3), {}, "3 requests and 0.00% of the cache are in use, "),
    ("cancelled", in_use(USED, 0.25, 0.5), {}, "0 requests and 50.00% of the cache are in use, "),
    ("cancelled", only("chat-stream", lambda _: (503, JSON, b"{}")), {}, "POST /v1/chat/completions: status 503"),
    ("cancelled", only("acceptance", lambda _: (200, "text/plain", b"up 1\n")), {}, f"/metrics has no {USED}"),
    ("prefix-cache", cached(0, 0), {"argv": LONG}, "the second request reused none of its"),
    ("prefix-cache", cached(0, 4000, warm=text("güneşli", "bulutlu")), {"argv": LONG},
     "content of answer 2 (cold, then warm) differs"),
    ("long-context", only("recall", lambda _: RECORDED["chat"]), {}, "content differs at character 2"),
    # An attention that finds nothing.
    ("long-context", only("recall-chat", lambda _: RECORDED["recall"]), {}, """got "Ankara'da hava"""),
    ("long-context", only("recall", text('"prompt_tokens":14', '"prompt_tokens":1')), {}, "expected about 1,448"),
    ("long-context", saying("kestane", 9000), ANY | {"argv": LONG}, "expected 'mercan' in it"),
    ("unicode", saying(TURKISH.replace("ğ", "g"), 90), ANY, "Pijamalı"),
    ("image", saying("It is blue.", 90), ANY, "expected 'red' in it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "changes", "reason"), FAULTS)
def test_a_check_fails_on_its_fault(
    name: str, fault: Fault, changes: dict[str, Any], reason: str, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FREED_SECONDS", 0.0)
    result = checked(name, fault, **changes)
    assert not result.passed and reason in result.detail, result


BLIND = (400, JSON, b'{"error":{"message":"scripted-tiny is not a multimodal model"}}')


@pytest.mark.parametrize(
    ("name", "fault", "changes", "why"),
    [
        ("prefix-cache", whole, command("--no-enable-prefix-caching"), "--no-enable-prefix-caching stands in the"),
        ("prefix-cache", whole, command("--max-model-len", "4k"), "of 6,000 tokens does not fit"),
        ("long-context", whole, command("--max-model-len", "1024"), "leaves 424 tokens for a prompt, expected 512"),
        ("image", only("image", lambda _: BLIND), ANY, "no multimodal model"),
        ("image", whole, {}, "the scripted model reads text alone"),
        ("image", whole, ANY | command("--language-model-only"), "--language-model-only stands in"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_says_why(
    name: str, fault: Fault, changes: dict[str, Any], why: str, checked: Checked
) -> None:
    result = checked(name, fault, **changes)
    assert (result.passed, result.applicable, result.verdict) == (True, False, "not applicable")
    assert why in result.detail


def test_memory_that_is_freed_in_time(socket: Path) -> None:
    with subject(socket, in_use(RUNNING, 0, 2, 1, 0)) as target:
        result = checks.run_check("cancelled", target)
        broken = [exchange for exchange in target.client.exchanges if exchange.fault]
    assert result.passed and result.detail.startswith("3 broken off, 0.00% of the cache in use as before; then 24 ")
    assert [exchange.fault for exchange in broken] == ["broken off by the test"] * 3
    assert all(exchange.status == 200 and exchange.body.startswith(b"data: {") for exchange in broken)


def test_cold_and_warm_cache(socket: Path) -> None:
    with subject(socket, cached(100, 4316)) as target:
        result = checks.run_check("prefix-cache", dataclasses.replace(target, argv=LONG))
        asked = [exchange.request for exchange in target.client.exchanges if exchange.request]
    assert result.passed and result.detail.startswith("2 times the same 43 tokens; 4216 of "), result
    assert asked[0] == asked[1] and asked[0]["messages"][0]["content"].count("<|scripted_answer|>") == 1


def test_an_unknown_model_finds_words_at_each_length_that_the_recipe_allows(socket: Path) -> None:
    long = set_flag(LONG, "--max-model-len", "196608")
    with subject(socket, saying("They are " + ", ".join(WORDS), 131_000)) as target:
        target = dataclasses.replace(target, expect=expectations("any"), argv=tuple(long))
        result = checks.run_check("long-context", target)
        asked = [exchange.request["messages"][0]["content"] for exchange in target.client.exchanges if exchange.request]
    assert result.passed and result.detail.count("131,000") == 4
    lines = [prompt.splitlines() for prompt in asked]
    assert [len(prompt) for prompt in lines] == [step // 16 + 4 for step in (4096, 8192, 32_768, 131_072)]
    places = [next(i for i, line in enumerate(lines[2]) if word in line) / len(lines[2]) for word in WORDS]
    assert [round(place, 2) for place in places] == [0.05, 0.5, 0.95]


def test_a_slow_machine_is_asked_no_more_lengths_than_it_reads_in_time(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long prompt always."""
    monkeypatch.setattr(checks, "LONG_SECONDS", 0.0)
    with subject(socket, saying(", ".join(WORDS), 4_000)) as target:
        target = dataclasses.replace(target, expect=expectations("any"), argv=LONG)
        result = checks.run_check("long-context", target)
        assert result.passed and "8,192" in result.detail, "the result tells which was left out"
        assert len([exchange for exchange in target.client.exchanges if exchange.request]) == 1


def test_an_unknown_model_says_turkish_again(checked: Checked) -> None:
    assert checked("unicode", saying(TURKISH, 90), **ANY).passed


def test_a_picture(socket: Path) -> None:
    with subject(socket, saying("It is red.", 90)) as target:
        assert checks.run_check("image", dataclasses.replace(target, **ANY)).passed
        request = target.client.exchanges[0].request
    assert request
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    png = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (96, 96)
    length = int.from_bytes(png[33:37])
    assert zlib.decompress(png[41 : 41 + length]) == (b"\0" + b"\xff\0\0" * 96) * 96
