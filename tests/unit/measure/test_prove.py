"""`invoke prove`: its parts, and the whole against a toy endpoint that can be made bad in every way."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from toy_endpoint import BLOCK, ToyEndpoint, answered

from sparkpin.cli import prove as command
from sparkpin.core.errors import InputError, UntoldError
from sparkpin.measure.prove import asking, judging, passes, record, run, session, sessions, verdict
from sparkpin.measure.prove.asking import meet
from sparkpin.measure.prove.record import ProveRecord
from sparkpin.measure.prove.sessions import Shape
from sparkpin.measure.student_t import T_975, t_beyond
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import Client
from sparkpin.smoke.replies import Fault

SHAPE = Shape(1, 4, 3, 384, 8000, 1.0)
SOUND = verdict.Bounds((0.01,) * 6, 0.05, 0.05, 0.69, (0.69,) * 6)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE", 0.0)  # the toy's counters are never late


def proved(toy: ToyEndpoint, folder: Path) -> ProveRecord:
    with toy.client() as client:
        return command.proved(meet(client), "toy", folder, sessions=3)


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


def test_the_quantiles_are_those_of_the_table() -> None:
    for freedom in range(5, 31):
        assert t_beyond(0.025, freedom) == pytest.approx(T_975[freedom - 1], rel=0.002)


@pytest.mark.parametrize("spread", [0.4, 1.0])
@pytest.mark.parametrize("prompts", [2, 12])
def test_a_sound_server_is_blamed_in_few_runs(spread: float, prompts: int) -> None:
    """About one in a hundred where logarithms are normal; median deviations of few readings vary, so a little more."""
    chance, alarms, runs = random.Random(5), 0, 1500
    for _ in range(runs):
        floor = [math.exp(chance.gauss(-2, spread)) for _ in range(prompts)]
        bound = judging.bound(floor, 5 * prompts)
        alarms += any(math.exp(chance.gauss(-2, spread)) > bound for _ in range(5 * prompts))
    assert alarms / runs < 0.06


def test_the_bound_is_not_moved_by_two_damaged_readings_of_twelve() -> None:
    floor = [0.02, 0.03, 0.025, 0.03, 0.02, 0.04, 0.03, 0.02, 0.03, 0.025]
    assert judging.bound([*floor, 3.0, 2.5], 60) < 0.5
    assert judging.bound([0.0] * 12, 60) == judging.LEAST
    assert judging.bound([0.1], 60) == math.inf


def test_readings_alike_to_the_bit_among_others_make_no_endless_bound(tmp_path: Path) -> None:
    """Distances of an H100: their logarithms alone give a bound of 48 nats, which hid planted faults of 3."""
    floor = [0.0119, 0.0206, 0.0005, 0.0255, 0.0085, 0.0034, 0.0, 0.0259, 0.0, 0.0112, 0.0293, 0.0032]
    control = [0.5, 0.31, 0.26, 0.5]
    assert judging.bound(floor, 70) > 10 and not judging.is_unstable(floor, control)
    assert judging.is_unstable([*floor, 0.3], control) and judging.is_unstable([], control)
    found = proved(ToyEndpoint(noise=0.001), tmp_path)
    assert found.least is not None and found.control is not None and found.least <= found.control


def test_a_sound_endpoint_has_nothing(tmp_path: Path) -> None:
    found = proved(ToyEndpoint(noise=0.001), tmp_path)
    assert (found.verdict, found.finding, found.others) == ("nothing found", None, 0), found.line
    assert found.block == BLOCK and found.least is not None and found.control is not None
    assert found.least < 0.1 < 0.5 < found.control
    assert {one.name for one in found.passes} == {"control", *(one.name for one in passes.TRIED)}
    warm = next(one for one in found.passes if one.name == "warm")
    assert warm.hits and warm.beyond == 0
    assert json.loads(record.keep(tmp_path, found).read_text()) == record.to_json(found)


def test_answers_without_numbers_are_found(tmp_path: Path) -> None:
    found = proved(ToyEndpoint(noise=0.001, fault="nan"), tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.distance > 1, found.line
    assert json.loads(record.keep(tmp_path, found).read_text()) == record.to_json(found)


def test_a_lost_state_is_found_and_its_session_shows_it_again(tmp_path: Path) -> None:
    toy = ToyEndpoint(noise=0.001, fault="lost")
    found = proved(toy, tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.again == verdict.AGAIN
    (path,) = tmp_path.glob("*-session.json")
    sent = json.loads(path.read_text())
    assert len(sent["steps"]) == found.finding.requests > 1 and sent["difference"] > sent["bound"]
    assert sent["seed"] == 1 and sent["answers"][0] != sent["answers"][1]
    same = session.FORMAT.validate_json(path.read_bytes())
    with toy.client() as client, ToyEndpoint().client() as sound:
        assert session.repeated(meet(client), same) > same.bound > session.repeated(meet(sound), same)


def test_one_prompt_beyond_the_bound_has_to_show_with_other_words(tmp_path: Path) -> None:
    """Cold readings alike to the bit say nothing of rounding. A near tie is one of words, a fault of places."""
    with ToyEndpoint().client() as client:
        proof = run.begun(meet(client), 1, (3, 3))
        proof.run()
    prompt = proof.prompts[-1]
    length = len(proof.prompts[-2]) // BLOCK * BLOCK
    for off, far, wanted in (
        (lambda ids, hit: ids == prompt, 0.5, "nothing found"),
        (lambda ids, hit: ids == prompt, 20.0, "found"),  # no near tie is so far off
        (lambda ids, hit: len(ids) == len(prompt) and hit >= length, 0.5, "found"),
    ):
        found = proved(ToyEndpoint(off=off, far=far), tmp_path)
        assert sum(one.beyond for one in found.passes) >= 2, "in each way that reads it from the cache"
        assert found.verdict == wanted, found.line


@pytest.mark.parametrize("near", [0.5, 100.0])
def test_what_is_not_seen_again_is_a_find_only_where_it_is_no_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: float
) -> None:
    """Of a server that dies of its fault, say."""

    def dead(*_: object) -> None:
        raise Fault("POST /v1/completions: the engine is dead")

    monkeypatch.setattr(session, "repeated", dead)
    monkeypatch.setattr(verdict, "NEAR", near)
    monkeypatch.setattr(verdict, "FEW", 0)
    found = proved(ToyEndpoint(noise=0.001, fault="lost"), tmp_path)
    assert found.verdict == ("found" if near < 1 else "cannot tell") and found.finding and not found.finding.again
    assert any("the engine is dead" in note for note in found.notes) and list(tmp_path.glob("*-session.json"))


def test_what_was_decoded_in_another_way_than_it_is_read_is_found(tmp_path: Path) -> None:
    class Cold(ToyEndpoint):
        def row(self, ids: list[int], hit: int, off: bool) -> dict[int, float]:
            return super().row(ids, hit or int(off), off)

    place = min(passes.READ_AT)
    with ToyEndpoint().client() as client:
        proof = run.begun(meet(client), 1, (3, 3))
        proof.run()
    lengths = {len(prompt) + place for prompt in proof.prompts[::2]} - {len(prompt) for prompt in proof.prompts}
    found = proved(Cold(noise=0.001, off=lambda ids, hit: len(ids) in lengths, far=20.0), tmp_path)
    assert found.verdict == "found" and found.finding and found.finding.again == verdict.AGAIN, found.line
    (path,) = tmp_path.glob("*-session.json")
    assert json.loads(path.read_text())["read"]


@pytest.mark.parametrize("room", [64, 83])
def test_a_context_that_is_too_small_is_said(tmp_path: Path, room: int) -> None:
    with ToyEndpoint().client() as client, pytest.raises(UntoldError):
        command.proved(replace(meet(client), block=None, room=room), "toy", tmp_path, sessions=3)


@pytest.mark.parametrize(
    ("choice", "usage"),
    [
        ({}, {"prompt_tokens": "many"}),
        ({}, {"prompt_tokens_details": [1]}),
        ({"logprobs": {"tokens": ["token_id:1"], "top_logprobs": [], "token_logprobs": [-1.0]}}, {}),
        ({"logprobs": {"tokens": [f"token_id:{1 << 40}"], "top_logprobs": [{}], "token_logprobs": [-1.0]}}, {}),
    ],
)
def test_odd_answers_are_wrong(choice: dict[str, Any], usage: dict[str, Any]) -> None:
    sound = {"logprobs": {"tokens": ["token_id:1"], "top_logprobs": [{}], "token_logprobs": [-1.0]}}
    assert asking.said({"choices": [sound], "usage": {}}).prompt == 0
    with pytest.raises(Wrong):
        asking.said({"choices": [sound | choice], "usage": usage})


@pytest.mark.parametrize(
    ("toy", "model"), [(ToyEndpoint(tokens=False), ""), (ToyEndpoint(salts=False), ""), (ToyEndpoint(), "nope")]
)
def test_a_server_that_is_no_vllm_or_has_not_the_model_is_refused(toy: ToyEndpoint, model: str) -> None:
    with pytest.raises(Wrong):
        meet(toy.client(), model)


@pytest.mark.parametrize(("preempted", "found"), [(0, 1), (2, 0), (None, 0)])
def test_of_requests_that_were_preempted_nothing_is_concluded(preempted: int | None, found: int) -> None:
    """They read what they had decoded, as no cold prompt does."""
    with ToyEndpoint().client() as client:
        proof = run.begun(meet(client), 1, (2, 2))
        proof.run()
    crowd = proof.done[passes.COMPANY.name]
    proof.done[passes.COMPANY.name] = replace(crowd, said=[(0, proof.cold[1]), *crowd.said[1:]], preempted=preempted)
    beyond = verdict.beyond(proof, SOUND)
    assert len(beyond) == found
    for sent in (one.session(proof) for one in beyond):
        assert sent.at_once and sent.steps[-1].key == 0 and len(sent.steps) == len(proof.prompts), "all of one wave"


@pytest.mark.parametrize(
    ("toy", "says"),
    [
        (ToyEndpoint(sees=False), "blind"),
        (ToyEndpoint(noise=2.0), "not stable"),
        (ToyEndpoint(caches=False), "nothing was drafted: prefix caching is off"),
        (ToyEndpoint(fault="kept"), "came from the cache: it takes no cache_salt"),
    ],
)
def test_what_tells_nothing_is_said_to_tell_nothing(toy: ToyEndpoint, says: str, tmp_path: Path) -> None:
    found = proved(toy, tmp_path)
    assert found.verdict == "cannot tell" and says in found.line, found.line


def test_a_line_says_of_the_cache_only_what_is_told(tmp_path: Path) -> None:
    untold = proved(ToyEndpoint(metrics=False, drafts=True), tmp_path)
    assert untold.verdict == "nothing found" and "nobody tells how many" in " ".join(untold.notes)
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
    "url", ["http://h:99999", "http://h:0", "http://[::1/v1", "http://", "http://h h/", "ftp://x/"]
)
def test_an_unusual_url_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        command.folder_of(url)


def test_no_server_gets_a_key_that_was_not_named_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIRS", "theirs")

    def sent(url: str, variable: str) -> str | None:
        with command.at(url, variable) as client:
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
