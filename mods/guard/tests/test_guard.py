"""The guard before a stand-in for vLLM's app. The project's tests/adversary has a real server behind it."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sparkpin_guard import MOD, Guard, guard
from sparkpin_modkit.testing import parse_reports

COMPLETE = "/v1/completions"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DONE = b"data: [DONE]\n\n"
FLOWS, JSON = {"content-type": "text/event-stream; charset=utf-8"}, {"content-type": "application/json"}


class App:
    """vLLM's: reads a body, answers with `parts`, and asks whether the client is there."""

    def __init__(self, *parts: bytes, status: int = 200, headers: dict[str, str] = JSON, sequences: int = 4) -> None:
        self.parts, self.status, self.headers = parts, status, headers
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=sequences))
        self.state = SimpleNamespace(vllm_config=config)
        self.seen: list[bytes] = []
        self.after: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        self.seen.append(body)
        self.after.append(await receive())
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})


class Answered:
    def __init__(self, sent: list[Any]) -> None:
        start, *rest = sent
        self.status, self.headers = start["status"], {name.decode(): value.decode() for name, value in start["headers"]}
        self.parts = [message.get("body", b"") for message in rest]
        self.body = b"".join(self.parts)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def started(app: Any, **limits: int) -> Guard:
    made = Guard(app, **limits)
    asyncio.run(made({"type": "lifespan", "app": app}, None, None))  # type: ignore[arg-type]
    return made


async def asked(site: Guard, *parts: bytes, path: str = COMPLETE, method: str = "POST", **headers: str) -> Answered:
    sent: list[Any] = []
    left = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]

    async def receive() -> Any:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        await site({"type": "http", "method": method, "path": path, "headers": given}, receive, send)
    except RuntimeError:
        assert sent, "the server's log has it, and the client an answer"
    return Answered(sent)


def ask(site: Guard, *parts: bytes, **how: str) -> Answered:
    return asyncio.run(asked(site, *parts, **how))


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize("size", [1, 2 * guard.LARGE])
def test_a_body_reaches_vllm_as_it_was_and_then_that_the_client_has_gone(size: int) -> None:
    whole = body(prompt="é" * size)
    site = started(app := App(b"yes"))
    assert ask(site, whole[:9], whole[9:12], whole[12:]).body == b"yes"
    assert app.seen == [whole] and app.after == [{"type": "http.disconnect"}]
    assert ask(site, method="GET").body == b"yes" and ask(site, b"").body == b"yes" and site.held == 0


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b"{",
        b'{"a":' * 100_000,
        b'{"a":' * 65 + b"[]" + b"}" * 65,
        b'{"a": [' + b"1," * 300_000 + b"1]}",
        b'{"a": [' + b"1" * 41 + b"]}",
        b"\xff\xfe",
        body(logprob_token_ids=[5]),
        body(n=5),
        body(n="1"),
        body(prompt=["m"] * 5),
        body(prompt=["m"] * 10_000, text="x" * guard.LARGE),
    ],
)
def test_what_vllm_may_not_see_is_answered_as_openai_does(data: bytes) -> None:
    site = started(app := App())
    said = ask(site, data)
    assert (said.status, said.error["code"], app.seen, site.held) == (400, 400, [], 0) and said.error["message"]


def test_as_many_answers_as_the_server_runs_at_a_time_and_no_more() -> None:
    site = started(App(sequences=64))
    assert {ask(site, body(**asked)).status for asked in ({"n": 64}, {"prompt": ["m"] * 64})} == {200}
    said = ask(site, body(prompt=["m"] * 13, n=5))
    assert said.status == 400 and "64" in said.error["message"] and "--max-num-seqs" in said.error["message"]
    assert ask(site, body(messages=[[]] * 65), path="/v1/chat/completions/batch").status == 400


def test_a_body_is_bounded_also_one_that_says_no_length() -> None:
    site = started(app := App(), body=100)
    assert ask(site, b"", content_length="101").status == 413
    assert ask(site, b" " * 60, b" " * 60).status == 413
    assert ask(site, body(prompt="x" * 20)).status == 200 and site.held == 0 and len(app.seen) == 1


def test_all_bodies_together_are_bounded_for_as_long_as_vllm_has_them() -> None:
    class Slow(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await go.wait()
            await super().__call__(scope, receive, send)

    async def several() -> list[Answered]:
        tasks = [asyncio.create_task(asked(site, body(prompt="x" * 60))) for _ in range(3)]
        await asyncio.sleep(0)
        while sum(task.done() for task in tasks) < 1:
            await asyncio.sleep(0.001)
        go.set()
        return await asyncio.gather(*tasks)

    go = asyncio.Event()
    site = started(Slow(), held=200)
    said = asyncio.run(several())
    assert sorted(one.status for one in said) == [200, 200, 503]
    assert [one.headers["retry-after"] for one in said if one.status == 503] == ["5"] and site.held == 0


def test_a_large_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(guard, "fault", lambda *_: threads.append(threading.current_thread()))
    site = started(App())
    for size in (1, guard.LARGE):
        ask(site, body(prompt="x" * size))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_a_recording_is_no_json() -> None:
    site = started(app := App())
    assert ask(site, b"RIFF", path="/v1/audio/transcriptions").status == 200 and app.seen == [b"RIFF"]
    assert ask(site, b"RIFF", content_type="multipart/form-data").status == 400


def test_where_the_app_has_a_prefix_the_path_behind_it_counts() -> None:
    site, sent = started(App()), []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"body": body(n=5), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": f"/a{COMPLETE}", "root_path": "/a", "headers": []}
    asyncio.run(site(scope, receive, send))
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("text", [DEAD, "Traceback (most recent call last)", "in engine/core.py, line 5"])
def test_no_client_sees_the_inside_of_a_failure(text: str) -> None:
    inner = json.dumps({"error": {"message": f'a "b" {text}', "type": "InternalServerError", "code": 500}}).encode()
    site = started(App(inner[:20], inner[20:], status=500, headers={**JSON, "content-length": str(len(inner))}))
    said = ask(site, body())
    assert (said.status, said.headers["retry-after"], said.error["type"]) == (500, "5", "InternalServerError")
    assert int(said.headers["content-length"]) == len(said.body) and text not in said.error["message"]
    whole = ask(started(App(b'{"error": {"message": "out of range"}}', status=500)), body())
    assert whole.error["message"] == "out of range" and whole.headers["retry-after"] == "5"
    bad = b'{"error": {"message": "prompt.py"}}'
    assert ask(started(App(bad, status=400)), body()).body == bad, "what the client did wrong it may read"


def test_an_error_that_vllm_does_not_answer_is_answered() -> None:
    class Fails(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                raise RuntimeError("/opt/vllm")

    said = ask(started(Fails()), body())
    assert said.status == 500 and "opt" not in said.error["message"] and said.headers["retry-after"] == "5"


TOKEN = b'data: {"id": "a", "choices": [{"text": "data: {\\"error\\" EngineCore"}]}\n\n'
BROKEN = b"data: " + json.dumps({"error": {"message": DEAD, "code": 500}}).encode() + b"\n\n"


def test_a_stream_that_broke_does_not_end_as_a_whole_one() -> None:
    said = ask(started(App(TOKEN, BROKEN, DONE, headers=FLOWS)), body(stream=True))
    assert said.parts[0] == TOKEN and DONE not in said.body and b"EngineCore encountered" not in said.body
    assert json.loads(said.parts[1].removeprefix(b"data: "))["error"]["code"] == 500
    whole = ask(started(App(TOKEN, TOKEN, DONE, headers=FLOWS)), body(stream=True))
    assert whole.body == TOKEN * 2 + DONE


def test_nor_does_one_of_anthropic_s_api_show_the_inside() -> None:
    told = "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required"
    value = {"type": "error", "error": {"type": "internal_error", "message": told}}
    said = ask(started(App(b"event: error\ndata: " + json.dumps(value).encode() + b"\n\n", headers=FLOWS)), body())
    event, data = said.parts[0].decode().strip().split("\n")
    assert event == "event: error" and json.loads(data.removeprefix("data: "))["error"]["message"] == guard.FAILED


def test_it_says_that_it_is_at_work_and_for_how_many_sequences(capfd: pytest.CaptureFixture[str]) -> None:
    started(App(sequences=7))
    [line] = parse_reports(capfd.readouterr().err)
    assert (line["mod"], line["event"], line["max_num_seqs"]) == (MOD, "active", 7)


def test_without_the_engine_s_configuration_nothing_is_let_through(capfd: pytest.CaptureFixture[str]) -> None:
    app = App()
    del app.state.vllm_config
    site = Guard(app)
    with pytest.raises(AttributeError):
        asyncio.run(site({"type": "lifespan", "app": app}, None, None))  # type: ignore[arg-type]
    assert [line["event"] for line in parse_reports(capfd.readouterr().err)] == ["failed"]
    with pytest.raises(AttributeError):
        ask(site, body())
    assert app.seen == []


def test_switched_off_it_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_GUARD", "0")
    site = started(app := App(BROKEN, DONE, headers=FLOWS))
    assert ask(site, body(n=5000)).body == BROKEN + DONE and app.seen == [body(n=5000)]
    assert parse_reports(capfd.readouterr().err) == []
