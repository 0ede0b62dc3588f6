"""`invoke prove`: its parts, and the whole against a toy endpoint that can be made bad in every way."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from certificates import certificate
from local_server import Handler, serve
from made_releases import release
from places import PROJECT
from toy_endpoint import BLOCK, ToyEndpoint, answered
from typed import typed

from sparkpin.cli import prove as command
from sparkpin.core.errors import InputError, NetworkError, SmokeError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.measure.prove import record, run, sessions, verdict
from sparkpin.measure.prove.record import ProveRecord
from sparkpin.measure.prove.run import CONCURRENT, READ, TRIED, Step, meet
from sparkpin.measure.prove.sessions import Shape
from sparkpin.serve import served
from sparkpin.serve.address import Address
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.served import Served, Service, write
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import Client, Fault

SHAPE = Shape(1, 4, 3, 384, 8000, 1.0)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE", 0.0)  # the toy's counters are never late


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certs")
    return {name: certificate(folder / name, days) for name, days in (("one", 2), ("other", 2), ("expired", -1))}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(PROJECT, tmp_path / "cache", tmp_path)


def proved(toy: ToyEndpoint, folder: Path) -> ProveRecord:
    with toy.client() as client:
        return command.proved(meet(client), "toy", folder, sessions=2)


def test_sessions_are_the_same_each_time_and_end_about_where_a_block_does() -> None:
    turns = sessions.sessions(SHAPE)
    assert turns == sessions.sessions(SHAPE) and len(turns) == 12
    assert len({turn.messages[0]["content"] for turn in turns if not turn.number}) == 1, "all share their beginning"
    assert len({turn.messages[1]["content"] for turn in turns if not turn.number}) == 4
    assert {turn.tokens % 384 for turn in turns} > {0, 1, 383}, "at the end of a block, before and behind it"
    for own in sessions.lengths(SHAPE):
        assert own == sorted(own) and len(set(own)) == 3
    called = [message for turn in turns for message in turn.messages if message.get("tool_calls")]
    answered = [message["tool_call_id"] for turn in turns for message in turn.messages if message["role"] == "tool"]
    assert [one["tool_calls"][0]["id"] for one in called] == answered and len(answered) == 8
    assert not sessions.sessions(replace(SHAPE, room=300)), "no room for a block"


def test_other_words_leave_lengths_and_shared_beginnings_as_they_were() -> None:
    same, other = list(range(100)), list(range(500, 600))
    prompts = [[*same, *range(200, 260)], other, [*same, *range(300, 400)]]
    changed = sessions.with_other_words(prompts, 1)
    assert [len(one) for one in changed] == [len(one) for one in prompts] and changed[1] == other
    assert changed[0][:100] == changed[2][:100] != same and sorted(changed[2]) == sorted(prompts[2])
    assert sessions.with_other_words(prompts, 1) == changed != sessions.with_other_words(prompts, 2)


def test_a_sound_endpoint_has_nothing(tmp_path: Path) -> None:
    found = proved(ToyEndpoint(noise=0.001), tmp_path)
    assert (found.verdict, found.finding) == ("nothing found", None), found.line
    assert found.least < 0.1 < 0.5 < found.control
    assert {one.name for one in found.ways} == {"control", *(one.name for one in TRIED)}
    for one in found.ways:
        assert one.beyond == 0
        assert bool(one.hits) == (one.name in ("warm", "cancelled", "evicted"))
    assert json.loads(record.save(tmp_path, found).read_text()) == json.loads(json.dumps(asdict(found)))


def test_more_noise_lets_fewer_planted_faults_show(tmp_path: Path) -> None:
    counts = [proved(ToyEndpoint(noise=noise, drafts=noise > 0.01), tmp_path).planted for noise in (0.001, 0.02, 0.3)]
    assert counts[0] == 5, "of drafts nothing shows where nothing is drafted"
    assert counts[1] == 6 > counts[2]


@pytest.mark.parametrize("fault", ["lost", "nan"])
def test_a_lost_state_is_found_and_its_session_shows_it_again(fault: str, tmp_path: Path) -> None:
    toy = ToyEndpoint(noise=0.001, fault=fault)
    found = proved(toy, tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.shown == verdict.SHOWN, found.line
    (path,) = tmp_path.glob("*-session.json")
    sent = json.loads(path.read_text())
    assert len(sent["steps"]) == found.finding.requests > 1 and sent["difference"] == found.finding.distance
    assert sent["seed"] == 1 and sent["answers"][0] != sent["answers"][1] and not sent["at_once"]
    assert all(sent["answers"]), "one without numbers is kept as one token that no vocabulary has"
    steps = [Step(**step) for step in sent["steps"]]
    with toy.client() as client, ToyEndpoint().client() as sound:
        far, near = (run.sent_again(meet(one), steps, run.WARM) for one in (client, sound))
    assert far > found.finding.bound and near < 1e-6


def test_one_prompt_beyond_the_bound_has_to_show_with_other_words(tmp_path: Path) -> None:
    """Cold readings alike to the bit say nothing of rounding. A near tie is one of words, a fault of places."""
    with ToyEndpoint().client() as client:
        proof = run.begin(meet(client), 1, (2, 3))
        proof.run()
    prompt = proof.prompts[-1]
    length = len(proof.prompts[-2]) // BLOCK * BLOCK
    for off, expected in (
        (lambda ids, hit: ids == prompt, "nothing found"),
        (lambda ids, hit: len(ids) == len(prompt) and hit >= length, "found"),
    ):
        found = proved(ToyEndpoint(off=off, far=20.0), tmp_path)
        assert sum(one.beyond for one in found.ways) >= 2, "in each way that reads it from the cache"
        assert found.verdict == expected, found.line


def test_a_server_that_dies_of_its_fault_is_not_said_to_be_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: object) -> None:
        raise Fault("POST /v1/completions: the engine is dead")

    monkeypatch.setattr(run, "sent_again", dead)
    found = proved(ToyEndpoint(noise=0.001, fault="lost"), tmp_path)
    assert found.verdict == "cannot tell" and "the engine is dead" in found.line and not found.finding
    assert list(tmp_path.glob("*-session.json"))


def test_what_was_decoded_in_another_way_than_it_is_read_is_found(tmp_path: Path) -> None:
    class Later(ToyEndpoint):
        """All that an answer says after its third token is of another state than what is read."""

        def row(self, ids: list[int], hit: int, off: bool) -> dict[int, float]:
            return super().row(ids[:3] if off else ids, hit, False)

        def complete(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
            self.begun = len(ids)
            return super().complete(ids, body)

    toy = Later(noise=0.001)
    inner = toy.row
    toy.row = lambda ids, hit, off: inner(ids, hit, len(ids) > toy.begun + 3)  # type: ignore[method-assign]
    found = proved(toy, tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.way == READ.name, found.line
    (path,) = tmp_path.glob("*-session.json")
    assert json.loads(path.read_text())["read"]


def test_answers_that_are_others_at_once_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that run at the same time each sees a part of its prompt alone."""

    class Mixed(ToyEndpoint):
        crowded = False

        def row(self, ids: list[int], hit: int, off: bool) -> dict[int, float]:
            return super().row(ids[7:] if self.crowded else ids, hit, off)

    toy, inner = Mixed(), run.Endpoint.send

    def send(self: run.Endpoint, steps: list[Step], *, at_once: bool = False) -> list[run.Completion | None]:
        toy.crowded = at_once
        answers = inner(self, steps, at_once=at_once)
        toy.crowded = False
        return answers

    monkeypatch.setattr(run.Endpoint, "send", send)
    found = proved(toy, tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.way == CONCURRENT.name, found.line


@pytest.mark.parametrize("room", [64, 83])
def test_a_context_that_is_too_small_is_said(tmp_path: Path, room: int) -> None:
    with ToyEndpoint().client() as client, pytest.raises(UntoldError):
        command.proved(replace(meet(client), block=None, room=room), "toy", tmp_path, sessions=2)


@pytest.mark.parametrize(
    ("choice", "usage"),
    [
        ({}, {"prompt_tokens_details": [1]}),
        ({"logprobs": {"tokens": ["token_id:1"], "top_logprobs": [], "token_logprobs": [-1.0]}}, {}),
        ({"logprobs": {"tokens": [f"token_id:{1 << 40}"], "top_logprobs": [{}], "token_logprobs": [-1.0]}}, {}),
    ],
)
def test_odd_answers_are_wrong(choice: dict[str, Any], usage: dict[str, Any]) -> None:
    sound = {"logprobs": {"tokens": ["token_id:1"], "top_logprobs": [{}], "token_logprobs": [-1.0]}}
    assert run.completion_of({"choices": [sound], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}).cached == 3
    with pytest.raises(Wrong):
        run.completion_of({"choices": [sound | choice], "usage": usage})


@pytest.mark.parametrize(
    ("toy", "model"),
    [
        (ToyEndpoint(fault="mute"), ""), (ToyEndpoint(tokens=False, fault="mute"), ""), (ToyEndpoint(salts=False), ""),
        (ToyEndpoint(), "nope"),
    ],
)  # fmt: skip
def test_a_server_without_log_probabilities_or_the_model_is_refused(toy: ToyEndpoint, model: str) -> None:
    with pytest.raises(Wrong):
        meet(toy.client(), model)


def test_a_server_that_takes_text_alone_is_asked_in_text(tmp_path: Path) -> None:
    """It tells how much came from its cache in the usage, and answers in a chat's form, as llama.cpp does."""
    sound = proved(ToyEndpoint(tokens=False, metrics=False, noise=0.001), tmp_path)
    assert (sound.verdict, sound.finding) == ("nothing found", None), sound.line
    assert sound.planted == 4, "its cache is not filled, and it does not draft"
    hits = {one.name: one.hits for one in sound.ways}
    assert hits["warm"] and not hits["concurrent"] and "evicted" not in hits, hits
    found = proved(ToyEndpoint(tokens=False, metrics=False, noise=0.001, fault="lost"), tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.way == run.WARM.name, found.line


@pytest.mark.parametrize(
    ("toy", "says"),
    [
        (ToyEndpoint(sees=False), "blind"),
        (ToyEndpoint(noise=2.0), "not stable"),
        (ToyEndpoint(caches=False), "no token of any prompt came from a cache"),
        (ToyEndpoint(fault="kept"), "came from the cache: it takes no cache_salt"),
    ],
)
def test_what_tells_nothing_is_said_to_tell_nothing(toy: ToyEndpoint, says: str, tmp_path: Path) -> None:
    found = proved(toy, tmp_path)
    assert found.verdict == "cannot tell" and says in found.line, found.line


@pytest.mark.parametrize(("tokens", "expected"), [(True, "cannot tell"), (False, "nothing found")])
def test_only_prompts_of_text_may_share_a_little(tokens: bool, expected: str, tmp_path: Path) -> None:
    class Shared(ToyEndpoint):
        """A token of each prompt is in the cache."""

        def complete(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
            self.hits += 1
            return super().complete(ids, body)

    found = proved(Shared(tokens=tokens, noise=0.001), tmp_path)
    assert found.verdict == expected and found.ways[0].hits, found.line


def test_texts_that_become_other_tokens_are_no_distance_of_0(tmp_path: Path) -> None:
    class Merged(ToyEndpoint):
        """A prompt that ends with an answer has a token less."""

        def complete(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
            reply = super().complete(ids, body)
            if body["max_tokens"] > 1:
                return reply
            value = json.loads(reply.read())
            value["usage"]["prompt_tokens"] -= 1
            return answered(200, json=value)

    found = proved(Merged(tokens=False, metrics=False, noise=0.001), tmp_path)
    ways = {one.name: one for one in found.ways}
    assert found.verdict == "nothing found" and not ways[READ.name].distances and ways["warm"].distances, found.line
    assert any("read: 0 of 3 " in note for note in found.notes)


@pytest.mark.parametrize(
    ("status", "says"), [(401, False), (403, False), (429, False), (503, False), (0, False), (422, True), (404, True)]
)
def test_only_a_request_that_is_refused_is_asked_in_text(status: int, says: bool) -> None:
    class Refusing(ToyEndpoint):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/tokenize":
                return answered(200, json={"tokens": [1, 2, 3]})
            if request.url.path == "/v1/completions" and not isinstance(json.loads(request.content)["prompt"], str):
                if not status:
                    raise httpx.ReadError("broken link")
                return answered(status, json={"error": "tokens: first reason"})
            return super().answer(request)

    toy = Refusing(tokens=False)
    if says:
        met = meet(toy.client())
        assert not met.ids and "first reason" in met.notes[-1]
        toy.fault = "mute"
    with pytest.raises((Wrong, Fault)) as caught:
        meet(toy.client())
    assert ("first reason" if status else "broken link") in str(caught.value)


def test_a_line_says_of_the_cache_only_what_is_told(tmp_path: Path) -> None:
    untold = proved(ToyEndpoint(metrics=False, drafts=True), tmp_path)
    assert untold.verdict == "nothing found" and untold.ways[1].hits is None
    assert "NOT IN USE" not in untold.line
    unused = proved(ToyEndpoint(caches=False, drafts=True), tmp_path)
    assert unused.verdict == "nothing found" and "NOT IN USE" in unused.line


@pytest.mark.parametrize(
    "url",
    ["http://me:secret@host/v1", "http://me:secret@[::1/v1", "https://host/v1?key=secret", "https://host/v1#secret"],
)
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InputError) as refused:
        command.folder_of(url)
    assert "secret" not in str(refused.value) and "--key-env" in refused.value.next_step


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://h:0", "http://[::1/v1", "http://[1.2.3]/v1", "http://", "http://h h/", "ftp://x/"]
)
def test_an_unusual_url_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        command.folder_of(url)


def test_no_server_gets_a_key_that_was_not_named_for_it(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIRS", "theirs")

    def sent(url: str, variable: str) -> str | None:
        with command.at(paths, url, variable) as client:
            return dict(client._http.headers).get("authorization")

    for own in ("http://127.0.0.1:8000/v1", "http://[::1]:8000", "http://LOCALHOST/v1"):
        assert (sent(own, ""), sent(own, "THEIRS")) == (None, "Bearer theirs")
    assert (sent("https://far/v1", ""), sent("http://far/v1", "")) == (None, None)
    assert sent("https://far/v1", "THEIRS") == "Bearer theirs"
    for odd in ("sk-SECRET\r", "sk SECRET", "sk-SECRET\u00e9"):
        monkeypatch.setenv("ODD", odd)
        with pytest.raises(InputError) as refused:
            sent("http://127.0.0.1:8000", "ODD")
        assert "SECRET" not in str(refused.value) + refused.value.next_step
    for url, variable in (("http://far/v1", "THEIRS"), ("http://127.0.0.1.far/v1", "THEIRS"), ("https://far", "NONE")):
        with pytest.raises(InputError):
            sent(url, variable)


def test_an_inconclusive_result_is_a_verdict_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    toy = ToyEndpoint(caches=False)

    class Server(Handler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = toy.answer(httpx.Request(self.command, f"http://toy{self.path}", content=body))
            self.send(reply.status_code, reply.read())

        do_POST = do_GET

    with serve(Server) as url:
        code, _, err = typed(["prove", url], capsys)
    assert (code, err.splitlines()[0].partition(": ")[0]) == (UntoldError.exit_code, "verdict"), err


class Listener(Handler):
    """Gets what a server gets, and is no OpenAI endpoint."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self.send(404)


@pytest.mark.parametrize(
    ("serves", "recorded", "ca", "gets"),
    [
        ("one", "", "", False),  # by itself, as any process of this machine can
        ("one", "", "one", True),
        ("one", "", "other", False),
        ("one", "one", "", True),
        ("expired", "expired", "", True),
        ("other", "one", "", False),
        ("other", "one", "other", False),
    ],
)
def test_a_key_goes_to_no_server_whose_certificate_is_not_known(
    paths: Paths,
    certs: dict[str, tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    serves: str,
    recorded: str,
    ca: str,
    gets: bool,
) -> None:
    """serves, recorded, ca: the certificate of who listens there, of the record of `serve`, and of --ca."""
    monkeypatch.setenv("KEY", "secret")
    monkeypatch.setattr(Listener, "keys", [])
    with serve(Listener, certs[serves]) as url:
        if recorded:
            address = Address(host="0.0.0.0", port=int(url.rpartition(":")[2]), cert=certs[recorded][0])
            url = url.replace("127.0.0.1", "localhost")  # which the certificate does not name
            order = LaunchOrder(release(1), paths.cache, None, False, {}, 1.0, restarts=5)
            write(paths.home, "tiny", Service(address=address, orders=(order,)))
            client = served.client_of(Served("", "tiny", "", "m", address, Any, None), "secret")
            with client, contextlib.suppress(Fault):
                client.get("/v1/models")
            assert Listener.keys == gets * ["Bearer secret"]
        with pytest.raises(SmokeError if gets else NetworkError):
            command.prove(paths, url, key_env="KEY", ca=certs[ca][0] if ca else "")
    assert set(Listener.keys) == ({"Bearer secret"} if gets else set())


def test_a_server_without_cache_and_drafts_is_told_before_it_is_asked() -> None:
    for toy in (ToyEndpoint(), ToyEndpoint(caches=False, drafts=True), ToyEndpoint(metrics=False)):
        command.require_provable(meet(toy.client()), "it")
    with pytest.raises(UntoldError):
        command.require_provable(meet(ToyEndpoint(caches=False).client()), "it")


@pytest.mark.parametrize(
    ("status", "told"), [(404, {"text": "<html>a long page"}), (200, {"text": "<!doctype html>"}), (401, {"json": {}})]
)
def test_what_is_no_endpoint_or_refuses_is_wrong(status: int, told: dict[str, Any]) -> None:
    transport = httpx.MockTransport(lambda request: answered(status, **told))
    client = Client(httpx.Client(transport=transport, base_url="http://x"), timeout=1)
    with client, pytest.raises(Wrong) as caught:
        meet(client)
    assert "<" not in str(caught.value)
