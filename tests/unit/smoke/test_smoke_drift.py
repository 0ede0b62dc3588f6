"""Log-probabilities against those of the stage below, recorded and with faults; other numbers of drafted tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_vllm import JSON, RECORDED, Fault, Reply, only, whole
from places import PROJECT
from recorded import Site
from smoke_subject import Checked
from smoke_subject import checked as checked

from sparkpin.core.errors import ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.pins.manifests import load_chain
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import demands, logprobs
from sparkpin.smoke.evidence import evidence_folder
from sparkpin.smoke.expectations import expectations
from sparkpin.smoke.subject import Reference

ROWS = json.loads(RECORDED["drift"][2])["choices"][0]["prompt_logprobs"]
TOKENS = [int(token) for row in ROWS[1:] for token in row]
LOGPROBS = [entry["logprob"] for row in ROWS[1:] for entry in row.values()]
BELOW = Reference(
    "sparkpin/x:mtp-1", hashlib.sha256(expectations("scripted").text.encode()).hexdigest(), TOKENS, LOGPROBS
)


def moved(by: float) -> Reference:
    return dataclasses.replace(BELOW, logprobs=[value - by for value in LOGPROBS])


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
    assert leaves == {"logprobs.json": {"text": BELOW.text, "tokens": TOKENS, "logprobs": LOGPROBS}}
    first = checked("drift")
    assert first.passed and first.applicable and first.detail.endswith("no stage below to compare with")


@pytest.mark.parametrize(
    ("below", "why"),
    [
        (None, "no release of stage mtp"),
        (dataclasses.replace(BELOW, text="other"), "sparkpin/x:mtp-1 was asked another text"),
        (dataclasses.replace(BELOW, tokens=TOKENS[1:]), "sparkpin/x:mtp-1 was asked another text, or has other tokens"),
    ],
)
def test_without_numbers_to_compare_with_it_says_so(below: Reference | None, why: str, checked: Checked) -> None:
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
        (rows(lambda made: made.clear()), "50 at least"),
        (rows(entry(None)), "prompt_logprobs[3]"),
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
    write_json(folder / logprobs.FILE, value)


def test_the_reference_is_the_newest_of_the_stage_below_that_passed(release: tuple[Paths, Release]) -> None:
    paths, made = release
    asking = dataclasses.replace(made, demands=made.demands.model_copy(update={"parent": made.stage}))
    assert logprobs.reference(paths, made) is None, "it asks for none"
    assert logprobs.reference(paths, asking) is None, "not smoked"
    Releases(paths).update(made.tag, lambda one: dataclasses.replace(one, state="passed", smoke={"passed": True}))
    assert logprobs.reference(paths, asking) is None, "it left nothing"
    leave(paths, made, {"text": "t", "tokens": [1], "logprobs": [-1]})
    assert logprobs.reference(paths, asking) == Reference(made.tag, "t", [1], [-1.0])
    other = dataclasses.replace(asking, model="other")
    assert logprobs.reference(paths, other) is None


@pytest.mark.parametrize(
    ("change", "key"),
    [({"drift": None}, "smoke.drift"), ({"acceptance_floor": None}, "smoke.acceptance_floor")],
)
def test_a_stage_that_leaves_out_what_its_checks_need_is_refused(change: dict[str, object], key: str) -> None:
    stage = load_chain(PROJECT, "mtp")[-1]
    changed = stage.model_copy(update={"smoke": stage.smoke.model_copy(update=change)})
    with pytest.raises(ManifestError, match=f"stages/mtp.yaml: {key}"):
        demands.checks_of(changed)
