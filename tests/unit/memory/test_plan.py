"""The memory plan, against numbers that vLLM logged and that people published."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import qwen_samples
from memory_samples import (
    IN_4_BITS,
    LISTED,
    MAX,
    MTP2,
    SERVED,
    SPARK,
    cache_of,
    geometry_122b,
    geometry_of,
    loaded,
    plan_122b,
    settings_of,
    weights_122b,
)
from places import PROJECT

from benchmarks.scripted_tiny import network
from benchmarks.scripted_tiny.vocabulary import vocabulary
from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.checkpoint.shapes import load_shapes
from sparkpin.core.errors import ManifestError
from sparkpin.core.terminal import gib
from sparkpin.memory.architecture import Part
from sparkpin.memory.cache import FORMATS, Cache, Layers, lay_out, slot_bytes
from sparkpin.memory.geometry import read_geometry
from sparkpin.memory.inputs import merged
from sparkpin.memory.plan import Machine, make_plan, total
from sparkpin.memory.settings import GIB, read_settings
from sparkpin.memory.text import log_line, notes, title, to_json
from sparkpin.memory.weights import alike, weigh
from sparkpin.pins.vllm_flags import AUTO, Flags

SMALL = "--max-num-seqs 16 --max-model-len 32768"
SHARE = "--gpu-memory-utilization 0.8 --max-num-seqs 16"


@pytest.mark.parametrize(
    ("flags", "heads", "tokens", "blocks", "drafts"),
    [
        ("", 32, 343_851, 303, 0),
        (MTP2, 32, 309_705, 280, 1),
        (MTP2, 64, 298_440, 148, 1),
        ("--kv-cache-dtype turboquant_4bit_nc " + MTP2, 64, 965_457, 151, 1),
    ],
)
def test_what_vllm_0_32_logged_for_the_layers_of_the_122b(
    flags: str, heads: int, tokens: int, blocks: int, drafts: int
) -> None:
    """Of 8 GiB on a CPU, for 262,144 tokens. The first two were logged with half of the model's value heads."""
    cache = cache_of(f"--no-enable-prefix-caching {flags}", linear_num_value_heads=heads)
    assert cache.blocks(8 * GIB) == blocks and cache.capacity(blocks, MAX)[0] == tokens
    assert sorted(group.layers for group in cache.groups) == [12, 12, 12, 12 + drafts]


@pytest.mark.parametrize(
    ("flags", "block", "tokens"),
    [
        (MTP2, 288, 1_975_031),
        ("--kv-cache-dtype turboquant_4bit_nc " + MTP2, 1024, 6_390_613),
    ],
)
def test_what_vllm_0_33_logged_for_the_scripted_model_on_an_h200(flags: str, block: int, tokens: int) -> None:
    """Of 2 GiB, for 40,960 tokens; benchmarks/stage_table."""
    geometry = read_geometry(network.config(vocabulary()) | {"max_position_embeddings": 65536}, "config.json")
    cache = lay_out(geometry, settings_of(geometry, flags + SERVED, "cuda"))
    assert cache.kinds[0].block_size == block
    assert cache.capacity(cache.blocks(2 * GIB), 40_960)[0] == tokens


STEP = "--max-num-batched-tokens"
FP8 = "--kv-cache-dtype fp8 --gdn-prefill-backend triton"


@pytest.mark.parametrize(
    ("flags", "pool", "length", "tokens", "concurrency"),
    [
        ("", 5.98, 131_072, 567_978, 4.33),  # noonghunna/club-3090#612, RTX 5090, vLLM 0.24
        ("", 6.01, 131_072, 569_878, 4.35),  # noonghunna/club-3090#652, the same a few days later
        ("", 66.93, 262_144, None, 25.36),  # GB10, vLLM 0.20: its log counts tokens by another rule
        (MTP2, 74.76, 262_144, 6_455_296, 24.62),  # GB10, vLLM 0.22
    ],
)
def test_logs_of_gpus(flags: str, pool: float, length: int, tokens: int | None, concurrency: float) -> None:
    """Qwen3.6-35B-A3B in NVFP4 with an fp8 cache. The log has the pool's size to 0.01 GiB, 0.1 % of these."""
    geometry = geometry_of(qwen_samples.G35B)
    cache = lay_out(geometry, settings_of(geometry, f"{FP8} --max-model-len {length} {flags}", "cuda"))
    found, times = cache.capacity(cache.blocks(int(pool * GIB)), length)
    assert times == pytest.approx(concurrency, abs=0.005)
    assert tokens is None or found == pytest.approx(tokens, rel=0.0005)


def test_bytes_of_a_token_and_head() -> None:
    sizes = {"bfloat16": 1024, "float32": 2048, "fp8": 512, "turboquant_k8v4": 388, "turboquant_4bit_nc": 262}
    one = Part("full", 1, key=256, value=256)
    assert {cache_dtype: slot_bytes(one, cache_dtype) for cache_dtype in sizes} == sizes
    narrow = replace(one, key=62, value=62)
    assert slot_bytes(narrow, "turboquant_k8v4") == 98  # 62 and 31 + 4 are 97: an odd slot is made even


def states_of(cache: Cache) -> Layers:
    return next(one for one in cache.kinds if one.part.kind == "state")


def test_gdn_state_of_a_request() -> None:
    """36 layers; conv: 3 inputs of 12,288 channels in BF16; recurrent: 64 heads of 128 x 128 in float32."""
    plain = states_of(cache_of("--no-enable-prefix-caching"))
    assert (plain.slot, plain.copies, plain.part.layers) == (73_728 + 4_194_304, 1, 36)
    drafting = states_of(cache_of("--no-enable-prefix-caching " + MTP2))
    assert (drafting.slot, drafting.copies) == (5 * 12_288 * 2 + 4_194_304, 3)
    assert states_of(cache_of("--enable-prefix-caching " + MTP2)).copies == 4


def test_the_state_types_flag_goes_before_the_config_and_the_cpu_before_the_activations_type() -> None:
    unsaid = geometry_122b(mamba_ssm_dtype=None)
    assert settings_of(unsaid).ssm_dtype == "bfloat16"
    assert settings_of(unsaid, "--mamba-ssm-cache-dtype float16").ssm_dtype == "float16"
    assert settings_of(geometry_122b(), "--mamba-ssm-cache-dtype bfloat16").ssm_dtype == "bfloat16"
    flags = Flags(["vllm", "serve", "/model"], "r", {})
    assert read_settings(flags, {}, "cpu", unsaid, wide_state=True).ssm_dtype == "float32"
    assert read_settings(flags, {}, "cuda", unsaid, wide_state=True).ssm_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "block", "states"),
    [
        ("", 2112, 3),
        (MTP2, 2112, 5),
        ("--gdn-prefill-backend triton", 2096, 2),
        ("--no-enable-prefix-caching", 2096, 1),
    ],
)
def test_vllm_0_33_keeps_a_state_more_for_prefix_caching_on_a_spark(flags: str, block: int, states: int) -> None:
    geometry = geometry_122b()
    cache = lay_out(geometry, settings_of(geometry, flags, "cuda"))
    assert (cache.kinds[0].block_size, states_of(cache).copies) == (block, states)


def test_a_model_of_attention_alone_has_one_group_and_small_blocks() -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "float16", "model_type": "llama",
    }  # fmt: skip
    geometry = read_geometry(config, "config.json")
    assert (geometry.head_dim, geometry.dtype) == (64, "float16")
    cache = lay_out(geometry, settings_of(geometry, "--max-model-len 4096", "cuda"))
    assert (cache.kinds[0].block_size, cache.request_blocks(4096)) == (16, 256)
    assert cache.block_bytes == 16 * 4 * 2 * 64 * 2 * 2


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max_model_len=32K", "max_model_len", 32_768),
        ("--max-model-len auto", "max_model_len", AUTO),
        ("--max-num-seqs 2 --max-model-len 100", "max_num_batched_tokens", 200),
        ("--gpu-memory-utilization .76", "utilization", 0.76),
        ("--kv-cache-memory-bytes 2G", "kv_bytes", 2 * GIB),
        ("--no-enable-prefix-caching --enable-prefix-caching", "prefix_caching", True),
        ("--language-model-only", "text_only", True),
        ("-tp 2", "ranks", 2),
        (MTP2, "draft_tokens", 2),
        ("--speculative-config.method mtp --speculative-config.num-speculative-tokens 3", "draft_tokens", 3),
        ("""--speculative-config {"method":"ngram","num_speculative_tokens":4}""", "draft_layers", 0),
        (f"{MTP2} {LISTED}", "draft_rows", 32_768),
        (LISTED, "draft_rows", 0),
        (f"{MTP2} {IN_4_BITS}", "draft_bits", 4),
        ("--dtype float16", "cache_dtype", "float16"),
        ("", "max_num_batched_tokens", 2048),  # NVML gives no memory of a GB10
        ("", "max_num_seqs", 256),
        ("--max-num-batched-tokens 64", "max_num_seqs", 64),
    ],
)
def test_flags(flags: str, field: str, value: object) -> None:
    assert getattr(settings_of(geometry_122b(), flags, "cuda"), field) == value
    assert field != "draft_bits" or settings_of(geometry_122b(), flags).draft_bits == 8, "the head's, on a CPU"


def test_the_cpus_own_variable_goes_before_the_flag() -> None:
    flags = "--kv-cache-memory-bytes 4G"
    assert settings_of(geometry_122b(), flags, VLLM_CPU_KVCACHE_SPACE="8").kv_bytes == 8 * GIB
    assert settings_of(geometry_122b(), flags, "cuda", VLLM_CPU_KVCACHE_SPACE="8").kv_bytes == 4 * GIB
    assert settings_of(geometry_122b(), flags, VLLM_CPU_KVCACHE_SPACE="0").kv_bytes == 0
    with pytest.raises(ManifestError, match="VLLM_CPU_KVCACHE_SPACE"):
        settings_of(geometry_122b(), flags, VLLM_CPU_KVCACHE_SPACE="1.5")


def test_a_cpu_without_a_given_pool_takes_a_share_of_all_memory() -> None:
    """cpu_worker.py: the share, without what the processes hold by then."""
    machine = Machine(1 << 40, 1 << 40, "m", "flag")
    made = plan_122b("--gpu-memory-utilization 0.5 --max-num-seqs 4", machine, platform="cpu")
    assert made.budget == 1 << 39
    assert sum(line.bytes for line in made.lines) == made.budget == made.needed


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--max-model-len many", "--max-model-len"),
        ("--max-num-seqs 0", "--max-num-seqs"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb"),
        ("-dp 2", "--data-parallel-size"),
        ("--kv-cache-dtype-skip-layers 0 1", "--kv-cache-dtype-skip-layers"),
        ("""--kv-transfer-config {"kv_connector":"x"}""", "--kv-transfer-config"),
        ("""--speculative-config {"method":"eagle3"}""", "--speculative-config method"),
        ("--speculative-config mtp", "--speculative-config"),
        ("""--speculative-config {"method":"mtp","num_speculative_tokens":"2"}""", "num_speculative_tokens"),
        ("--dtype int8", "--dtype"),
        ("--kv-cache-dtype nvfp4", "--kv-cache-dtype"),
        ("-tp 3", "--tensor-parallel-size"),
    ],
)
def test_flags_that_the_plan_does_not_know_are_refused(flags: str, key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        settings_of(geometry_122b(), flags)
    assert (caught.value.file, caught.value.key) == ("recipes/r.yaml", key)


def test_more_tokens_than_positions_do_not_fit_unless_vllm_is_told_to_take_them() -> None:
    geometry = geometry_122b(max_position_embeddings=8192)
    weights = weights_122b(loaded())
    flags = "--max-model-len 16384 --max-num-seqs 16 --gpu-memory-utilization 0.8"
    made = make_plan(geometry, settings_of(geometry, flags, "cuda"), weights, SPARK)
    [problem] = made.problems
    assert "16,384" in problem and "8,192" in problem
    allowed = settings_of(geometry, flags, "cuda", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    made = make_plan(geometry, allowed, weights, SPARK)
    assert made.fits and any("8,192" in note for note in notes(made))


def test_what_hf_overrides_change_is_the_config_s() -> None:
    config = {"text_config": {"rope_parameters": {"rope_theta": 1, "rope_type": "default"}, "hidden_size": 1}, "a": 1}
    rope = {"rope_type": "yarn", "factor": 4.0}
    found = merged(config, {"text_config": {"rope_parameters": rope}})
    assert found == {"text_config": {"rope_parameters": {"rope_theta": 1} | rope, "hidden_size": 1}, "a": 1}


def test_what_does_not_fit_comes_with_what_would() -> None:
    made = plan_122b(f"--gpu-memory-utilization 0.95 {SMALL}")
    assert "--gpu-memory-utilization 0.84" in made.hints[0]
    assert plan_122b(f"--gpu-memory-utilization 0.84 {SMALL}").fits
    given = plan_122b(f"{SHARE} {SMALL} --kv-cache-memory-bytes 60G")
    assert "--kv-cache-memory-bytes 60G of recipes/r.yaml" in given.hints[0]
    most = (SPARK.free - total(given.inside) - total(given.outside)) / GIB
    assert gib(int(most * GIB)) in given.hints[0]
    for pool, fits in ((most - 0.01, True), (most + 0.01, False)):
        assert plan_122b(f"{SHARE} {SMALL} --kv-cache-memory-bytes {int(pool * GIB)}").fits == fits
    small = plan_122b(SMALL, replace(SPARK, free=GIB))
    assert len(small.hints) == 1 and gib(total(small.inside) + total(small.outside)) in small.hints[0]
    assert plan_122b(f"{SHARE} {SMALL}").hints == []


def test_each_sequence_wants_a_block_for_its_states() -> None:
    """vLLM refuses at its start, where it captures graphs: 512 sequences with 280 blocks (vllm-project/vllm#38632)."""
    flags = "--kv-cache-memory-bytes 8G --gpu-memory-utilization 0.8 --max-model-len 8192 --gdn-prefill-backend triton"
    made = plan_122b(f"{flags} --max-num-seqs 512")
    blocks = made.chosen.blocks
    assert blocks < 512 and not made.fits and f"{blocks} blocks" in made.problems[0]
    assert plan_122b(f"{flags} --max-num-seqs {blocks}").fits
    assert plan_122b(f"{flags} --max-num-seqs 512 --enforce-eager").fits


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": None},
        {"dtype": "int8"},
    ],
)
def test_a_config_that_the_plan_does_not_know_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        geometry_122b(**changes)
    assert (caught.value.file, [caught.value.key]) == ("config.json", list(changes))


def test_weights_of_the_122b_by_kind() -> None:
    """62.71 GiB without the MTP layer; published, from vLLM's log: 62.65 GiB."""
    rows = weights_122b(loaded())
    assert [(row.kind, row.tensors, row.loaded) for row in rows] == [
        ("INT4 experts", 110_592, 60_246_982_656),
        ("INT4 layers", 684, 2_145_024_000),
        ("16-bit layers", 433, 985_913_856),
        ("32-bit layers", 72, 27_648),
        ("embeddings", 1, 1_525_678_080),
        ("LM head", 1, 1_525_678_080),
        ("MTP layer", 17, 0),
        ("MTP experts", 768, 0),
        ("vision tower", 333, 902_581_728),
    ]
    assert sum(row.tensors for row in rows) == 112_901
    assert sum(row.loaded for row in rows) / GIB == pytest.approx(62.71, abs=0.005)


def test_weights_with_drafter_and_int8_head_and_on_a_cpu() -> None:
    loading = loaded(draft_layers=1, text_only=True, int8_head=True, platform="cpu")
    sizes = {row.kind: row.loaded for row in weights_122b(loading)}
    assert sizes["MTP layer"] + sizes["MTP experts"] == 5_047_358_464
    assert sizes["vision tower"] == 0
    assert sizes["LM head"] == 248_320 * 3072 + 2 * (248_320 + 3072)
    assert sizes["INT4 experts"] == 48 * 256 * 3 * 1024 * 3072 * 2


def test_what_two_nodes_hold_of_the_weights() -> None:
    """Halves, but routers, norms, the shared expert's gate and, on CUDA, in_proj_a and in_proj_b, which are whole."""
    loading = loaded(draft_layers=1, text_only=True)
    one = {row.kind: row.loaded for row in weights_122b(loading)}
    two = {row.kind: row.loaded for row in weights_122b(replace(loading, ranks=2))}
    for kind in ("INT4 experts", "MTP experts", "embeddings", "LM head"):
        assert two[kind] == one[kind] / 2
    router, norms = 256 * 3072 * 2, 2 * 3072 * 2
    mtp = router + norms + 3072 * 2 + 3 * 3072 * 2 + 2 * 256 * 2  # the gate, three norms of MTP's own, those of q and k
    assert two["MTP layer"] == (one["MTP layer"] - mtp) / 2 + mtp
    on_cpu = {row.kind: row.loaded for row in weights_122b(replace(loading, ranks=2, platform="cpu"))}
    gates = 36 * 2 * (64 * 3072 // 2 + 64 * 24 * 2 + 64 * 24 // 2)  # codes, scales, zeros of in_proj_a and in_proj_b
    assert on_cpu["INT4 layers"] == one["INT4 layers"] / 2
    assert two["INT4 layers"] == (one["INT4 layers"] - gates) / 2 + gates


def test_a_plan_for_two_nodes_is_that_of_each() -> None:
    one, two = plan_122b(SHARE), plan_122b(SHARE + " --nnodes 2 --tensor-parallel-size 2")
    lines = {line.what: line.bytes for line in two.lines}
    assert lines["NCCL's buffers"] and "NCCL's buffers" not in {line.what for line in one.lines}
    assert two.needed == one.needed + lines["NCCL's buffers"]  # the budget is a share of all memory
    assert two.left == SPARK.free - two.needed
    assert two.pool_line.bytes > one.pool_line.bytes + 0.99 * sum(row.loaded for row in two.weights)
    assert "each of 2 machines" in next(title(two, "r", "v2"))
    assert to_json(two)["settings"]["ranks"] == 2


def test_weights_with_a_head_in_4_bits_to_draft_with() -> None:
    """As mods/int8-lm-head packs it on a GPU; on a CPU its rows are as the INT8 head's."""
    loading = loaded(draft_layers=1, text_only=True, int8_head=True, draft_rows=248_320, draft_bits=4)
    whole = 248_320 * 3072 + 2 * (248_320 + 3072)
    [head] = [row for row in weights_122b(loading) if row.kind == "LM head"]
    assert head.loaded == whole + 248_320 * (3072 // 2 + 4)
    for rows in (248_320, 32_768):
        on_cpu = weights_122b(replace(loading, platform="cpu", draft_rows=rows, draft_bits=8))
        [head] = [row for row in on_cpu if row.kind == "LM head"]
        assert head.loaded == whole + whole * rows // 248_320


def test_a_head_that_its_checkpoint_quantised_counts_its_bytes() -> None:
    """vLLM keeps it; its scales have two dimensions, too."""
    groups = 3072 // 128
    parts = (("qweight", "I32", (3072 // 8, 248_320)), ("scales", "F16", (groups, 248_320)))
    int4 = Counter(
        {TensorInfo(f"lm_head.{name}", dtype, shape, 0, tensor_nbytes(dtype, shape)): 1 for name, dtype, shape in parts}
    )
    fp8 = Counter({TensorInfo("lm_head.weight", "F8_E4M3", (248_320, 3072), 0, 248_320 * 3072): 1})
    for tensors in (int4, fp8):
        [head] = weigh(tensors, geometry_122b(), loaded(int8_head=True))
        assert head.loaded == head.stored, tensors


def test_a_plan_adds_up_to_the_budget() -> None:
    made = plan_122b("--max-model-len 262144 --gpu-memory-utilization 0.84 --max-num-batched-tokens 8192")
    assert made.budget == math.ceil(0.84 * SPARK.total)
    assert total(made.inside) + made.pool_line.bytes == made.budget == made.needed - total(made.outside)
    assert made.fits and made.left < GIB
    span = made.pool_line.span
    assert span and span[0] < made.pool_line.bytes < span[1]
    assert f"{made.chosen.tokens:,} tokens, Maximum concurrency for 262,144 " in log_line(made)
    assert [capacity.cache.cache_dtype for capacity in made.capacities] == list(FORMATS)


NVFP4 = "nvidia/Qwen3.6-35B-A3B-NVFP4"


@functools.cache
def tensors_of(model: str) -> Counter[TensorInfo]:
    shapes = load_shapes(PROJECT, model)
    assert shapes
    every = shapes.all_tensors()
    infos = (TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape)) for name, dtype, shape in every)
    return alike(infos, read_geometry(shapes.config, model).layers)


@pytest.mark.parametrize(
    ("model", "flags", "weights", "pool", "near"),
    [
        # jtchilders-ai-assistant/warpcore-benchmarks, 2026-08-10
        ("Intel/Qwen3.5-122B-A10B-int4-AutoRound", f"{STEP} 8192 --gpu-memory-utilization 0.8", 62.65, 26.26, 0.05),
        # whole logs of two owners, vLLM 0.22.1rc1 and 0.20.0
        (NVFP4, f"{STEP} 8192 --gpu-memory-utilization 0.85 --max-num-seqs 5 {FP8} {MTP2}", 21.93, 74.76, 0.05),
        (NVFP4, f"{STEP} 65536 --gpu-memory-utilization 0.85 --max-num-seqs 8 {FP8}", 21.86, 66.93, 0.05),
        # 5.57x of 262,144 tokens, vLLM 0.17: before graphs were taken out of the budget
        ("Intel/Qwen3.5-122B-A10B-int4-AutoRound", f"{STEP} 8192 --gpu-memory-utilization 0.85", 62.65, 35.26, 0.1),
    ],
)
def test_public_logs_of_a_gb10(model: str, flags: str, weights: float, pool: float, near: float) -> None:
    """GiB of weights and of the KV pool, as vLLM logged them: in the range, and that near to the plan."""
    shapes = load_shapes(PROJECT, model)
    assert shapes
    geometry = read_geometry(shapes.config, model)
    settings = settings_of(geometry, flags, "cuda")
    rows = weigh(tensors_of(model), geometry, settings)
    made = make_plan(geometry, settings, rows, SPARK)
    assert made.pool_line.bytes / GIB == pytest.approx(pool, rel=near)
    assert made.pool_line.span and made.pool_line.span[0] < pool * GIB < made.pool_line.span[1]
    assert made.inside[0].bytes / GIB == pytest.approx(weights, rel=0.05)


def test_a_pool_that_does_not_hold_one_request_names_the_length_that_it_holds() -> None:
    flags = f"--kv-cache-memory-bytes 4G {SHARE}"
    made = plan_122b(flags)
    longest = made.chosen.cache.longest(made.chosen.blocks)
    (problem,) = made.problems
    assert "262,144" in problem and f"--max-model-len {longest}" in problem
    assert plan_122b(f"{flags} --max-model-len {longest}").fits
    assert plan_122b(f"{flags} --max-model-len auto").max_model_len == longest
    none = plan_122b(f"--kv-cache-memory-bytes 100m {SHARE} --max-model-len auto")
    assert len(none.problems) == 1 and not none.fits


def test_a_gpus_share_must_be_free_even_if_the_pool_is_given() -> None:
    """gpu_worker.py of vLLM 0.32 asks for it before it looks at --kv-cache-memory-bytes."""
    made = plan_122b(f"--kv-cache-memory-bytes 16G --gpu-memory-utilization 0.95 {SMALL}")
    assert made.pool_line.bytes == 16 * GIB
    assert not made.fits and made.needed == math.ceil(0.95 * SPARK.total) + total(made.outside)


def test_the_plan_as_json() -> None:
    made = plan_122b(f"{SHARE} --max-model-len 262144 --gdn-prefill-backend triton")
    value = json.loads(json.dumps(to_json(made)))
    assert (value["fits"], value["budget"], value["needed"]) == (True, made.budget, made.needed)
    chosen = value["capacities"][0]
    assert chosen["cache"]["block_bytes"] == 51_511_296
    assert set(chosen["requests"]) == {"32768", "131072", "262144"}
    assert {line["how"] for line in value["inside"]} == {"header", "estimate"}


def test_a_plan_that_does_not_fit_says_why() -> None:
    """The budget holds no cache, and it is more than what is free."""
    made = plan_122b("--gpu-memory-utilization 0.9", Machine(64 * GIB, 60 * GIB, "a small machine", "flag"))
    assert not made.fits and made.pool_line.bytes == 0 and len(made.problems) == 2


def test_layer_types_may_be_given_as_an_interval() -> None:
    assert geometry_122b(layer_types=None, full_attention_interval=4) == geometry_122b()


@pytest.mark.parametrize("key", ["num_local_experts", "n_routed_experts"])
def test_the_number_of_experts_has_several_names(key: str) -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 1000, "max_position_embeddings": 4096, "moe_intermediate_size": 64, key: 12,
    }  # fmt: skip
    assert read_geometry(config, "config.json").experts == 12
