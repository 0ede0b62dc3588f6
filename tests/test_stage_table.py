"""benchmarks/stage_table: what is carried to a GPU, what runs there, and how a profile is read."""

from __future__ import annotations

import json
import struct
import sys

import pytest

from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import buckets
import fatbin
import shapes

import stages
from sparkpin.roofline.published import EXPERTS, GEOMETRY


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + payload


def binary(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


LIBRARY = b"".join(
    [
        b"ELF" + fatbin.MAGIC + b"no header, but its first four bytes",
        binary(entry(fatbin.CUBIN, 90, b"keep" * 8), entry(fatbin.CUBIN, 120, b"drop" * 8)),
        b"between",
        binary(entry(fatbin.PTX, 80, b"text" * 8)),
        b"end",
    ]
)


@pytest.mark.parametrize("ptx", [False, True])
def test_one_architecture_is_kept_in_place(ptx: bool) -> None:
    data, kept = fatbin.slim(LIBRARY, 90, ptx=lambda _: ptx)
    wanted = LIBRARY.replace(b"drop" * 8, bytes(32))
    assert data == (wanted if ptx else wanted.replace(b"text" * 8, bytes(32)))
    assert kept == ({(fatbin.CUBIN, 90): 32, (fatbin.PTX, 80): 32} if ptx else {(fatbin.CUBIN, 90): 32})


def test_an_entry_that_reaches_too_far_stops() -> None:
    broken = binary(entry(fatbin.CUBIN, 90, b"x" * 32)[:-8])
    with pytest.raises(ValueError, match="fat binary at 0x0: an entry at 0x10 of kind 2"):
        fatbin.slim(broken, 90)


def kernel(name: str, at: float, took: float, launch: int) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": at, "dur": took, "args": {"correlation": launch}}


def launch(number: int, at: float) -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": number}}


def scope(name: str, at: float, took: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": f"scope:{name}", "ts": at, "dur": took}


def test_a_kernel_belongs_to_the_innermost_scope_that_launched_it() -> None:
    events = [
        scope("sample_tokens", 0, 100), scope("sample", 10, 20), scope("propose", 50, 20),
        launch(1, 5), launch(2, 15), launch(3, 40), launch(4, 60), launch(5, 200),
        *(kernel(f"k{i}", 1000 - i, 1, i) for i in (1, 2, 3, 4, 5)),
    ]  # fmt: skip
    rows = buckets.rows_of(events)
    assert [(name, where) for name, _, _, where in rows] == [
        ("k5", ""), ("k4", "propose"), ("k3", "sample_tokens"), ("k2", "sample"), ("k1", "sample_tokens"),
    ]  # fmt: skip


def test_parts_of_two_layers_in_two_steps() -> None:
    def layer(core: str) -> list[tuple[str, float, str]]:
        names = ["gemm<machete::M>", core, "triton_poi_fused_machete_mm_mul", "gemm<machete::M>"]
        names += ["nvjet_router", "topkGating", "marlin_moe_wna16::Marlin", "moe_sum_vec"]
        return [(name, 2.0, "execute_model") for name in names]

    step = [
        *layer("gdn_decode"), *layer("flash::Fwd"),
        ("nvjet_head", 300.0, "sample"), ("_gumbel", 5.0, "sample"),
        ("int8_head", 20.0, "propose"), ("nvjet_small", 7.0, "propose"),
    ]  # fmt: skip
    rows = [(name, float(i), took, where) for i, (name, took, where) in enumerate(step * 2)]
    assert buckets.parts_of(rows, layers=2) == {
        "attention": 8.0, "GDN": 8.0, "experts": 12.0, "shared experts": 4.0, "head": 300.0, "draft": 7.0,
        "draft head": 20.0, "sampling": 5.0, "other": 0.0, "steps": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(("fp8", "draft", "eight_bit"), [(False, False, 0), (True, False, 144), (True, True, 919)])
def test_the_config_has_the_shapes_of_the_122b(fp8: bool, draft: bool, eight_bit: int) -> None:
    config = shapes.config(fp8=fp8, fp8_draft=draft)
    assert config["layer_types"].count("full_attention") == GEOMETRY.attention
    assert config["num_hidden_layers"] == GEOMETRY.attention + GEOMETRY.linear == 48
    entries = config["quantization_config"]["extra_config"].values()
    assert sum(entry["bits"] == 8 for entry in entries) == eight_bit == 144 * fp8 + (4 + 3 + 3 * EXPERTS) * draft


def test_stages_differ_in_what_they_say() -> None:
    assert set(stages.CHAIN) < set(stages.STAGES)
    for name in stages.CHAIN:
        stage = stages.STAGES[name]
        made = stages.arguments(stage)
        assert json.loads(json.dumps(made)) == made
        assert ("speculative_config" in made) == stage.drafts == (name not in ("base", "hybrid"))
        assert made.get("kv_cache_dtype") == ("turboquant_4bit_nc" if name == "v2-tq" else None)
        on = [mod for mod, switch in stage.environment.items() if switch == "1"]
        assert len(on) == {"base": 0, "hybrid": 1, "mtp": 1, "v2": 2, "v2-tq": 3}[name]
