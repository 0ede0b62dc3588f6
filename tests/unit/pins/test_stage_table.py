"""benchmarks/stage_table: what is carried to a GPU, what runs there, and how a profile is read."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import buckets
import join
import report
import shapes
from figures import CHAIN
from shapes import GEOMETRY

import stages
from sparkpin.pins import manifests


def layer(core: str) -> list[tuple[str, float, str]]:
    names = ["gemm<machete::M>", core, "triton_poi_fused_machete_mm_mul", "gemm<machete::M>"]
    names += ["nvjet_router", "topkGating", "marlin_moe_wna16::Marlin", "moe_sum_vec"]
    return [(name, 2.0, "execute_model") for name in names]


def in_order(kernels: list[tuple[str, float, str]]) -> list[buckets.Row]:
    return [(name, float(i), took, where) for i, (name, took, where) in enumerate(kernels)]


@pytest.mark.parametrize(
    ("core", "part"),
    [
        ("flash::FlashAttnFwdSm90", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel", "attention"),
        ("attend", "attention"),
        ("merge(Args)", "attention"),
        ("store", "attention"),
        ("merge_16x16_to_64x64_inverse_kernel", "GDN"),  # of the linear attention's prefill
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "GDN"),
        ("triton_poi_fused_index_put_slice_store", "GDN"),
    ],
)
def test_whose_core_a_kernel_is(core: str, part: str) -> None:
    found = buckets.parts_of(in_order(layer(core)), layers=1)
    assert (found["attention"], found["GDN"]) == ((8.0, 0.0) if part == "attention" else (0.0, 8.0))


@pytest.mark.parametrize(
    "kernels", [[], layer("attend")[:-1], 3 * layer("attend")], ids=["none", "cut", "three layers"]
)
def test_a_profile_that_is_not_of_whole_steps_is_no_result(kernels: list[tuple[str, float, str]]) -> None:
    with pytest.raises(ValueError, match=r"\d kernels moe_sum, expected one in each of 2 layers"):
        buckets.parts_of(in_order(kernels), layers=2)


def test_parts_of_two_layers_in_two_steps() -> None:
    step = [
        ("void flash::prepare_varlen_num_blocks_kernel", 1.0, "execute_model"),  # in front of a layer without attention
        *layer("gdn_decode"), *layer("flash::FlashAttnFwd"),
        ("nvjet_head", 300.0, "sample"), ("_gumbel", 5.0, "sample"),
        ("int8_head", 20.0, "propose"), ("nvjet_small", 7.0, "propose"),
    ]  # fmt: skip
    assert buckets.parts_of(in_order(step * 2), layers=2) == {
        "attention": 9.0, "GDN": 8.0, "experts": 12.0, "shared experts": 4.0, "head": 300.0, "draft": 7.0,
        "draft head": 20.0, "sampling": 5.0, "other": 0.0, "steps": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(("fp8", "draft", "eight_bit"), [(False, False, 0), (True, False, 144), (True, True, 919)])
def test_the_config_has_the_shapes_of_the_122b(fp8: bool, draft: bool, eight_bit: int) -> None:
    config = shapes.config(fp8=fp8, fp8_draft=draft)
    assert config["layer_types"].count("full_attention") == GEOMETRY.attention
    assert config["num_hidden_layers"] == GEOMETRY.attention + GEOMETRY.linear == 48
    entries = config["quantization_config"]["extra_config"].values()
    assert sum(entry["bits"] == 8 for entry in entries) == eight_bit == 144 * fp8 + (4 + 3 + 3 * 256) * draft


@pytest.mark.parametrize("name", ["v2-vocab", "v3"])
def test_what_is_measured_has_the_stages_own_flags(name: str) -> None:
    flags = manifests.load_chain(PROJECT, name)[-1].serve.flags
    made = stages.arguments(stages.STAGES[name])
    assert made["additional_config"] == flags["--additional-config"]
    assert made["speculative_config"] == flags["--speculative-config"] | stages.SYNTHETIC
    assert made.get("mamba_ssm_cache_dtype") == flags.get("--mamba-ssm-cache-dtype")
    assert "use_local_argmax_reduction" not in stages.arguments(stages.STAGES["v2"])["speculative_config"]


def test_the_table_is_what_the_kept_runs_say() -> None:
    assert join.TABLE.read_text() == join.text_of(join.joined(join.RUNS))


PERFORMANCE = (PROJECT / "docs/performance.md").read_text(encoding="utf-8")


def tables(text: str, head: str) -> list[dict[str, list[str]]]:
    """Tables whose head begins like this: a row's name, without what stands behind a colon -> its other cells."""
    found, rows = [], None
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|"))
        if not cells:
            rows = None
        elif rows is None:
            rows = {}
            found += [rows] if line.startswith(head) else []
        elif name != "---":
            rows[name.partition(":")[0]] = cells
    return found


def test_the_document_s_tables_are_what_was_measured() -> None:
    found = json.loads(join.TABLE.read_text())
    [*_, chain] = (
        {name: run["stages"][name] for name in stages.CHAIN}
        for run in found["runs"]
        if run["routing"] == "uniform" and run["stages"].keys() >= set(stages.CHAIN)
    )

    def decode(measured: dict[str, Any], key: str, places: int) -> dict[str, list[str]]:
        points = [f"{context}:{batch}" for context in stages.CONTEXTS for batch in stages.BATCHES]
        return {name: [f"{one['decode'][p][key]:.{places}f}" for p in points] for name, one in measured.items()}

    [shared] = [run["stages"] for run in found["runs"] if run["routing"] == "shared"]
    beside, fused = stages_of(found, "2026-11-27-b-v3"), stages_of(found, "2026-11-27-f-v3-fused")
    v3 = {"v2-tq": beside["v2-tq"], "v3 without": beside["v3"], "v3": fused["v3"]}
    ratios = [
        a["step_ms"] / b["step_ms"]
        for a, b in zip(v3["v2-tq"]["decode"].values(), v3["v3"]["decode"].values(), strict=True)
    ]
    rows = decode(v3, "step_ms", 2)
    told = {
        "v2-tq": rows["v2-tq"],
        "v3 without the mod's choice of kernel": rows["v3 without"],
        "**v3**": rows["v3"],
        "times as fast as v2-tq": [f"{ratio:.3f}" for ratio in ratios],
    }
    assert tables(PERFORMANCE, "| ms a step |") == [decode(chain, "step_ms", 2), decode(shared, "step_ms", 2), told]
    assert tables(PERFORMANCE, "| tok/s, all sequences |") == [decode(chain, "tokens_per_s", 0)]
    first: dict[str, list[str]] = {}
    for name, one in chain.items():
        seen = [one["first_token_s"].get(p) for p in ("1024:1", "1024:8", "1024:16", "32768:1", "131072:1")]
        first[name] = [f"{statistics.median(times):.2f}" if times else "" for times in seen]
    assert tables(PERFORMANCE, "| | 1K x 1 |") == [first]
    titles = {"1024:1": "1K x 1", "1024:16": "1K x 16", "131072:1": "128K x 1"}

    def parts(measured: dict[str, Any], points: Iterable[str]) -> dict[str, list[str]]:
        told = {}
        for point, (name, one) in itertools.product(points, measured.items()):
            times = [one["parts_us"][point][part] for part in buckets.PARTS if part != "other"]
            told[f"{name}, {titles[point]}"] = [f"{time:.0f}" if time else "" for time in times]
        return told

    assert tables(PERFORMANCE, "| | attention |") == [parts(chain, titles)]
    assert tables(PERFORMANCE, "| microseconds a step |") == [parts(v3, ("1024:1", "1024:16"))]


def stages_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(run["stages"] for run in found["runs"] if run["name"] == name)


def test_the_document_s_kinds_of_cache_are_what_was_measured() -> None:
    found = json.loads(join.TABLE.read_text())
    first, again = (stages_of(found, f"2026-11-27-{name}") for name in ("d-peers", "e-peers-again"))
    rows = [
        line.replace("*", "").removeprefix("| ").removesuffix(" |").split(" | ")
        for line in PERFORMANCE.partition("tokens in 57 GiB")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    names = ("v2", "v2-tq", "v2-triton", "v2-fp8", "v2-int8", "v2-int4")
    for row, name in zip(rows, names, strict=True):
        one = (first | {key: value for key, value in again.items() if key not in first})[f"{name}-peers"]
        for place, point in enumerate(("1024:1", "131072:1", "131072:16"), start=3):
            ms = one["decode"][point]["step_ms"]
            assert row[place] in (f"{ms:.2f}", f"{ms:.1f}", f"{ms:.0f}"), (row, name, ms)
        assert row[6] == f"{one['parts_us']['131072:1']['attention']:,.0f}", (row, name)


def test_the_document_s_draft_lengths_are_the_report_s(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 |", "| 8 |", "| 16 |"))]
    told = PERFORMANCE.partition("| users | drafted |")[2].partition("\n\n")[0].replace("*", "").splitlines()[2:]
    assert len(told) == 15 and told == said


def test_the_document_s_tables_of_bytes_are_the_report_s(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = capsys.readouterr().out
    [chain] = tables(said, "| stage | GB a step, uniform | same")
    gb10 = {name: cells[:2] + cells[4:] for name, cells in chain.items()}  # without what the H200 did
    assert tables(PERFORMANCE, "| | GB a step, uniform |") == [gb10]
    [beside] = tables(PERFORMANCE, "| measured as |")
    counted = {name: cells[1:] for name, cells in beside.items()}  # without what it is
    assert tables(said, "| stage | GB a step, uniform | less") == [counted]


def test_the_document_s_ceilings_by_length_are_counted() -> None:
    counted = {}
    for one in CHAIN:
        ends = [
            [f"{report.ceiling(report.counted(one, context, same=same)):.1f}" for same in (False, True)]
            for context in stages.CONTEXTS
        ]
        counted[one.stage] = [even if even == same else f"{even} - {same}" for even, same in ends]
    assert tables(PERFORMANCE, "| tok/s at 273 GB/s, at most |") == [counted]


def test_the_readme_s_figures_are_those_of_the_data() -> None:
    said = " ".join((PROJECT / "README.md").read_text(encoding="utf-8").split())
    chain = join.latest(json.loads(join.TABLE.read_text()), "uniform")
    base, last = (chain[name]["decode"]["1024:1"]["tokens_per_s"] for name in ("base", "v2-tq"))
    assert f"v2-tq {last / base:.2f} times base ([speeds]" in said
