"""benchmarks/ledger: which servers there are, and what they are asked."""

from __future__ import annotations

import itertools
import sys

from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/ledger"))
sys.path.append(str(PROJECT / "tests/support/sabotage"))

import asking
import setups
from sparkpin_cache_faults import FAULTS

from sparkpin.measure.prove.sessions import Shape, lengths

FEATURES = {
    "drafts": "--speculative-config",
    "4 bits": "--kv-cache-dtype",
    "matches of 32": "--prefix-match-unit",
    "small steps": "--max-num-batched-tokens",
}


def test_no_name_is_there_twice_and_each_is_compared_with_one_that_is() -> None:
    for call in setups.CALLS.values():
        assert len({setup.name for setup in call}) == len(call)
        assert all(setup == setups.BY_NAME[setup.name] for setup in call)
        assert all({setup.against, setup.reference} <= setups.BY_NAME.keys() for setup in call)


def test_each_pair_of_features_meets_in_a_server_that_is_proved() -> None:
    for calls in (setups.RANDOM, setups.TRAINED):
        flags = [setup.flags.keys() for setup in calls if setup.job == "prove"]
        for one, other in itertools.combinations(FEATURES.values(), 2):
            assert any({one, other} <= own for own in flags), (one, other)
            assert any(one in own and other not in own for own in flags), (one, other)


def test_each_planted_fault_is_asked_for() -> None:
    assert asking.FAULTS.keys() == FAULTS.keys()


def test_crossing_turns_end_where_decoding_fills_a_block() -> None:
    with asking.crossing():
        found = lengths(Shape(seed=3, sessions=6, turns=3, block=256, room=8000, wordy=4.0))
        assert len(asking.passes.warm([[1], [2]], "")) == 4
    left = [-length % 256 for own in found for length in own]
    assert len(left) == 18 and all(0 < one <= 13 for one in left)
