"""benchmarks/stage_table: what is carried to a GPU, what runs there, and how a profile is read."""

from __future__ import annotations

import itertools
import json
import re
import sys

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import buckets
import join
import shapes
from shapes import SIZES

import stages
from sparkpin.pins import manifests


def layer(core: str) -> list[tuple[str, float, str]]:
    names = ["gemm<machete::M>", core, "triton_poi_fused_machete_mm_mul", "gemm<machete::M>"]
    names += ["nvjet_router", "topkGating", "marlin_moe_wna16::Marlin", "moe_sum_vec"]
    return [(name, 2.0, "execute_model") for name in names]


def in_order(kernels: list[tuple[str, float, str]]) -> list[buckets.Row]:
    return [(name, float(i), took, where) for i, (name, took, where) in enumerate(kernels)]


ATTENTION = ("flash::FlashAttnFwdSm90", "void vllm::reshape_and_cache_flash_kernel", "attend", "merge(Args)", "store")
GDN = (
    "merge_16x16_to_64x64_inverse_kernel",  # of the linear attention's prefill
    "fused_recurrent_gated_delta_rule_fwd_kernel",
    "triton_poi_fused_index_put_slice_store",
)


@pytest.mark.parametrize("core", [*ATTENTION, *GDN])
def test_whose_core_a_kernel_is(core: str) -> None:
    found = buckets.parts_of(in_order(layer(core)), layers=1)
    assert (found["attention"], found["GDN"]) == ((8.0, 0.0) if core in ATTENTION else (0.0, 8.0))


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
    assert config["layer_types"].count("full_attention") == SIZES.attention
    assert config["num_hidden_layers"] == SIZES.attention + SIZES.linear == 48
    entries = config["quantization_config"]["extra_config"].values()
    assert sum(entry["bits"] == 8 for entry in entries) == eight_bit == 144 * fp8 + (4 + 3 + 3 * 256) * draft


@pytest.mark.parametrize("name", ["v2-vocab", "v3"])
def test_what_is_measured_has_the_stages_own_flags(name: str) -> None:
    flags = manifests.load_chain(PROJECT, name)[-1].serve.flags
    made = stages.arguments(stages.STAGES[name])
    assert made["additional_config"] == flags["--additional-config"]
    assert made["speculative_config"] == stages.STAGES[name].speculation | flags["--speculative-config"]
    assert made.get("mamba_ssm_cache_dtype") == flags.get("--mamba-ssm-cache-dtype")
    assert "use_local_argmax_reduction" not in stages.arguments(stages.STAGES["v2"])["speculative_config"]


def test_the_table_is_what_the_kept_runs_say() -> None:
    assert join.TABLE.read_text() == join.text_of(join.joined(join.RUNS))


def test_the_ratios_that_a_page_shows_are_those_of_the_data() -> None:
    page = (PROJECT / "docs/performance.md").read_text(encoding="utf-8")
    runs = {run["name"]: run["stages"] for run in json.loads(join.TABLE.read_text())["runs"]}
    chain = runs["2026-11-22-d-chain"]  # all stages in one call
    for below, stage in itertools.pairwise(stages.CHAIN):
        shown = re.search(rf"^\| {stage}: [^|]*\| (.*) \|$", page, re.MULTILINE)
        decode = [
            [chain[name]["decode"][point]["tokens_per_s"] for name in (below, stage)]
            for point in ("1024:1", "131072:1", "1024:16")
        ]
        assert shown and shown[1] == " | ".join(f"{after / before:.2f}" for before, after in decode)
