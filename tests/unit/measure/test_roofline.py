"""The roofline: bytes of a decode step, derived by hand for the 122B, and `invoke roofline` as a person runs it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from unittest import mock

import pytest
from checkout_here import CheckoutHere
from made_releases import release
from memory_samples import MTP2, geometry_122b, settings_of
from places import PROJECT

from sparkpin.checkpoint.plan import final_tensors, make_plan
from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.commands.roofline import CHANCES, ONE_USER, USERS, asked, is_served_here, show_nodes
from sparkpin.commands.roofline import published as show_published
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host.machine import Host
from sparkpin.measure.bench.acceptance import PUBLISHED, Acceptance, acceptance_of
from sparkpin.measure.roofline import published
from sparkpin.measure.roofline.published import (
    ACCEPTED,
    CHAIN,
    FIGURES,
    GEOMETRY,
    MODEL,
    OTHERS,
    Published,
    ceiling_of,
    model_published,
)
from sparkpin.measure.roofline.published import MTP2 as DRAFTS
from sparkpin.measure.roofline.reads import (
    LONGEST,
    Link,
    Read,
    Roofline,
    WeightReads,
    accepted_share,
    best_drafts,
    chance_of,
    collectives,
    distinct,
    link_seconds,
    model_of,
    pipelined,
    roofline,
)
from sparkpin.pins import manifests
from sparkpin.pins.schema import Drafts
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.memory.recipe import known_of
from sparkpin.serve.memory.weights import Loading

BASE, HYBRID, MTP, V2, V2_TQ = CHAIN
FP8_DRAFT = dataclasses.replace(V2, fp8_draft=True)
SPARK = 273e9
LINK = asked(bandwidth="273", context=0, accepted="").link
# One routed expert of all 48 layers: 48 x 3 x 3072 x 1024 weights in 4 bits, and 2 bytes of scale for each 128.
EXPERT = 452_984_832 // 2 + 452_984_832 // 64
MTP_EXPERT = 3 * 3072 * 1024 * 2


def made(figure: Published = BASE, *, context: int = 1000, accepted: float = ACCEPTED, same: bool = False) -> Roofline:
    model = model_published(figure)
    return roofline(model, context=context, bandwidth=SPARK, accepted=accepted, same_experts=same)


def reads(one: Roofline) -> dict[str, Read]:
    return {read.what: read for read in one.reads}


@pytest.mark.parametrize(
    ("experts", "active", "tokens", "wanted"),
    [
        (256, 8, 1, 8.0),
        (256, 8, 2, 15.75),  # 256 x (1 - (31/32)^2) = 256 x 63 / 1024
        (256, 8, 3, 23.2578125),  # 256 x 2977 / 32768
        (4, 2, 3, 3.5),  # 4 x (1 - 1/8)
        (8, 8, 5, 8.0),
        (0, 0, 3, 0.0),
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
    assert found["GDN states"].size == 36 * (64 * 128 * 128 * 4 + 3 * 12_288 * 2) == 153_649_152
    assert found["GDN states"].times == 2
    assert found["KV cache"].bytes == 1000 * 12 * 2 * 2 * 256 * 2 == 24_576_000
    assert "MTP layer" not in found and "embeddings" not in found


def test_fp8_shared_experts_halve_their_bytes() -> None:
    shared = 48 * 3 * 3072 * 1024
    before, after = reads(made(BASE)), reads(made(HYBRID))
    assert after["FP8 layers"].bytes == shared + 144 * 24 * 8 * 2  # with a 16-bit scale for each 128 x 128
    assert before["16-bit layers"].bytes - after["16-bit layers"].bytes == 2 * shared


def test_two_drafted_tokens() -> None:
    """Three tokens are checked at once; the first draft runs over the same three, the second over one."""
    found = reads(made(MTP))
    assert found["INT4 experts"].times == pytest.approx(23.2578125)
    assert found["LM head"].times == 3
    dense = 3072 * 6144 + 3072 * 16_384 + 2 * 3072 * 512 + 8192 * 3072 + 3 * 3072 * 1024 + 256 * 3072
    norms = 3 * 3072 + 2 * 3072 + 2 * 256 + 3072  # of MTP, of its layer, of q and k, and the shared expert's gate
    assert (found["MTP layer"].size, found["MTP layer"].times) == (2 * (dense + norms), 2)
    assert (found["MTP experts"].size, found["MTP experts"].times) == (MTP_EXPERT, pytest.approx(31.2578125))
    assert found["GDN states"].times == 4  # read once, written for each of three tokens
    assert found["KV cache of the MTP layer"].bytes == 2 * 1000 * 2048
    same = reads(made(MTP, same=True))
    assert (same["INT4 experts"].times, same["MTP experts"].times) == (8, 16)


def test_the_int8_head() -> None:
    head = reads(made(V2))["LM head"]
    assert (head.size, head.times) == (248_320 * 3072 + 2 * (248_320 + 3072), 3)


def test_a_list_of_tokens_to_draft() -> None:
    """Stage v2-vocab: the head is read once to check; a draft reads 32,768 of its 248,320 rows."""
    flags = (*V2.flags, "--additional-config", '{"draft_vocabulary": {"first": 32768}}')
    figure = dataclasses.replace(V2, stage="v2-vocab", flags=flags)
    found, before = made(figure), made(V2)
    whole = 248_320 * 3072 + 2 * (248_320 + 3072)
    head, rows = reads(found)["LM head"], reads(found)["LM head, listed rows"]
    assert (head.size, head.times) == (whole, 1)
    assert (rows.size, rows.times) == (pytest.approx(whole * 32_768 / 248_320), 2)
    assert before.step_bytes - found.step_bytes == pytest.approx(2 * whole * (1 - 32_768 / 248_320))
    assert before.step_bytes - found.step_bytes == pytest.approx(1.325e9, rel=1e-3)
    plain = made(dataclasses.replace(MTP, flags=flags))
    assert reads(plain)["LM head, listed rows"].size == pytest.approx(32_768 * 3072 * 2)


def test_a_head_in_4_bits_to_draft_with() -> None:
    """Stage v3: the INT8 head is read once to check, half of its bytes for each draft."""
    flags = (*V2.flags, "--additional-config", '{"draft_head": {"bits": 4}}')
    found, before = made(dataclasses.replace(V2, flags=flags)), made(V2)
    whole = 248_320 * 3072 + 2 * (248_320 + 3072)
    head, rows = reads(found)["LM head"], reads(found)["LM head, 4 bits"]
    assert (head.size, head.times, rows.size, rows.times) == (whole, 1, pytest.approx(whole / 2), 2)
    assert before.step_bytes - found.step_bytes == pytest.approx(0.763e9, rel=1e-2)


def test_the_mtp_layer_in_fp8() -> None:
    """What the rule `mtp.layers.*_proj` of docs/checkpoints.md makes: `mtp.fc`, router and norms stay in 16 bits."""
    found, before = reads(made(FP8_DRAFT)), reads(made(V2))
    projections = [3072 * 16_384, 512 * 3072, 512 * 3072, 8192 * 3072, *[3072 * 1024] * 3]
    scales = 2 * sum(size // 128**2 for size in projections)
    assert before["MTP layer"].size - found["MTP layer"].size == sum(projections) - scales
    assert found["MTP experts"].size == MTP_EXPERT / 2 + 2 * 3 * 8 * 24
    routed = (8 + 256 * (1 - (31 / 32) ** 3)) * (MTP_EXPERT / 2 - 2 * 3 * 8 * 24)
    saved = sum(read.bytes for read in before.values()) - sum(read.bytes for read in found.values())
    assert saved == pytest.approx(2 * (sum(projections) - scales) + routed)  # 0.47 of 12.06 GB


def test_the_ceilings_of_the_published_chain() -> None:
    """FACTS of the project had 40.0 / 42.8 / 50-54 / 60-66 (docs/roofline.md tells the difference)."""
    assert [figure.tokens for figure in CHAIN] == [28.3, 30.8, None, 51.6, 39.0]
    assert [round(made(figure).ceiling, 1) for figure in CHAIN] == [39.9, 42.7, 49.1, 58.4, 58.5]
    assert [round(made(figure, same=True).ceiling, 1) for figure in CHAIN] == [39.9, 42.7, 67.1, 85.9, 86.1]
    seen = [round(made(figure).fraction(figure.tokens), 3) for figure in CHAIN if figure.tokens]
    assert seen == [0.709, 0.721, 0.883, 0.666]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.repo} {figure.what}")
def test_no_published_figure_is_above_our_ceiling_without_a_reason(figure: Published) -> None:
    """At the Spark's nominal bandwidth. One that is neither below nor said to be above would show a wrong model."""
    made = ceiling_of(figure, SPARK, LINK)
    assert (made is None) == (not figure.whole)
    if made and figure.tokens:
        assert (figure.tokens > made[0].ceiling) == bool(figure.above), made[0].ceiling
        assert figure.tokens > 0.5 * made[0].ceiling  # else something is counted that is not read
    assert figure.source.startswith("https://") and figure.date.startswith("2026-")


def test_a_figure_above_the_ceiling_is_seen() -> None:
    with pytest.raises(AssertionError):
        test_no_published_figure_is_above_our_ceiling_without_a_reason(dataclasses.replace(BASE, tokens=41.0))
    with pytest.raises(AssertionError):
        test_no_published_figure_is_above_our_ceiling_without_a_reason(dataclasses.replace(BASE, above="no reason"))


def test_the_page_of_published_figures_has_these_rows() -> None:
    """docs/published.md: model, format, machines, what was served, tok/s, our ceiling, engine and date."""
    page = (PROJECT / "docs/published.md").read_text(encoding="utf-8")
    for figure in FIGURES:
        if figure.tokens is None:
            continue
        made = ceiling_of(figure, SPARK, LINK)
        ceiling = f"{made[0].ceiling:.1f}, {made[0].fraction(figure.tokens):.0%}".replace("%", " %") if made else "-"
        cells = (figure.repo.rpartition("/")[2], f"{figure.format}; {figure.what}", str(figure.nodes), figure.served,
                 f"{figure.tokens:g}", ceiling, figure.engine, f"[{figure.date}]({figure.source})")  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page


def pair(nodes: int, accepted: float = 0.95) -> Roofline:
    """INT4 with one drafted token, as the seeds' two Sparks ran it."""
    flags = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}', "-tp", str(nodes))
    model = model_published(Published("pair", "", 56.0, False, flags, False))
    return roofline(model, context=1000, bandwidth=SPARK, accepted=accepted, link=LINK)


def test_what_two_nodes_read_and_exchange() -> None:
    flags = (*DRAFTS, "-tp", "2")
    one, two = model_published(V2), model_published(dataclasses.replace(V2, flags=flags))
    assert collectives(one) == [] and link_seconds(one, LINK) == 0
    halves = {row.kind: row.experts for row in two.weights}
    assert all(halves[row.kind] == row.experts / 2 for row in one.weights)
    sums, logits = 2 * 3072, 248_320  # bytes of a token: a ring of two sends all of a sum, half of what it gathers
    assert collectives(two) == [(97, 3 * sums), (1, 3 * logits), (2 * 3, sums), (2, sums / 2), (2, logits)]
    size = 97 * 3 * sums + 3 * logits + 6 * sums + sums + 2 * logits
    assert link_seconds(two, LINK) == pytest.approx(108 * 55e-6 + size / 12.25e9)
    assert link_seconds(two, Link(0, math.inf)) == 0


def test_the_layers_in_parts_gain_nothing_for_one_user() -> None:
    one = made(BASE)
    two = pipelined(one, model_published(BASE), 2, LINK)
    assert two.link_seconds == pytest.approx(55e-6 + 2 * 3072 / 12.25e9)
    assert two.step_bytes == one.step_bytes and 0.99 * one.ceiling < two.ceiling < one.ceiling


def test_the_seeds_pair() -> None:
    """36.5 tok/s on one Spark, "up to 56" on two with 85 to 100 % accepted: 1.53 times, where the bytes allow 1.54.

    If the second Spark reads as slowly as the first did, it comes to 59.5, 6 % more than was seen; 75 microseconds an
    all-reduce would make it 56.
    """
    one, two = pair(1), pair(2)
    assert (round(one.ceiling, 1), round(two.ceiling, 1)) == (49.1, 75.4)
    assert two.step_bytes / one.step_bytes == pytest.approx(0.504, abs=0.001)
    reading = one.step_tokens / 36.5 * two.step_bytes / one.step_bytes
    assert two.step_tokens / (reading + two.link_seconds) == pytest.approx(59.5, abs=0.05)
    slower = two.step_tokens / 56 - reading - (two.link_seconds - 103 * 55e-6)
    assert slower / 103 == pytest.approx(75e-6, abs=0.5e-6)


def test_the_table_of_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = asked(bandwidth="273", context=1000, accepted="", link_latency="0", link_bandwidth="25")
    assert chosen.link == Link(0, 25e9)
    show_nodes(chosen, [(1, "", pair(1)), (2, "tensor-parallel", pair(2))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["1", "10.85", "0.0", "39.7", "49.1", "1.00x"]
    assert lines[-1].split() == ["2", "tensor-parallel", "5.47", "5.8", "25.8", "75.4", "1.54x"]
    for wrong in ("-1", "x"):
        with pytest.raises(InputError, match="--link-latency"):
            asked(bandwidth="273", context=1000, accepted="", link_latency=wrong)


def test_time_on_the_link_is_none_of_the_memory_s() -> None:
    two = pair(2)
    assert two.implied(two.ceiling) == pytest.approx(SPARK)
    assert two.implied(2 * two.step_tokens / two.link_seconds) == math.inf


def test_the_stage_of_four_bits_differs_by_its_cache() -> None:
    """262 bytes a token and head, not 1024 (mods/turboquant), in 12 layers and two passes of the MTP layer."""
    flags = manifests.load_stage(PROJECT, V2_TQ.stage).serve.flags
    assert V2_TQ.flags == (*V2.flags, *(str(word) for item in flags.items() for word in item))
    assert made(V2).step_bytes - made(V2_TQ).step_bytes == (12 + 2) * 1000 * 2 * (1024 - 262)


def test_what_a_measured_speed_says() -> None:
    one = Roofline((Read("all", 5e9, 2),), drafted=2, context=0, bandwidth=200e9, accepted=0.5)
    assert (one.step_bytes, one.step_seconds, one.step_tokens, one.ceiling) == (10e9, 0.05, 2.0, 40.0)
    assert (one.fraction(30.0), one.implied(30.0)) == (0.75, 150e9)


def test_a_long_context_and_nothing_accepted() -> None:
    long = reads(made(V2, context=262_144))
    assert long["KV cache"].bytes == 262_144 * 24_576
    assert made(V2, accepted=0).step_tokens == 1
    assert "KV cache" not in reads(made(V2, context=0))


@pytest.mark.parametrize("figure", [*CHAIN, FP8_DRAFT], ids=lambda figure: f"{figure.stage}-{figure.fp8_draft}")
def test_headers_of_the_published_shapes_give_the_same(figure: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the builder's plan, as the headers of a locked model come; with 2 experts a layer, which is quicker."""
    donor = "Qwen/Qwen3.5-122B-A10B-FP8"
    few = {repo: published.shapes_of(repo) for repo in (published.REPO, donor)}
    for one in few.values():
        one.numbers["expert"] = one.config["text_config"]["num_experts"] = 2
    monkeypatch.setattr(published, "shapes_of", few.__getitem__)
    listings = {"int4": few[published.REPO].listing("int4"), "fp8": few[donor].listing("fp8")}
    pin = manifests.load_model(PROJECT, MODEL)
    steps = ("copy", "hybrid", "mtp", *(["mtp-fp8"] if figure.fp8_draft else [])) if figure.fp8 else ("copy",)
    plan = make_plan(listings, pin, steps)
    geometry = geometry_122b()
    assert geometry == GEOMETRY
    flags = " ".join((MTP2, *figure.flags[2:])) if figure.flags else ""
    loading = Loading(bool(figure.flags), True, figure.int8, False)
    settings = settings_of(geometry, flags, "cuda", (0, 33))
    tensors = [placed.source.info for placed in final_tensors(plan, listings) if placed.listed]
    assert model_of(tensors, geometry, settings, loading, symmetric=True) == model_published(figure)


def test_zero_points_are_read_where_a_model_has_its_own() -> None:
    tensors = [
        TensorInfo("model.layers.0.mlp.experts.0.up_proj.qweight", "I32", (16, 128), 0, 8192),
        TensorInfo("model.layers.0.mlp.experts.0.up_proj.qzeros", "I32", (1, 16), 8192, 8256),
        TensorInfo("model.layers.0.mlp.experts.1.up_proj.qweight", "I32", (16, 128), 8256, 16_448),
        TensorInfo("model.embed_tokens.weight", "BF16", (100, 128), 16_448, 42_048),
        TensorInfo("model.visual.proj.weight", "BF16", (100, 128), 42_048, 67_648),
    ]
    settings, loading = settings_of(GEOMETRY, "", "cuda"), Loading(False, True, False, False)
    for symmetric, routed in ((True, 16_384), (False, 16_448)):
        found = model_of(tensors, GEOMETRY, settings, loading, symmetric=symmetric)
        assert (found.experts, found.active) == (2, 2)
        rows = {row.kind: (row.dense, row.experts) for row in found.weights}
        assert rows == {"INT4 experts": (0, routed), "LM head": (25_600, 0)}  # tied to the embeddings


def test_options() -> None:
    one = asked(bandwidth="4800", context=32_768, accepted="1")
    assert (one.bandwidth, one.context, one.accepted) == (4.8e12, 32_768, 1.0)
    assert asked(bandwidth="1", context=1, accepted="").accepted is None
    for bandwidth, accepted, said in (
        ("fast", "1", "--bandwidth: saw 'fast'"),
        ("0", "1", "--bandwidth: saw '0'"),
        ("inf", "1", "--bandwidth: saw 'inf'"),
        ("273", "1.5", "--accepted: saw '1.5'"),
        ("273", "-1", "--accepted: saw '-1'"),
    ):
        with pytest.raises(InputError, match=said):
            asked(bandwidth=bandwidth, context=1000, accepted=accepted)


def test_the_share_accepted_is_what_the_newest_release_that_passed_measured(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    records = Releases(paths)

    def saved(number: int, state: str, share: object, argv: tuple[str, ...] = DRAFTS, stage: str = "v2") -> Release:
        smoke = {"passed": state == "passed", "seconds": 1.0, "checks": [], "acceptance": share}
        made = release(number, state, argv=("vllm", "serve", "/model", *argv), smoke=smoke, stage=stage)
        records.save(made)
        return made

    assert acceptance_of(paths, "tiny", "v2", 2) == PUBLISHED
    one = saved(1, "passed", 0.625)
    for number, known in enumerate(({"share": "much"}, {"share": None}, {"share": 7}), start=2):
        saved(number, "passed", **known)
    saved(5, "failed", 0.1)
    saved(6, "passed", 0.2, argv=())
    saved(7, "passed", 0.3, stage="mtp")
    assert acceptance_of(paths, "tiny", "v2", 2) == Acceptance(0.625, f"smoke test of {one.tag}", 2)
    assert acceptance_of(paths, "tiny", "v2", 3) == PUBLISHED
    bench = SimpleNamespace(of_kind=lambda _: [SimpleNamespace(drafted=60, accepted=45)])
    with mock.patch("sparkpin.measure.bench.record.newest", lambda _, made: bench if made == one else None):
        assert acceptance_of(paths, "tiny", "v2", 2) == Acceptance(0.75, f"bench of {one.tag}", 2)


def test_the_share_of_a_drafter_is_never_that_of_another_model(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    drafts = Drafts(method="eagle3", tokens=8, acceptance_floor=0.5)
    with pytest.raises(InputError) as caught:
        acceptance_of(paths, "tiny", "v2", 2, drafts)
    assert "--accepted" in caught.value.next_step
    assert acceptance_of(paths, "tiny", "v2", 2, drafts.model_copy(update={"accepted": 0.4})).share == 0.4
    smoke = {"passed": True, "seconds": 1.0, "checks": [], "acceptance": 0.625}
    Releases(paths).save(release(1, "passed", argv=("vllm", "serve", "/model", *DRAFTS), smoke=smoke, stage="v2"))
    assert acceptance_of(paths, "tiny", "v2", 2, drafts).share == 0.625


@pytest.fixture
def copy(tmp_path: Path) -> CheckoutHere:
    return CheckoutHere.make(tmp_path / "copy")


def test_the_published_chain_as_a_person_sees_it(copy: CheckoutHere) -> None:
    lines = copy.done("roofline", "--published", COLUMNS="80").splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("published: "))
    assert max(map(len, lines[1:end])) <= 80, "the table"
    assert lines[end].startswith("published: five prompts on one Spark, not measured here; docs/")
    lines = lines[:end]
    found = {line.split()[0]: line.split()[-6:] for line in lines if line.startswith(("base", "hybrid", "mtp", "v2"))}
    assert found["base"] == ["6.84", "39.9", "39.9", "28.3", "71%", "194"]
    assert found["hybrid"] == ["6.39", "42.7", "42.7", "30.8", "72%", "197"]
    assert found["mtp"] == ["14.34", "49.1", "67.1", "-", "-", "-"]
    assert found["v2"] == ["12.06", "58.4", "85.9", "51.6", "88%", "241"]
    assert found["v2-tq"] == ["12.03", "58.5", "86.1", "39", "67%", "182"]
    value = json.loads(copy.done("roofline", "--published", "--bandwidth", "546", "--json"))
    assert [round(row["ceiling"], 1) for row in value["chain"]] == [79.8, 85.5, 98.2, 116.8, 117.1]
    assert [row.get("measured") for row in value["chain"]] == [28.3, 30.8, None, 51.6, 39.0]
    assert [row["what"] for row in value["others"]] == [figure.what for figure in OTHERS]


def test_published_speeds_are_not_held_against_the_ceilings_of_a_longer_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = asked(bandwidth="273", context=131_072, accepted="")
    show_published(long, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[-3:] for line in lines if line.startswith(("base", "hybrid", "mtp", "v2"))]
    assert rows == 5 * [["-", "-", "-"]] and any("and short ones: nothing to hold against" in line for line in lines)
    show_published(long, as_json=True)
    chain = json.loads(capsys.readouterr().out)["chain"]
    assert len(chain) == 5 and not [row for row in chain if {"measured", "fraction", "implied"} & set(row)]


def test_a_recipe_s_headers(copy: CheckoutHere) -> None:
    """Of the generated model on a Spark: INT4 experts of 4 layers x 3 x 128 x 128, four of them, two active."""
    arguments = ("roofline", "--recipe", "scripted-tiny-spark", "--json", "--context", "0")
    value = json.loads(copy.done(*arguments))
    found = {read["what"]: read for read in value["reads"]}
    assert found["INT4 experts"]["size"] == 4 * 3 * 128 * 128 * 33 / 64 == 101_376
    assert (found["INT4 experts"]["times"], found["LM head"]["times"], value["drafted"]) == (3.5, 3, 2)
    assert found["LM head"]["size"] == 1024 * 128 + 2 * (1024 + 128)
    listed = json.loads(copy.done(*arguments, "--stage", "v2-vocab"))
    assert listed["step_bytes"] == value["step_bytes"]  # all of its 1024 tokens are among the first 65,536
    base = json.loads(copy.done(*arguments, "--stage", "base", "--measured", "1000"))
    assert base["step_tokens"] == 1 and "MTP layer" not in {read["what"] for read in base["reads"]}
    assert base["fraction"] == pytest.approx(1000 * base["step_bytes"] / 273e9)
    assert [(row["nodes"], row["how"]) for row in value["nodes"]] == [
        (1, ""), (2, "tensor-parallel"), (2, "layers in parts"), (4, "layers in parts"),
    ]  # fmt: skip
    pair = json.loads(copy.done(*arguments, "--nodes", "2", "--measured", "1e9"), parse_constant=pytest.fail)
    assert pair["implied"] is None and pair["fraction"] > 1  # no memory is as fast: the link alone takes longer
    assert value["nodes"][0]["ceiling"] == value["ceiling"] and value["nodes"][2]["ceiling"] < value["ceiling"]
    text = copy.done("roofline", "--measured", "1000")
    assert "Decode of recipe scripted-tiny, stage v2-tq, one user, 1,000 tokens in the cache\n" in text
    assert "2.58 tokens a step: 2 drafted, 79 % of them accepted (as published for the 122B; --accepted)" in text
    assert "\nceiling: " in text and "\nmeasured: 1000 tok/s, " in text and "published chain" not in text
    assert " MB a step at 273 GB/s (a DGX Spark's memory, nominally): " in text
    assert "\nnote: this machine is no DGX Spark, so that is no ceiling of what is served here: --bandwidth " in text
    assert "\nbest draft length: " in text and "\nusers  50%" in text
    text = copy.done("roofline", "--bandwidth", "20")
    assert " MB a step at 20 GB/s: " in text and "Spark" not in text


def test_a_recipe_for_several_users(copy: CheckoutHere) -> None:
    """With `drafts_by_users` a step of 8 users drafts what that says, not what vLLM drafts at most."""
    path = copy.folder / "recipes/scripted-tiny-spark.yaml"
    path.write_text(f"{path.read_text().rstrip()}\ndrafts_by_users: {{1: 3, 8: 1}}\n")
    arguments = ("roofline", "--recipe", "scripted-tiny-spark", "--accepted", "0.6")
    one, many = (json.loads(copy.done(*arguments, "--users", users, "--json")) for users in ("1", "8"))
    assert (one["drafted"], one["users"], many["drafted"], many["users"]) == (3, 1, 1, 8)
    chance = chance_of(0.6, 3)
    assert one["step_tokens"] == pytest.approx(1 + 3 * 0.6) and many["step_tokens"] == pytest.approx(8 * (1 + chance))
    assert many["nodes"] == [] and len(many["draft_lengths"]) == len(USERS) * len(CHANCES)
    assert many["best_drafted"][0] in range(LONGEST + 1)
    text, pair = copy.done(*arguments, "--users", "8"), copy.done(*arguments, "--users", "8", "--nodes", "2")
    assert "stage v2-tq, 8 users, each with 1,000 tokens in the cache\n" in text and ONE_USER not in text
    assert f"note: {ONE_USER}" in pair and "On several, one user" not in pair
    stage = copy.folder / "stages/mtp.yaml"
    stage.write_text(stage.read_text().replace(", num_speculative_tokens: 2", ""))
    path.write_text(path.read_text().replace("drafts_by_users", "# "))
    assert json.loads(copy.done(*arguments, "--json"))["drafted"] == 1  # as many as the model has MTP layers


def test_the_published_share_is_one_of_two_drafts_whatever_a_recipe_drafts_at_most(copy: CheckoutHere) -> None:
    path = copy.folder / "recipes/scripted-tiny-spark.yaml"
    text = path.read_text().rstrip()
    for lengths in ("{1: 1}", "{1: 2, 8: 1}", "{1: 4, 8: 1}"):
        path.write_text(f"{text}\ndrafts_by_users: {lengths}\n")
        value = json.loads(copy.done("roofline", "--recipe", path.stem, "--users", "8", "--json"))
        assert value["step_tokens"] == pytest.approx(8 * (1 + chance_of(ACCEPTED, 2))), lengths


def test_a_second_model_drafts_by_users_too(copy: CheckoutHere) -> None:
    path = copy.folder / "recipes/scripted-drafted.yaml"
    path.write_text(f"{path.read_text().rstrip()}\ndrafts_by_users: {{1: 3, 8: 0}}\n")
    arguments = ("roofline", "--recipe", path.stem, "--accepted", "0.5", "--json", "--users")
    one, many = (json.loads(copy.done(*arguments, users)) for users in ("1", "8"))
    assert (one["drafted"], one["step_tokens"], many["drafted"], many["step_tokens"]) == (3, pytest.approx(2.5), 0, 8)
    passes = [next(read["times"] for read in value["reads"] if read["what"] == "drafter") for value in (one, many)]
    assert passes == [3, 1] and one["best_drafted"] == many["draft_lengths"] == []


def test_a_spark_s_bandwidth_is_not_told_of_another_machine_s_memory() -> None:
    cpu, spark = (manifests.load_stack(PROJECT, name) for name in ("cpu", "spark"))
    plain = Host(False, "x86_64", "debian 12", ("debian",), True, False, False, 16 << 30, 12 << 30)
    with_gpu, own = (dataclasses.replace(plain, **{fact: True}) for fact in ("has_gpu", "is_spark"))
    machines = {"plain": plain, "gpu": with_gpu, "spark": own}
    seen = {(name, stack.name): is_served_here(one, stack) for name, one in machines.items() for stack in (cpu, spark)}
    assert [pair for pair, told in seen.items() if told] == [("plain", "cpu"), ("gpu", "cpu"), ("gpu", "spark")]


def test_wrong_options_are_one_clear_error(copy: CheckoutHere) -> None:
    for arguments, said in (
        (("--context", "1k"), "--context: saw '1k', wanted a whole number"),
        (("--measured", "none"), "--measured: saw 'none', wanted a number above 0"),
        (("--published", "--stage", "v2"), "--published shows every stage of the published chain: saw --stage beside"),
        (("--published", "--stage", "v2", "--measured", "3", "--json"), "chain: saw --stage and --measured beside it"),
        (("--published", "--users", "8"), "chain: saw --users beside it"),
        (("--users", "0"), "--users: saw 0, wanted 1 or more"),
    ):
        result = copy.invoke("roofline", *arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False), arguments
        assert said in result.stderr and "next: " in result.stderr


LEVERS = {"LM head": "v2-vocab", "MTP layer": "v2-draft", "GDN states": "v2-state"}


@pytest.mark.parametrize("users", [1, 4, 8, 16])
def test_the_table_by_users_is_what_the_bytes_say(users: int) -> None:
    model = model_published(V2)

    def of(drafted: int) -> Roofline:
        layers = model.draft_layers if drafted else 0
        one = dataclasses.replace(model, drafted=drafted, draft_layers=layers)
        return roofline(one, context=1000, bandwidth=SPARK, accepted=ACCEPTED, users=users)

    step = of(2)
    size = dict.fromkeys(("INT4 experts", *LEVERS), 0.0)
    for read in step.reads:
        what = read.what.replace("MTP experts", "MTP layer")
        if what in size:
            size[what] += read.bytes / 1e9
    tokens = ", ".join(f"{of(drafted).ceiling:.1f}" for drafted in (0, 1, 2))
    first = max(LEVERS, key=lambda what: size[what])
    cells = [f"{one:.2f}" for one in (step.step_bytes / 1e9, *size.values())]
    row = " | ".join([str(users), *cells, tokens, f"{first}: `{LEVERS[first]}`"])
    assert f"| {row} |" in (PROJECT / "docs/performance.md").read_text()


def test_the_table_of_draft_lengths_is_what_the_bytes_say() -> None:
    """docs/performance.md: v2 and v2-tq, at 1K and 32K, at both ends of routing."""
    cells = []
    for figure, context in ((V2, 1000), (V2, 32_768), (V2_TQ, 1000), (V2_TQ, 32_768)):
        options, model = asked(bandwidth="273", context=context, accepted=""), model_published(figure)
        for users in USERS:
            ends = [options.best(model, chance, users) for chance in CHANCES]
            best = [f"{one.drafted}: {one.ceiling:.1f} - {same.drafted}: {same.ceiling:.1f}" for one, same in ends]
            cells.append([f"{figure.stage}, {context // 1000}K", str(users), *best])
    page = (PROJECT / "docs/performance.md").read_text()
    two = roofline(model_published(V2), context=1000, bandwidth=SPARK, accepted=accepted_share(0.5, 2), users=4)
    assert f"have {two.ceiling:.1f}\ntok/s with two drafts" in page.replace("\n  ", "\n")
    assert not [row for row in cells if f"| {' | '.join(row)} |\n" not in page], "\n".join(map(" | ".join, cells))


def test_the_best_draft_length_by_hand() -> None:
    """Of a model whose steps have 10 bytes and 4 more a draft, whatever the rest; accepted at 1/2, one draft gives 1.5
    tokens for 14 bytes, two 1.75 for 18, none 1 for 10."""
    weights = (WeightReads("INT4 layers", 6, 0), WeightReads("LM head", 4, 0))
    plain = dataclasses.replace(model_published(V2), weights=weights, linear=0, experts=0, active=0)
    best = best_drafts(plain, 0.5, context=0, bandwidth=14, users=1)
    assert (best.drafted, best.step_bytes, best.ceiling) == (1, 14, pytest.approx(1.5))
    assert best_drafts(plain, 0.3, context=0, bandwidth=14, users=1).drafted == 0
    assert best_drafts(plain, 1.0, context=0, bandwidth=14, users=1).drafted == LONGEST


def test_a_share_of_all_drafts_and_the_chance_of_each() -> None:
    assert accepted_share(0.5, 3) == pytest.approx((0.5 + 0.25 + 0.125) / 3) and accepted_share(0.5, 0) == 0
    assert 1 + 3 * accepted_share(0.7, 3) == pytest.approx((1 - 0.7**4) / (1 - 0.7))
    for share in (0.0, 0.45, ACCEPTED, 1.0):
        assert accepted_share(chance_of(share, 2), 2) == pytest.approx(share, abs=1e-8)
    assert chance_of(ACCEPTED, 2) == pytest.approx(0.85277, abs=1e-5)  # p + p^2 = 1.58


def test_a_step_that_drafts_nothing_still_runs_the_mtp_layer_once() -> None:
    """vLLM 0.33, model_executor's drafters: its cache must have no gaps. It reads no head for it."""
    none = roofline(dataclasses.replace(model_published(V2), drafted=0), context=1000, bandwidth=SPARK, accepted=0)
    found = reads(none)
    assert (found["LM head"].times, found["MTP layer"].times, found["GDN states"].times) == (1, 1, 2)
    assert (found["MTP experts"].times, found["KV cache of the MTP layer"].times) == (8, 1000)


def test_the_routed_tokens_of_users_at_either_end() -> None:
    model = model_published(V2)
    for same, tokens in ((False, 24), (True, 8)):
        found = reads(roofline(model, context=0, bandwidth=SPARK, accepted=0.5, users=8, same_experts=same))
        assert found["INT4 experts"].times == pytest.approx(distinct(256, 8, tokens))
    two = model_published(dataclasses.replace(V2, flags=(*DRAFTS, "-tp", "2")))
    instant = Link(0, 12.25e9)
    assert link_seconds(two, instant, 8) == pytest.approx(8 * link_seconds(two, instant))


@pytest.mark.parametrize("stage", ["v2-tq", "v3"])
def test_the_table_of_v3_is_what_the_bytes_say(stage: str) -> None:
    paths, recipe = Paths.from_env(PROJECT), manifests.load_recipe(PROJECT, "qwen3.5-122b")
    stack, chain = manifests.load_stack(PROJECT, recipe.stack), manifests.load_chain(PROJECT, stage)
    known = known_of(paths, recipe, stack, chain)
    model = model_of(known.tensors, known.geometry, known.settings, known.loading, symmetric=known.symmetric)
    for context in (1000, 32_000, 128_000):
        cells = [
            f"{roofline(model, context=context, bandwidth=SPARK, accepted=ACCEPTED, users=users).ceiling:.1f}"
            for users in USERS
        ]
        assert f"| {context:,} | {stage} | {' | '.join(cells)} |" in (PROJECT / "docs/performance.md").read_text()


def test_users_share_weights_and_nothing_else() -> None:
    one, two = (roofline(model_published(V2), context=1000, bandwidth=SPARK, accepted=0.5, users=n) for n in (1, 2))
    first, second = reads(one), reads(two)
    for what in ("INT4 layers", "LM head", "MTP layer"):
        assert second[what].bytes == first[what].bytes
    for what in ("GDN states", "KV cache", "KV cache of the MTP layer"):
        assert second[what].bytes == 2 * first[what].bytes
    assert second["INT4 experts"].times == pytest.approx(distinct(256, 8, 6))
    assert second["MTP experts"].times == pytest.approx(distinct(256, 8, 6) + distinct(256, 8, 2))
    assert two.step_tokens == 2 * one.step_tokens


OURS = {
    "`turboquant_k8v4`, this mod": "ours, 8-bit keys and 4-bit values",
    "`turboquant_4bit_nc`, this mod": "ours, 4 bits",
    "`turboquant_k3v4_nc`, this mod (vLLM's)": "ours, 3-bit keys and 4-bit values",
    "`turboquant_3bit_nc`, this mod (vLLM's)": "ours, 3 bits",
}


def test_the_formats_of_the_cache_are_the_ledger_s() -> None:
    ledger = rows_of("docs/quality-ledger.md", 7)
    table = {OURS.get(name, name): cells for name, cells in rows_of("mods/turboquant/README.md", 5).items()}
    formats = {name: cells for name, cells in table.items() if name in ledger}
    assert len(formats) == 11
    for name, (size, loss, *_) in formats.items():
        assert 4 * int(size.replace(",", "")) == int(ledger[name][0].replace(",", "")), name  # two layers of two heads
        assert loss.partition(" ")[0] in (ledger[name][3].partition(" ")[0], "-"), name


def rows_of(document: str, columns: int) -> dict[str, list[str]]:
    """Tables' rows of so many columns: the first cell, plain -> the others."""
    lines = (PROJECT / document).read_text().splitlines()
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0].replace("vLLM's `fp8`", "FP8 (Triton's attention)"): row[1:] for row in cells if len(row) == columns}
