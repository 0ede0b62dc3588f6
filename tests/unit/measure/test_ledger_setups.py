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

FEATURES = {
    "drafts": "--speculative-config",
    "4 bits": "--kv-cache-dtype",
    "matches of 32": "--prefix-match-unit",
    "small steps": "--max-num-batched-tokens",
}


def test_each_pair_of_features_meets_in_a_server_that_is_proved() -> None:
    for calls in (setups.RANDOM, setups.TRAINED):
        flags = [setup.flags.keys() for setup in calls if setup.job == "prove"]
        for one, other in itertools.combinations(FEATURES.values(), 2):
            assert any({one, other} <= own for own in flags), (one, other)
            assert any(one in own and other not in own for own in flags), (one, other)


def test_each_planted_fault_is_asked_for() -> None:
    assert asking.FAULTS.keys() == FAULTS.keys()
