"""What a decode step reads: bytes derived by hand for the 122B, and what others published against its ceiling."""

from __future__ import annotations

import dataclasses
import re
import sys
from statistics import fmean

import pytest
from places import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

from figures import CHAIN, Figure, decode_of

from sparkpin.memory.decode import SHORT, DecodeStep, Read, Speed, distinct
from sparkpin.memory.text import speed_lines
from sparkpin.pins import manifests

BASE, HYBRID, MTP, V2, V2_TQ = CHAIN
SPARK, ACCEPTED = 273e9, manifests.load_published(PROJECT).accepted
# One routed expert of all 48 layers: 48 x 3 x 3072 x 1024 weights in 4 bits, and 2 bytes of scale for each 128.
EXPERT = 452_984_832 // 2 + 452_984_832 // 64
MTP_EXPERT = 3 * 3072 * 1024 * 2
HEAD = 248_320 * 3072 + 2 * (248_320 + 3072)  # in INT8, with its scales


def made(figure: Figure = BASE, *, context: int = 1000, same: bool = False) -> DecodeStep:
    return decode_of(figure).step(context, same_experts=same)


def reads(one: DecodeStep) -> dict[str, Read]:
    return {read.what: read for read in one.reads}


@pytest.mark.parametrize(
    ("experts", "active", "tokens", "wanted"),
    [
        (256, 8, 1, 8.0),
        (256, 8, 3, 23.2578125),  # 256 x 2977 / 32768
        (4, 2, 3, 3.5),  # 4 x (1 - 1/8)
    ],
)
def test_distinct_experts(experts: int, active: int, tokens: int, wanted: float) -> None:
    assert distinct(experts, active, tokens) == pytest.approx(wanted, rel=1e-12)
    # Exactly, over all ways in which two tokens can choose 2 of 4: the mean of the union's size.
    pairs = [frozenset((a, b)) for a in range(4) for b in range(a)]
    assert fmean(len(one | other) for one in pairs for other in pairs) == distinct(4, 2, 2) == 3.0


def test_the_baseline_s_bytes_by_hand() -> None:
    found = reads(made())
    assert (found["INT4 experts"].size, found["INT4 experts"].times) == (EXPERT, 8) == (233_570_304, 8)
    linear = 3072 * 12_288 + 3072 * 8192 + 8192 * 3072 + 2 * 3072 * 64
    full = 3072 * 16_384 + 2 * 3072 * 512 + 8192 * 3072
    assert found["INT4 layers"].bytes == (36 * linear + 12 * full) * 33 / 64 == 2_128_896_000
    assert found["LM head"].bytes == 248_320 * 3072 * 2 == 1_525_678_080
    assert found["gdn states"].size == 36 * (64 * 128 * 128 * 4 + 3 * 12_288 * 2) == 153_649_152
    assert found["gdn states"].times == 2
    assert found["KV cache, full"].bytes == 1000 * 12 * 2 * 2 * 256 * 2 == 24_576_000
    assert "MTP layer" not in found and "embeddings" not in found


def test_two_drafted_tokens() -> None:
    """Three tokens are checked at once; the first draft runs over the same three, the second over one."""
    found = reads(made(MTP))
    assert found["INT4 experts"].times == pytest.approx(23.2578125)
    assert found["LM head"].times == 3
    dense = 3072 * 6144 + 3072 * 16_384 + 2 * 3072 * 512 + 8192 * 3072 + 3 * 3072 * 1024 + 256 * 3072
    norms = 3 * 3072 + 2 * 3072 + 2 * 256 + 3072  # of MTP, of its layer, of q and k, and the shared expert's gate
    assert (found["MTP layer"].size, found["MTP layer"].times) == (2 * (dense + norms), 2)
    assert (found["MTP experts"].size, found["MTP experts"].times) == (MTP_EXPERT, pytest.approx(31.2578125))
    assert found["gdn states"].times == 4  # read once, written for each of three tokens
    assert found["KV cache of the MTP layer"].bytes == 2 * 1000 * 2048
    same = reads(made(MTP, same=True))
    assert (same["INT4 experts"].times, same["MTP experts"].times) == (8, 16)


@pytest.mark.parametrize(
    ("config", "rows", "bits"),
    [('{"draft_vocabulary": {"first": 32768}}', 32_768, 8), ('{"draft_head": {"bits": 4}}', 248_320, 4)],
)
def test_the_int8_head_and_what_a_draft_reads_of_it(config: str, rows: int, bits: int) -> None:
    """v2 reads all of it three times; v2-vocab and v3 once to check, and a part, or half of the bytes, a draft."""
    before, found = made(V2), made(dataclasses.replace(V2, flags=(*V2.flags, "--additional-config", config)))
    assert (reads(before)["LM head"].size, reads(before)["LM head"].times) == (HEAD, 3)
    head, draft = reads(found)["LM head"], reads(found)["LM head to draft"]
    assert (head.size, head.times, draft.times) == (HEAD, 1, 2)
    assert draft.size == pytest.approx(HEAD * rows / 248_320 * bits / 8)
    assert before.bytes - found.bytes == pytest.approx(2 * (HEAD - draft.size))


def test_the_mtp_layer_in_fp8() -> None:
    """What the rule `mtp.layers.*_proj` of docs/checkpoints.md makes: `mtp.fc`, router and norms stay in 16 bits."""
    found, before = reads(made(dataclasses.replace(V2, fp8_draft=True))), reads(made(V2))
    projections = [3072 * 16_384, 512 * 3072, 512 * 3072, 8192 * 3072, *[3072 * 1024] * 3]
    scales = 2 * sum(size // 128**2 for size in projections)
    assert before["MTP layer"].size - found["MTP layer"].size == sum(projections) - scales
    assert found["MTP experts"].size == MTP_EXPERT / 2 + 2 * 3 * 8 * 24


def test_the_cache_in_four_bits_and_a_long_context() -> None:
    """262 bytes a token and head, not 1024 (mods/turboquant), in 12 layers and two passes of the MTP layer."""
    assert made(V2).bytes - made(V2_TQ).bytes == (12 + 2) * 1000 * 2 * (1024 - 262)
    assert reads(made(V2, context=262_144))["KV cache, full"].bytes == 262_144 * 24_576


def test_the_ceilings_of_the_published_chain() -> None:
    assert [round(made(one).ceiling(SPARK, ACCEPTED), 1) for one in CHAIN] == [39.9, 42.7, 49.1, 58.4, 58.5]
    assert [round(made(one, same=True).ceiling(SPARK, ACCEPTED), 1) for one in CHAIN] == [39.9, 42.7, 67.1, 85.9, 86.1]
    step = DecodeStep((Read("all", 5e9, 2),), drafted=2)
    assert (step.ceiling(200e9), step.ceiling(200e9, 0.5), step.ceiling(200e9, 1.0)) == (20.0, 40.0, 60.0)


def test_no_published_speed_is_above_the_ceiling() -> None:
    """Nor below half of it: then something would be counted that is not read."""
    speeds = manifests.load_published(PROJECT).speeds
    for one in speeds:
        manifests.load_recipe(PROJECT, one.recipe)
        manifests.load_stage(PROJECT, one.stage)
        assert one.source.startswith("https://")
    ceilings = {one.stage: made(one).ceiling(SPARK, ACCEPTED) for one in CHAIN}
    for one in [one for one in speeds if one.recipe == "qwen3.5-122b"]:
        assert 0.5 < one.tokens_per_second / ceilings[one.stage] < 1, one
    assert {one.stage: one.tokens for one in CHAIN if one.tokens}.items() <= {
        one.stage: one.tokens_per_second for one in reversed(speeds) if one.recipe == "qwen3.5-122b"
    }.items()


@pytest.mark.parametrize(("bandwidth", "accepted", "rates"), [(SPARK, None, 2), (SPARK, 0.5, 3), (None, 0.5, 0)])
def test_a_speed_without_a_known_share_of_accepted_drafts(
    bandwidth: float | None, accepted: float | None, rates: int
) -> None:
    """Of a drafter that nobody has measured, none and all of its drafts give the two ends alone."""
    speed = Speed({SHORT: made(MTP)}, bandwidth, accepted, ())
    assert (speed.ceiling() is None) == (rates < 3)
    text = "\n".join(speed_lines(speed, 1))
    assert len(re.findall(r"\b\d+\.\d tokens/s|, \d+\.\d if all", text)) == rates
