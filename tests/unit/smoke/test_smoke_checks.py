"""Each check against a server's recorded answers, and against the same answers with one fault."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import JSON, RECORDED, STREAM, instead, only, text
from heard import heard
from places import PROJECT
from smoke_subject import Checked, subject
from smoke_subject import checked as checked
from smoke_subject import socket as socket

from sparkpin.core.errors import ManifestError
from sparkpin.pins.manifests import load_chain
from sparkpin.pins.schema import Smoke
from sparkpin.smoke import checks, demands, run
from sparkpin.smoke.client import Client
from sparkpin.smoke.expectations import Expectations, expectations, table
from sparkpin.smoke.subject import SmokeSubject


def log(*lines: str) -> Callable[[], tuple[bytes, ...]]:
    return lambda: (
        "\n".join(["INFO starting", *(f"INFO [x.py:1] SPARKPIN_MOD {line}" for line in lines), ""]).encode(),
    )


# What an unknown model must say again is not what the scripted one says: tests/unit/smoke/test_smoke_probes.py.
OWN_WORDS = ("unicode", "long-context", "image", *demands.READERS)
SCRIPTED, SHAPE = expectations("scripted"), expectations("any")
ANY = [(name, SHAPE) for name in demands.CHECKS if name not in OWN_WORDS]


def test_every_check_has_a_name_that_a_stage_may_use() -> None:
    assert sorted([*checks.CHECKS, *table()["checks"]]) == sorted(demands.CHECKS)


@pytest.mark.parametrize(("name", "expect"), [*((name, SCRIPTED) for name in demands.CHECKS), *ANY])
def test_what_vllm_answered_passes(name: str, expect: Expectations, checked: Checked) -> None:
    result = checked(name, expect=expect)
    assert result.passed, result.detail


def one_id(reply: fake_vllm.Reply) -> fake_vllm.Reply:
    """Both calls under the id of the first."""
    value = json.loads(reply[2])
    first, second = value["choices"][0]["message"]["tool_calls"]
    second["id"] = first["id"]
    return reply[0], reply[1], json.dumps(value).encode()


def counted(name: str, value: str) -> Callable[[fake_vllm.Reply], fake_vllm.Reply]:
    labels = f'{name}{{engine="0",model_name="scripted-tiny"}} '
    return text(f"{labels}216.0", labels + value)


FIRST = '"type":"function","index":0,"function":{"name":"get_weather"}'
LATER = '{"index":0,"function":{"arguments":"celsius"}}'
IDENTITY = json.loads(RECORDED["tool-call-stream"][2].split(b"data: ")[6])["choices"][0]["delta"]["tool_calls"][0]["id"]
IN_ONE = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":"all"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
AGAIN = {
    "choices": [{"message": {"role": "assistant", "content": "the same " * 80}, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 160, "prompt_tokens": 20},
}
PLACE_1 = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="scripted-tiny",position="1"}} {}'
FAULTS: list[tuple[Any, ...]] = [
    ("tool-call-stream", text(FIRST, FIRST.replace('"get_weather"', "null")), "name: None is not of type"),
    ("tool-call-stream", text(f'"id":"{IDENTITY}","type"', '"type"'), "'id' is a required property"),
    ("tool-call-stream", text(LATER, LATER.replace('{"arguments"', '{"name":"get_weather","arguments"')),
     "later-delta: $.function.name: 'get_weather'"),
    ("tool-call-stream", lambda reply: text(r"\", \"unit\": \"", "")(text("celsius", "")(reply)),
     "expected {'city': 'Ankara', 'unit': 'celsius'}"),
    ("tool-call-stream", text(r'"arguments":"\"}"', '"arguments":""'), "the arguments are not JSON"),
    ("tool-call-stream", text('"index":0,"function":{"name"', '"index":1,"function":{"name"'), "index 1 after 0 calls"),
    ("tool-call-stream", text('"finish_reason":"tool_calls"', '"finish_reason":"stop"'), "finish_reason: got 'stop'"),
    ("tool-call", text('"content":null', '"content":"<tool_call>"'), "<tool_call> was left in the content"),
    ("tool-call", lambda _: RECORDED["chat"], "got 0 tool calls"),
    ("tool-call-in-reasoning",
     lambda _: text("They ask something small", "Now <tool_call><function=get_weather>")(RECORDED["chat"]),
     "got 0 tool calls, expected 1; content '\\n\\nHello from Sparkpin: every part of this server works.'; "
     "<tool_call> stands in the reasoning"),
    ("tool-calls-parallel", text('"index":1', '"index":0', 99), "later-delta: $", "tool-calls-parallel-stream"),
    ("tool-calls-parallel", one_id, "expected one for each call"),
    ("tool-calls-parallel", text("Iğdır", "Igdir"), "expected {'city': 'Iğdır', 'unit': 'fahrenheit'}"),
    ("tool-call-long", text(r"\\n\\n  </tool_call> kapanış etiketi\\n</article>", ""),
     "arguments: got {'path': 'notlar/çay.html', 'content': '<article>"),
    ("tool-call-long", text(r"\"mode\": 420", r"\"mode\": \"420\""), "mode: '420' is not of type"),
    ("tool-examples", text("Ankara", "Paris"), "{'city': 'Paris'"),
    ("unicode", text("güneşli", "guneşli"), "content differs at"),
    ("tool-call", text('"get_weather"', '"get_time"'), "got 'get_time'"),
    ("chat-stream", text("data: [DONE]\n\n", ""), "expected [DONE] once"),
    ("chat-stream", lambda reply: (200, STREAM, reply[2][:-60] + b"<reset>"), "RemoteProtocolError"),
    ("chat-stream", text('{"id"', '{id"'), "event 1 is not JSON"),
    ("chat-stream", text("data: [DONE]", 'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]'),
     "EngineCore died"),
    ("chat-stream", instead(200, STREAM, IN_ONE), "came in 1 part"),
    ("chat-stream", text(" of this server", ""), "content differs at character 34"),
    ("chat-stream", text('"role":"assistant",', ""), "roles in the deltas: got []"),
    ("tool-answer", lambda reply: (*reply[:2], reply[2].replace("ş".encode(), b"\xc5", 1)), "not UTF-8"),
    ("chat", text(r'"content":"\n\nHello', r'"content":"They ask</think>\n\nHello'), "content differs at character 0"),
    ("chat", text("They ask", "You ask"), "reasoning differs"),
    ("chat-sampled", text("works.", "work."), "content differs at character 53", "chat-stream"),
    ("long-text", text("lighthouse", "lightship"), "content differs at character 11"),
    ("long-text", text('"completion_tokens":159', '"completion_tokens":99'), "99 tok"),
    ("completion", instead(200, JSON, b"\x00\xff OK"), "but no JSON"),
    ("chat", instead(200, JSON, b'{"error": "out of memory"}'), "'choices' is a required"),
    ("completion", lambda kind, reply: reply if kind == "health" else (500, JSON, b"EngineCore died"),
     "status 500: 'EngineCore died'", None),
    ("completion", text(" a pinned", " an unpinned"), "differs at character 2"),
    ("acceptance", instead(200, "text/plain", b"up 1\n"), "does not draft"),
    ("acceptance", counted("draft_tokens_total", "0.0"), "0 drafted tokens are too few"),
    ("acceptance", counted("accepted_tokens_total", "172.0"),
     "172 of 216 drafted tokens accepted (79.6%)"),
    ("acceptance", text(PLACE_1.format("108.0"), PLACE_1.format("64.0")),
     "expected by position at least [0.8, 0.6]"),
    ("acceptance", lambda reply: (*reply[:2], reply[2] + PLACE_1.replace('"1"', '"2"').format("9.0\n").encode()),
     "3 positions, floors for 2"),
    ("acceptance", lambda reply: (*reply[:2], reply[2].replace(b" 216.0", b" 49.0")), "49 drafted tokens are too few"),
]  # fmt: skip
SHAPE_FAULTS: list[tuple[Any, ...]] = [
    ("chat", text("Hello from Sparkpin: every part of this server works.", ""), "has no text"),
    ("completion", text(" a pinned build gives equal bytes on any machine, today and next year.", "!" * 60),
     "one character only"),
    ("completion", text("pinned", "\ufffd"), "bytes that are no text"),
    ("long-text", instead(200, JSON, json.dumps(AGAIN).encode()), "the text repeats itself"),
    ("chat", text(r'"\n\nHello', '"Hm</think>Hello'), "</think> was left"),
    ("tool-call", text("city", "town"), "'city' is a required property"),
    ("tool-call", text("unit", "scale"), "Additional properties are not allowed ('scale'"),
    ("tool-call", text("celsius", "kelvin"), "unit: 'kelvin' is not one of"),
    ("tool-calls-parallel", text("İzmir", "Izmir"), "expected 'İzmir' in one"),
    ("tool-call-long", text(r"\"mode\": 420", r"\"mode\": true"), "mode: True is not of type"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expect"), [*((row, SCRIPTED) for row in FAULTS), *((row, SHAPE) for row in SHAPE_FAULTS)]
)
def test_a_check_fails_on_its_fault(row: tuple[Any, ...], expect: Expectations, checked: Checked) -> None:
    """A row: the check, what is changed, the reason that it gives, and of which request it is changed: None: any."""
    name, change, reason, *kind = row
    result = checked(name, change if kind == [None] else only(*(kind or [name]), change), expect=expect)
    assert not result.passed and reason in result.detail, result


def says(mod: str, event: str, error: str = "") -> str:
    return json.dumps({"mod": mod, "event": event} | ({"error": error} if error else {}))


CPU, HEAD = says("vllm-cpu", "active"), says("int8-lm-head", "active")
QUANTISED = '{"mod":"int8-lm-head","event":"off","head":"AutoGPTQLinearMethod"}'
CAME = '{"mod":"int8-lm-head","event":"kernels","total":8,"image":%d,"cached":0,"compiled":[]}'


@pytest.mark.parametrize(
    ("lines", "kernels", "detail"),
    [
        ([CPU], (), "mod int8-lm-head is not active (no line in the log)"),
        ([CPU, says("int8-lm-head", "off")], (), "mod int8-lm-head is not active (off)"),
        ([CPU, says("int8-lm-head", "failed", "TypeError: no")], (), "mod int8-lm-head failed: TypeError: no"),
        ([CPU, HEAD, says("turboquant", "active")], (), "mod turboquant is active, but this stage does not have it"),
        (["{broken"], (), "unreadable line"),
        ([CPU, HEAD, CAME % 7], ("int8-lm-head",), "int8-lm-head: 7 of 8 kernels from the image; compiled now: none"),
        ([CPU, HEAD, CAME % 8], ("int8-lm-head",), ""),
        ([CPU, HEAD, CAME % 7], (), ""),
    ],
)
def test_the_mods_check_reads_what_each_mod_says(
    lines: list[str], kernels: tuple[str, ...], detail: str, checked: Checked
) -> None:
    result = checked("mods", logs=log(*lines), kernels=kernels)
    assert result.passed == (not detail) and detail in result.detail, result


@pytest.mark.parametrize("kernels", [(), ("int8-lm-head",)])
def test_a_head_that_its_checkpoint_quantised_needs_no_mod(kernels: tuple[str, ...], checked: Checked) -> None:
    result = checked("mods", logs=log(CPU, QUANTISED), kernels=kernels)
    assert result.passed and "AutoGPTQLinearMethod" in result.detail, result


@pytest.mark.parametrize(("nodes", "lacks", "passed"), [(2, None, True), (2, 0, False), (2, 1, False), (1, 0, True)])
def test_each_rank_of_several_has_compared_itself(nodes: int, lacks: int | None, passed: bool, socket: Path) -> None:
    """lacks: the rank whose log does not have the line."""
    logs = [log(CPU, HEAD, *([] if rank == lacks else [says("modkit", "agreed")])) for rank in range(nodes)]
    with subject(socket) as target:
        argv = (*target.argv, "--nnodes", str(nodes))
        asked = dataclasses.replace(target, logs=lambda: tuple(one()[0] for one in logs), argv=argv)
        assert checks.run_check("mods", asked).passed is passed


@pytest.mark.parametrize(("first", "passed"), [(True, True), (False, False)])
def test_of_several_ranks_the_first_answers_requests_and_has_the_guard(first: bool, passed: bool, socket: Path) -> None:
    other = log(CPU, HEAD, says("modkit", "agreed"))
    own = log(CPU, HEAD, says("modkit", "agreed"), says("guard", "active")) if first else other
    with subject(socket) as target:
        demands = target.demands.model_copy(update={"mods": (*target.demands.mods, "guard")})
        argv = (*target.argv, "--nnodes", "2")
        asked = dataclasses.replace(target, logs=lambda: own() + other(), argv=argv, demands=demands)
        assert checks.run_check("mods", asked).passed is passed


def test_a_server_that_does_not_answer_or_trickles_on_is_a_failed_check(checked: Checked) -> None:
    release = threading.Event()
    hangs = checked("chat", only("chat", lambda reply: (release.wait(1), reply)[1]), timeout=0.3)
    assert not hangs.passed and "no answer within 0.3 s" in hangs.detail
    trickles = checked("chat", only("chat", lambda reply: (200, JSON, reply[2] + b"<trickle>")), timeout=0.3)
    assert not trickles.passed and "did not end within 0.3 s" in trickles.detail


class DiesOfSampling(fake_vllm.Handler):
    """Greedy requests are answered; after the first other one every request fails, as when vLLM's engine is dead."""

    status: int | None
    dead = False

    def reply(self, body: dict) -> None:
        type(self).dead |= body.get("temperature", 1) > 0 and "messages" in body
        if self.dead and self.status is None:
            self.close_connection = True
        elif self.dead:
            self.send_error(self.status, "EngineCore encountered an issue")
        else:
            super().reply(body)


@pytest.mark.parametrize(("status", "reason"), [(500, "status 500"), (None, "RemoteProtocolError")])
def test_an_engine_that_dies_of_sampling_is_a_failed_check(status: int | None, reason: str, socket: Path) -> None:
    handler = type("Handler", (DiesOfSampling,), {"status": status})
    with subject(socket, handler=handler) as target:
        assert checks.run_check("chat", target).passed
        result = checks.run_check("chat-sampled", target)
        assert not checks.run_check("chat", target).passed
        request = target.client.exchanges[1].as_dict()["request"]
    assert not result.passed and reason in result.detail
    assert (request["temperature"], request["top_p"], request["top_k"]) == (0.7, 0.95, 20) and "seed" in request


def test_exchanges_keep_what_went_over_the_wire(socket: Path) -> None:
    with subject(socket, only("completion", instead(200, JSON, b"\xff\xfe"))) as target:
        checks.run_check("chat-stream", target)
        checks.run_check("completion", target)
        stream, rubbish = (exchange.as_dict() for exchange in target.client.exchanges)
    assert stream["response"].encode() == RECORDED["chat-stream"][2]
    assert rubbish["response"] == "\\xff\\xfe"


def test_a_server_that_is_gone_is_a_failed_check(socket: Path) -> None:
    with subject(socket) as target, Client.unix(socket.with_name("none")) as client:
        assert not client.healthy()
        result = checks.run_check("completion", dataclasses.replace(target, client=client))
        assert client.exchanges[0].as_dict()["status"] is None
    assert not result.passed and "ConnectError" in result.detail


def test_a_socket_s_path_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    short = tmp_path / "s"
    with subject(short) as target:
        short.rename(folder / "vllm.sock")
        with Client.unix(folder / "vllm.sock") as client:
            assert checks.run_check("chat", dataclasses.replace(target, client=client)).passed


@pytest.mark.parametrize(
    ("smoke", "wanted"),
    [
        ("{add_checks: [acceptance]}", ["chat", "mods", "acceptance"]),
        ("{}", ["chat", "mods"]),
        ("{checks: [unicode, mods]}", ["unicode", "mods"]),
        ("{drop_checks: [vibes]}", "drop_checks"),
        ("{checks: [unicode], drop_checks: [chat]}", "drop_checks"),
    ],
)
def test_a_stage_names_the_checks_that_its_parent_has_not(tmp_path: Path, smoke: str, wanted: list[str] | str) -> None:
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles/x.j2").touch()
    (tmp_path / "stages").mkdir()
    for name, parent, asked in (("low", "null", "{checks: [chat, mods]}"), ("mid", "low", smoke), ("top", "mid", "{}")):
        stage = f"description: d\nparent: {parent}\ntemplate: x.j2\nsmoke: {asked}\n"
        (tmp_path / f"stages/{name}.yaml").write_text(stage)
    if isinstance(wanted, str):
        with pytest.raises(ManifestError, match=f"stages/mid.yaml: .*{wanted}"):
            load_chain(tmp_path, "top")
    else:
        assert [stage.smoke.checks for stage in load_chain(tmp_path, "top")[1:]] == [wanted, wanted]


@pytest.mark.parametrize(
    ("names", "key", "wanted"),
    [
        (["completion", "vibes"], "smoke.checks", "one of completion, "),
        ([], "smoke.checks", "the check mods"),
        (["acceptance"], "smoke.acceptance_floor", ""),
    ],
)
def test_a_stage_whose_checks_prove_too_little_is_refused(names: list[str], key: str, wanted: str) -> None:
    bad = load_chain(PROJECT, "base")[-1].model_copy(update={"smoke": Smoke(checks=names)})
    with pytest.raises(ManifestError) as caught:
        demands.checks_of(bad)
    assert caught.value.key == key and wanted in caught.value.expected


def test_a_check_that_takes_long_says_that_it_runs(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(name: str, target: SmokeSubject) -> checks.CheckResult:
        time.sleep(0.1)
        return checks.CheckResult(name, True, "", 0.1)

    server: Any = SimpleNamespace(exit_reason=lambda: None)
    monkeypatch.setattr(run, "QUIET_SECONDS", 0.02)
    monkeypatch.setattr(run, "run_check", slow)
    lines = heard()
    with subject(socket) as target:
        demands = target.demands.model_copy(update={"checks": ("chat",)})
        run.examine(server, dataclasses.replace(target, demands=demands), run.ServerEvidence())
    assert len([line for line in lines if "chat" in line]) > 1


def test_what_could_not_be_asked_is_one_line_by_reason(checked: Checked) -> None:
    names = [name for name in demands.CHECKS if name.startswith("tool-")]
    results = [checked(name, expect=expectations("led")) for name in (*names, "image", "chat")]
    assert not any(result.applicable for result in results[: len(names)])
    line = run.skipped_line(results)
    assert "\n" not in line and line.count("calls no tools") == 1 and f"{len(names)} tool checks" in line
    assert run.skipped_line([result for result in results if result.applicable]) == ""
