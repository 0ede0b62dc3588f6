"""Log-probabilities against those of the stage below, recorded and with faults; other numbers of drafted tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_vllm import JSON, RECORDED, Fault, Reply, only, whole
from heard import heard
from places import PROJECT
from recorded import Site
from smoke_subject import Checked
from smoke_subject import checked as checked

from sparkpin.cli import smoke
from sparkpin.core.errors import ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.pins.manifests import load_chain
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import demands, drafting, drift
from sparkpin.smoke.evidence import evidence_folder
from sparkpin.smoke.expectations import scripted

ROWS = json.loads(RECORDED["drift"][2])["choices"][0]["prompt_logprobs"]
TOKENS = tuple(int(token) for row in ROWS[1:] for token in row)
LOGPROBS = tuple(entry["logprob"] for row in ROWS[1:] for entry in row.values())
BELOW = drift.Reference("sparkpin/x:mtp-1", drift.sha256(scripted().text), TOKENS, LOGPROBS)


def moved(by: float) -> drift.Reference:
    return dataclasses.replace(BELOW, logprobs=tuple(value - by for value in LOGPROBS))


def rows(change: Callable[[list], object]) -> Fault:
    def changed(reply: Reply) -> Reply:
        value = json.loads(reply[2])
        change(value["choices"][0]["prompt_logprobs"])
        return 200, JSON, json.dumps(value).encode()

    return only("drift", changed)


def again(change: Callable[[list], object]) -> Fault:
    """Another answer when it is asked again."""
    asked, fault = itertools.count(), rows(change)
    return lambda kind, reply: fault(kind, reply) if kind == "drift" and next(asked) else reply


def test_numbers_like_those_of_the_stage_below(checked: Checked) -> None:
    leaves: dict[str, object] = {}
    result = checked("drift", drift=0.1, reference=moved(0.09), leaves=leaves)
    assert result.passed and result.applicable
    assert result.detail.endswith("0.0900 from sparkpin/x:mtp-1, expected at most 0.1"), result
    assert leaves == {"logprobs.json": {"text": BELOW.text, "tokens": list(TOKENS), "logprobs": list(LOGPROBS)}}
    first = checked("drift")
    assert first.passed and first.applicable and first.detail.endswith("no stage below to compare with")


@pytest.mark.parametrize(
    ("below", "why"),
    [
        (None, "no release of stage mtp has passed and left its own to compare them with: they are compared once one"),
        (dataclasses.replace(BELOW, text="other"), "sparkpin/x:mtp-1 was asked another text"),
        (dataclasses.replace(BELOW, tokens=TOKENS[1:]), "sparkpin/x:mtp-1 was asked another text, or has other tokens"),
    ],
)
def test_without_numbers_to_compare_with_it_says_so(below: drift.Reference | None, why: str, checked: Checked) -> None:
    result = checked("drift", drift=0.1, reference=below, parent="mtp")
    assert result.passed and not result.applicable and why in result.detail


def entry(value: object) -> Callable[[list], object]:
    return lambda made: made.__setitem__(3, value)


def lower(made: list) -> None:
    for row in made[1:]:
        for one in row.values():
            one["logprob"] -= 0.02


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (whole, "0.1100 from sparkpin/x:mtp-1, expected at most 0.1; the most 0.11"),
        (again(lower), "asked again the text differs by 0.020 on the mean, expected at most 0.01"),
        (again(lambda made: made.pop()), "asked again the text has other tokens"),
        (rows(lambda made: made.clear()), "prompt_logprobs: got [], expected a list of 50 at least"),
        (rows(entry(None)), "prompt_logprobs[3]: got None, expected an object"),
        (rows(entry({"1": {"logprob": float("nan")}})), "token 3: log-probability nan"),
        (only("drift", lambda _: (500, JSON, b"Out of range float values")), "status 500"),
    ],
)
def test_numbers_that_are_not_those(fault: Fault, reason: str, checked: Checked) -> None:
    result = checked("drift", fault, drift=0.1, reference=moved(0.11))
    assert not result.passed and reason in result.detail, result


@pytest.fixture
def release(tmp_path: Path) -> tuple[Paths, Release]:
    site = Site.make(tmp_path)
    return site.paths, site.first()


def leave(paths: Paths, release: Release, value: object) -> None:
    folder = evidence_folder(paths, release)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / drift.FILE, value)


def test_the_reference_is_the_newest_of_the_stage_below_that_passed(release: tuple[Paths, Release]) -> None:
    paths, made = release
    asking = dataclasses.replace(made, demands=made.demands.model_copy(update={"parent": made.stage}))
    assert drift.reference(paths, made) is None, "it asks for none"
    assert drift.reference(paths, asking) is None, "not smoked"
    Releases(paths).update(made.tag, lambda one: dataclasses.replace(one, state="passed", smoke={"passed": True}))
    assert drift.reference(paths, asking) is None, "it left nothing"
    leave(paths, made, {"text": "t", "tokens": [1], "logprobs": [-1]})
    assert drift.reference(paths, asking) == drift.Reference(made.tag, "t", (1,), (-1.0,))
    for damaged in ({"text": "t"}, {"text": "t", "tokens": [1], "logprobs": [-1, -1]}, [], {"text": "t", "tokens": 1}):
        leave(paths, made, damaged)
        assert drift.reference(paths, asking) is None
    other = dataclasses.replace(asking, model="other")
    assert drift.reference(paths, other) is None


FLAG = drafting.FLAG
SPECULATIVE = ("vllm", "serve", "/model", "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}', "--x")


def lengths(release: Release, argv: tuple[str, ...], *wanted: int) -> list[tuple[int, tuple[str, ...]]]:
    demands = release.demands.model_copy(update={"draft_lengths": wanted})
    made = drafting.variants(dataclasses.replace(release, argv=argv, demands=demands))
    return [(length, variant.argv) for length, variant in made]


def test_each_draft_length_has_its_flags(release: tuple[Paths, Release]) -> None:
    _, made = release
    assert lengths(made, SPECULATIVE) == [(2, SPECULATIVE)]
    own, none, three = lengths(made, SPECULATIVE, 0, 2, 3)
    assert own == (2, SPECULATIVE)
    assert none == (0, ("vllm", "serve", "/model", "--x"))
    assert three == (3, tuple(word.replace(":2", ":3") for word in SPECULATIVE))
    assert lengths(made, SPECULATIVE[:3], 0) == [(0, SPECULATIVE[:3])]
    parts = ("vllm", "serve", "/model", "--speculative-config.method", "mtp", FLAG + ".num_speculative_tokens", "2")
    own, none, one = lengths(made, parts, 0, 1)
    assert own == (2, parts) and none == (0, parts[:3])
    assert one == (1, (*parts[:3], FLAG, '{"method":"mtp","num_speculative_tokens":1}'))


@pytest.mark.parametrize(
    ("change", "key"),
    [({"drift": None}, "smoke.drift"), ({"draft_lengths": [3]}, "smoke.position_floors")],
)
def test_a_stage_that_leaves_out_what_its_checks_need_is_refused(change: dict[str, object], key: str) -> None:
    stage = load_chain(PROJECT, "mtp")[-1]
    changed = stage.model_copy(update={"smoke": stage.smoke.model_copy(update=change)})
    with pytest.raises(ManifestError, match=f"stages/mtp.yaml: {key}"):
        demands.checks_of(changed)


@pytest.mark.parametrize(("by", "passes"), [(0.01, True), (0.5, False)])
def test_a_test_that_came_before_that_of_the_stage_below_is_completed_afterwards(
    release: tuple[Paths, Release], by: float, passes: bool
) -> None:
    """Both left their numbers; no server is asked again."""
    paths, made = release
    records, said = Releases(paths), heard()
    one = {"text": "t", "tokens": [1, 2], "logprobs": [-1.0, -2.0]}
    other = {**one, "logprobs": [-1.0 - by, -2.0 - by]}
    unasked = {"name": "drift", "passed": True, "detail": "", "seconds": 1.0, "applicable": False}
    chat = {**unasked, "name": "chat", "applicable": True}
    smoke = {"passed": True, "checks": [chat, unasked, {**unasked, "name": "drift@3"}]}
    below = dataclasses.replace(made, stage="below", tag=made.tag.replace(made.stage, "below"), state="passed")
    demands = made.demands.model_copy(update={"parent": "below", "drift": 0.05})
    records.update(made.tag, lambda known: dataclasses.replace(known, demands=demands, state="passed", smoke=smoke))
    leave(paths, made, one)
    write_json(evidence_folder(paths, made) / drift.marked(drift.FILE, "@3"), other)
    write_json(evidence_folder(paths, made) / "result.json", {**smoke, "image": made.image})
    early = records.get(made.tag)
    assert not drift.is_compared(early)
    assert drift.complete(paths, early) == early and not said, "there is nothing to compare with yet"
    records.save(dataclasses.replace(below, smoke={"passed": True}))
    leave(paths, below, other)
    done = drift.complete(paths, early)
    assert done == records.get(made.tag) and drift.is_compared(done) and done.smoke
    assert (done.smoke_passed, done.state) == (passes, "passed" if passes else "failed")
    same, check, drafts = done.smoke["checks"]
    assert same == chat and below.tag in check["detail"] and check["compared"]
    assert drafts["passed"] and drafts["compared"], "a server of another draft length has numbers of its own"
    result = json.loads((evidence_folder(paths, made) / "result.json").read_text())
    assert (result["passed"], result["checks"], result["image"]) == (passes, done.smoke["checks"], made.image)
    wrong = {**smoke, "passed": False, "checks": [{**unasked, "passed": False, "applicable": True}]}
    records.update(made.tag, lambda known: dataclasses.replace(known, state="failed", smoke=wrong))
    for seen in (records.get(made.tag), early):  # early: as another run has read it before that test
        assert records.get(made.tag) == drift.complete(paths, seen), "a fault stays one"
        assert records.get(made.tag).smoke == wrong


def test_a_release_of_another_build_is_not_judged_by_a_newer_stage_below(
    release: tuple[Paths, Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, made = release
    records, asked = Releases(paths), list[str]()
    monkeypatch.setattr(drift, "complete", lambda paths, release: asked.append(release.tag))
    unasked = {"name": "drift", "passed": True, "detail": "", "seconds": 1.0, "applicable": False}
    records.smoked(made.tag, {"passed": True, "checks": [unasked]})
    below = dataclasses.replace(made, diff_ids=made.diff_ids[:1])
    smoke.complete_above(paths, dataclasses.replace(below, diff_ids=("sha256:" + "0" * 64,)))
    assert not asked
    smoke.complete_above(paths, below)
    assert asked == [made.tag]
