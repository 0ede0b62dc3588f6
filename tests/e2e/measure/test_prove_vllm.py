"""`invoke prove` at real servers: it finds nothing in sound ones, and each fault that is planted into vLLM.

The trained model in BF16: each of its tokens depends on all before it, those of the scripted one do not. What a fault
cannot change (cold prompts, and those of ways in which it is not looked for) is asked once, of the sound server.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import PROJECT
from cpu_stages import ready
from sabotaged import installed, switch

from sparkpin.core.paths import Paths
from sparkpin.measure.prove import run, verdict
from sparkpin.measure.prove.record import ProveRecord
from sparkpin.measure.prove.run import CONCURRENT, READ, TRIED, Endpoint, Proof, Step, Way, meet
from sparkpin.pins.vllm_flags import drop_flags, set_flag
from sparkpin.releases.record import Release

pytestmark = pytest.mark.slow

ROOM = 4096
CACHED = {"--enable-prefix-caching": None, "--block-size": "128", "--num-gpu-blocks-override": "64"}
"""Few blocks, so that they are soon used up; the size: see smoke/test_smoke_cached.py."""
REPLAYED, DRAFTS = "state-not-restored", "drafts-kept"
CACHE_FAULTS = [name for name, (way, _) in verdict.PLANTED.items() if way is not READ]


@dataclass(frozen=True)
class Faulty:
    """A server that can be broken. folder: of its socket."""

    met: Endpoint
    folder: Path


@contextmanager
def serving(release: Release, flags: dict[str, str | None], folder: Path) -> Iterator[Faulty]:
    argv = list(drop_flags(release.argv, "--no-enable-prefix-caching") if "--block-size" in flags else release.argv)
    for name, value in {"--max-model-len": str(ROOM), "--max-num-seqs": "16", **flags}.items():
        argv = set_flag(argv, name, value)
    others, source = shutil.ignore_patterns("int4", "fp8"), PROJECT / "pins/models/trained-tiny"
    model = shutil.copytree(source, folder / "model", ignore=others, copy_function=shutil.copyfile)
    variant = installed(dataclasses.replace(release, argv=tuple(argv)), model)
    own = dataclasses.replace(Paths.from_env(PROJECT), home=folder / "home")  # its containers are no leftovers of ours
    with ready(own, variant, model, timeout=600) as (server, client):
        yield Faulty(meet(client), server.socket.parent)


@pytest.fixture(scope="module")
def cached(stages: dict[str, Release], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with serving(stages["hybrid"], CACHED, tmp_path_factory.mktemp("cached")) as server:
        yield server


@pytest.fixture(scope="module")
def sound(cached: Faulty) -> Proof:
    """All ways, of the server as it is."""
    proof = run.begin(cached.met, 1, (4, 3))
    proof.run()
    return proof


def asked_again(proof: Proof, way: Way) -> Proof:
    """With that way asked again. Which requests share a step depends on what else the machine does, and so do the cold
    readings at once: one of twelve made the bound 0.4 nats on a busy one. Then they are asked again as well."""
    again = dataclasses.replace(proof, done={name: seen for name, seen in proof.done.items() if name != way.name})
    again.run()
    return again if way is CONCURRENT or verdict.bounds(again).first < 0.1 else asked_again(again, CONCURRENT)


def printed(found: ProveRecord) -> ProveRecord:
    print(found.line, *found.notes, *(f"{one.name} {[round(far, 3) for far in one.distances]}" for one in found.ways),
          sep="\n")  # fmt: skip
    return found


def test_nothing_is_found_in_a_sound_server(sound: Proof, tmp_path: Path) -> None:
    found = printed(verdict.conclude(sound, tmp_path, "sound"))
    assert found.verdict == "nothing found", found.line
    assert found.control > 10 * verdict.LEAST
    hits = {one.name: one.hits or 0 for one in found.ways}
    assert min(hits[way.name] for way in TRIED if not way.cold) > 2000, hits
    assert max(hits[way.name] for way in TRIED if way.cold) == 0, hits
    assert {one.name for one in found.ways} >= {way.name for way in TRIED}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_planted_fault_is_found_and_its_session_shows_it(
    fault: str, sound: Proof, cached: Faulty, tmp_path: Path
) -> None:
    way, _ = verdict.PLANTED[fault]
    try:
        switch(cached.folder, fault)
        found = printed(verdict.conclude(asked_again(sound, way), tmp_path, fault))
        assert found.verdict == "found" and found.finding and found.finding.way == way.name, found.line
        (path,) = tmp_path.glob("*-session.json")
        steps = [Step(**step) for step in json.loads(path.read_text())["steps"]]
        if fault == REPLAYED:
            assert run.sent_again(cached.met, steps, way) > found.finding.bound, "others can see it"
    finally:
        switch(cached.folder, "")
    if fault == REPLAYED:
        assert run.sent_again(cached.met, steps, way) < found.finding.bound, "the server without the fault is sound"


def test_what_drafts_leave_in_the_state_is_found(
    stages: dict[str, Release], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("drafted")
    with serving(stages["mtp"], {}, folder) as server:
        for fault in ("", DRAFTS):
            switch(server.folder, fault)
            proof = run.begin(dataclasses.replace(server.met, block=64), 1, (6, 2))
            # All others read no token of a draft: without a cache each is cold.
            proof.done = {way.name: run.WayResponses() for way in TRIED if way not in (CONCURRENT, READ)}
            proof.run()
            assert proof.drafted, "some of them are refused"
            found = printed(verdict.conclude(proof, folder, fault))
            assert (found.finding.way if found.finding else "") == (READ.name if fault else "")
