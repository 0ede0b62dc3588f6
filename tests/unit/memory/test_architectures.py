"""What is planned of architectures that are known, and that nothing is invented of others."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from architecture_samples import GDN, GEMMA4, GRANITE, MAMBA2, MLA, MOE, SAMPLES, config
from memory_samples import MTP2, SPARK, settings_of
from places import PROJECT

from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.checkpoint.shapes import load_shapes
from sparkpin.core.errors import ManifestError
from sparkpin.memory.architecture import UnknownCacheError
from sparkpin.memory.cache import lay_out
from sparkpin.memory.decode import DecodeModel, Speed
from sparkpin.memory.geometry import DTYPE_BYTES, read_geometry
from sparkpin.memory.inputs import yarn_notes
from sparkpin.memory.plan import MemoryPlan, make_plan
from sparkpin.memory.settings import GIB
from sparkpin.memory.text import cache_lines, notes, speed_lines, title, to_json, verdict
from sparkpin.memory.weights import WeightKind, alike, weigh

WEIGHTS = [WeightKind("16-bit layers", 10, GIB, GIB, GIB)]


def plan_of(of: dict[str, Any], flags: str = "") -> MemoryPlan:
    geometry = read_geometry(of, "config.json")
    return make_plan(geometry, settings_of(geometry, f"--gpu-memory-utilization 0.8 {flags}", "cuda"), WEIGHTS, SPARK)


def why(of: dict[str, Any], flags: str = "") -> str:
    return plan_of(of, flags).unknown


def test_a_token_of_glm_4_7_flash() -> None:
    """47 layers of MLA: 512 and 64 components in 16 bits; as attention of 20 heads it would be 383,520."""
    cache = plan_of(config("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **MLA | {"num_hidden_layers": 47})).chosen.cache
    assert cache.token_bytes == 47 * (512 + 64) * 2 == 54_144


def test_a_window_bounds_what_a_request_takes() -> None:
    """gpt-oss: every other layer keeps its window and what is scheduled, however long the request is."""
    cache = plan_of(SAMPLES["gpt_oss"][0], "--max-num-batched-tokens 2048").chosen.cache
    short, long = cache.request_blocks(32_768), cache.request_blocks(65_536)
    assert long - short == 32_768 // 16, "one of two groups grows"
    assert cache.request_blocks(16) == 1 + 2, "a window may begin within a block"


def test_heads_of_gemma_4_count_only_where_keys_are_values() -> None:
    """12 layers, two of them see all: each has 2 heads of 128, or 1 where vLLM takes `num_global_key_value_heads`."""
    sizes = [
        plan_of(config("Gemma4ForCausalLM", "gemma4_text", **GEMMA4, num_global_key_value_heads=1, **more)).chosen
        for more in ({"attention_k_eq_v": True}, {"attention_k_eq_v": False}, {})
    ]
    assert [one.cache.token_bytes for one in sizes] == [2 * heads * 2 * 128 * 2 for heads in (1, 2, 2)]


def test_ranks_copy_the_one_group_of_mamba_2_and_divide_several() -> None:
    """Channels: 8 heads of 32, or of 64; for each group two states of 128. vLLM refuses ranks that do not divide."""
    one = config("GraniteMoeHybridForCausalLM", "granitemoehybrid", **GRANITE)
    several = config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*M-M*", **MAMBA2)
    for of, channels, heads in ((one, 8 * 32 // 2 + 2 * 128, 4 * 32), (several, (8 * 64 + 8 * 2 * 128) // 2, 4 * 64)):
        [states] = [one for one in plan_of(of, "-tp 2").chosen.cache.kinds if one.part.kind == "state"]
        assert states.slot == 3 * channels * 2 + heads * 128 * DTYPE_BYTES[plan_of(of).settings.ssm_dtype]
    assert "mamba2" in why(several | {"n_groups": 3}, "-tp 2")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
STATIC = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    ("quantised", "flags", "cache_dtype"),
    [
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "", "fp8_e4m3"),
        (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "--kv-cache-dtype bfloat16", "bfloat16"),
        (MODELOPT | {"quantization": {"kv_cache_quant_algo": "fp8"}}, "", "fp8_e4m3"),
        (MODELOPT | {"kv_cache_scheme": STATIC}, "", "fp8_e4m3"),
        (MODELOPT | {"kv_cache_scheme": STATIC | {"dynamic": True}}, "", "bfloat16"),
        (MODELOPT | {"kv_cache_quant_algo": "INT8"}, "", "bfloat16"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "", ""),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}, "", "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "", "bfloat16"),
        ({"quant_method": "fp8", "kv_cache_scheme": STATIC}, "", "bfloat16"),
    ],
)
def test_auto_is_the_type_of_cache_that_the_checkpoint_asks_for(
    quantised: dict[str, Any], flags: str, cache_dtype: str
) -> None:
    made = plan_of(LLAMA | {"quantization_config": quantised}, flags)
    assert (made.capacities[0].cache.cache_dtype if made.capacities else "") == cache_dtype
    assert bool(cache_dtype) or "nvfp4" in made.unknown


def test_compressed_tensors_scheme_is_not_that_of_mla() -> None:
    quantised = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}
    assert plan_of(SAMPLES["kimi_k2"][0] | {"quantization_config": quantised}).settings.cache_dtype == "bfloat16"


STRANGE: tuple[Any, ...] = (0, -1, 5, "x", "-" * 12, [], [[]] * 12, {"x": 1})
HYBRID = ("gemma4, pages alike", "nemotron_h", "jamba", "glm5_next, MTP-3", "qwen4_exp", "deepseek_v4")


@pytest.mark.parametrize("name", HYBRID)
def test_no_value_of_a_config_is_a_traceback(name: str) -> None:
    """With each of STRANGE in the place of each value there is a plan, with a cache or without, or one clear error."""
    of, args = SAMPLES[name]
    text = of.get("text_config", of)
    flags = MTP2 if "speculative_config" in args else ""
    for key in {*text, "rope_parameters", "quantization_config", "head_dim"}:
        for value in STRANGE:
            changed = text | {key: value}
            changed = of | {"text_config": changed} if "text_config" in of else changed
            with contextlib.suppress(ManifestError):
                made = plan_of(changed, flags)
                DecodeModel(made.geometry, made.settings, WEIGHTS).step(1000)
                list(yarn_notes(changed))
                assert made.unknown or made.chosen.cache.block_bytes > 0


LLAMA = config("LlamaForCausalLM", "llama")


@pytest.mark.parametrize(
    ("of", "flags", "names"),
    [
        (config("BrandNewForCausalLM", "brand_new"), "", "brand_new"),
        ({key: value for key, value in LLAMA.items() if key != "model_type"}, "", "model_type"),
        (LLAMA | {"sliding_window": 4096}, "", "sliding_window"),
        (LLAMA | {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "", "sliding_attention"),
        (LLAMA | {"layer_types": ["full_attention"]}, "", "6 layers"),
        (LLAMA | {"kv_lora_rank": 512}, "", "kv_lora_rank"),
        (config("Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=4096), "", "sliding_window"),
        (config("Gemma4ForCausalLM", "gemma4_text", **GEMMA4) | {"sliding_window": None}, "", "sliding_window"),
        (SAMPLES["deepseek_v32"][0] | {"index_topk_pattern": "FSSF"}, "", "index_topk_pattern"),
        (SAMPLES["deepseek_v32"][0], "--kv-cache-dtype bfloat16", "bfloat16"),
        (SAMPLES["gpt_oss"][0], "--kv-cache-dtype turboquant_4bit_nc", "turboquant_4bit_nc"),
        (SAMPLES["minimax_m3"][0], "--block-size 128", ""),
    ],
)
def test_what_no_rule_reads_is_unknown_and_has_no_number(of: dict[str, Any], flags: str, names: str) -> None:
    found = why(of, flags)
    assert names in found and bool(found) == bool(names)


def test_an_mtp_layer_that_nobody_asked_vllm_about_is_unknown() -> None:
    drafts = """--speculative-config {"method":"mtp","num_speculative_tokens":1}"""
    of = config("MiniMaxM2ForCausalLM", "minimax_m2", **MOE)
    assert "MTP" in why(of | {"num_nextn_predict_layers": 1}, drafts) and not why(of)
    ring = SAMPLES["qwen4_exp, MTP-3"][0]
    assert "raw16" in why(ring, drafts.replace(":1", ":5") + " --kv-cache-dtype fp8"), "more drafts than its ring has"


def test_a_plan_without_a_cache_has_all_else() -> None:
    made = plan_of(config("BrandNewForCausalLM", "brand_new"))
    assert made.inside[0].bytes == GIB and made.needed > 0.8 * SPARK.total and made.pool_line.bytes > 0
    assert (made.fits, made.problems, made.requests, made.capacities) == (False, [], {}, ())
    value = json.loads(json.dumps(to_json(made)))
    assert value["fits"] is False and "brand_new" in value["unknown"] and value["capacities"] == []
    text = [*title(made, "r", "base"), *cache_lines(made), *verdict(made)]
    assert not any("tokens" in line or "concurrency" in line for line in text)
    with pytest.raises(ManifestError, match="brand_new"):
        _ = made.chosen
    with pytest.raises(UnknownCacheError):
        lay_out(made.geometry, made.settings)


def test_machines_that_share_an_unknown_model_are_unchecked_and_a_note_says_so() -> None:
    of = config("BrandNewForCausalLM", "brand_new")
    several, one = (["\n".join(notes(plan_of(of, flags)))] for flags in ("-tp 2", ""))
    assert "2 machines" in several[0] and "machines" not in one[0]


def test_the_ceiling_of_an_unknown_cache_is_that_of_the_weights() -> None:
    made = plan_of(config("BrandNewForCausalLM", "brand_new"))
    step = DecodeModel(made.geometry, made.settings, WEIGHTS).step(1000)
    assert step.bytes == GIB and "brand_new" in step.unknown
    text = "\n".join(speed_lines(Speed({1000: step}, 273e9, None, ()), 1))
    assert "weights alone" in text and "in the cache" not in text


@pytest.mark.parametrize(
    ("name", "tokens", "read"),
    [
        # The 2,048 records of 656 bytes that attention looks at, and an index of 132 bytes.
        ("deepseek_v32, MTP-3", 10_000, 2048 * 656 + 10_000 * 132),
        # Of its index every 16th token; not the ring.
        ("glm5_next, MTP-3", 10_000, 2048 * 656 + 10_000 / 16 * 132),
        # 512 chosen tokens: keys and values of two heads of 256 in 8 bits; of its index every fourth, in 16 bits.
        ("qwen4_exp, MTP-3", 10_000, 512 * 2 * 2 * 256 + 10_000 / 4 * 2 * 128),
        # Its window alone.
        ("deepseek_v4, MTP-3", 10_000, 128 * 584),
        ("deepseek_v4, MTP-3", 100, 100 * 584),
    ],
)
def test_a_pass_of_an_mtp_layer_reads_what_a_layer_of_the_model_does(name: str, tokens: int, read: float) -> None:
    made = plan_of(SAMPLES[name][0], f"{MTP2} --kv-cache-dtype fp8")
    step = DecodeModel(made.geometry, made.settings, WEIGHTS).step(tokens)
    of_mtp = [one for one in step.reads if one.what == "KV cache of the MTP layer"]
    assert {one.times for one in of_mtp} == {2} and sum(one.size for one in of_mtp) == read


def test_only_formats_that_are_known_are_compared() -> None:
    def formats(of: dict[str, Any]) -> list[str]:
        return [one.cache.cache_dtype for one in plan_of(of, "--kv-cache-dtype fp8").capacities]

    assert formats(SAMPLES["gpt_oss"][0]) == ["fp8", "bfloat16"]
    assert formats(SAMPLES["deepseek_v32"][0]) == ["fp8"]
    assert "turboquant_4bit_nc" in formats(config("Qwen3NextForCausalLM", "qwen3_next", **GDN, **MOE))


def test_the_weights_that_an_owner_logged_of_glm_5_3_flash_on_two() -> None:
    """88.89 GiB on each (tonyd2wild/GLM-5.3-Flash-NVFP4-DFlash2-2x-DGX-Spark#23), with the vision tower."""
    shapes = load_shapes(PROJECT, "nvidia/GLM-5.3-Flash-NVFP4")
    assert shapes
    geometry = read_geometry(shapes.config, "config.json")
    settings = settings_of(geometry, "-tp 2 --kv-cache-dtype fp8", "cuda")
    every = shapes.all_tensors()
    infos = (TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape)) for name, dtype, shape in every)
    rows = weigh(alike(infos, geometry.layers), geometry, settings)
    assert sum(row.loaded for row in rows) / GIB == pytest.approx(88.89, rel=0.01)
    [draft] = [row for row in rows if row.kind == "MTP experts"]
    assert (draft.tensors, draft.loaded) == (288 * 3, 0), "layer 45, which is loaded for MTP alone"
