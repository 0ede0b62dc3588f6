"""Public models as a Hub lists them: config.json with the true sizes as far as they could be found, and headers of it.

Nothing was downloaded: the facts were read in November 2026. Qwen3-8B, Llama-3.1-8B, Mistral-Small-3.2, gpt-oss-120b:
their published configurations. Qwen3.8-27B: vllm-project/recipes, and pins/shapes of Qwen3.6-27B, which has the same
sizes. Qwen3.8-Flash-Next, DeepSeek-V4.1-Flash, Gemma 4 E4B and z-lab's DFlash2: other engines' tests and contracts, so
without what these do not say. MiniMax-M3: defaults of vLLM 0.32's configuration class. Of GLM-5.3-Flash layers and
experts alone could be found; its width and vocabulary are made up. Of models with other layers than plain attention
the header has the embedding alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_samples import Spec
from places import PROJECT

from sparkpin.checkpoint.repository import CONFIG
from sparkpin.checkpoint.safetensors import build_header
from sparkpin.checkpoint.shapes import load_shapes


def dense(architecture: str, **sizes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "dtype": "bfloat16", **sizes}


def inside(architecture: str, **sizes: Any) -> dict[str, Any]:
    """The text model's sizes where models with vision have them."""
    return {"architectures": [architecture], "dtype": "bfloat16", "text_config": sizes}


CONFIGS: Mapping[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": dense(
        "Qwen3ForCausalLM", model_type="qwen3",
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, intermediate_size=12288, vocab_size=151936, max_position_embeddings=40960,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": dense(
        "LlamaForCausalLM", model_type="llama",
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
    ),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": inside(
        "Mistral3ForConditionalGeneration", model_type="mistral",
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=32768, vocab_size=131072, max_position_embeddings=131072,
    ),
    "openai/gpt-oss-120b": dense(
        "GptOssForCausalLM", model_type="gpt_oss",
        hidden_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
        max_position_embeddings=131072, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
    ),
    "Qwen/Qwen3.8-Flash-Next": inside(
        "Qwen4ExpForConditionalGeneration", model_type="qwen4_exp_text",
        hidden_size=2560, num_hidden_layers=48, num_attention_heads=24,
        num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=640,
        linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, vocab_size=248320, max_position_embeddings=262144, ple_layer_ids=[2],
    ),
    "zai-org/GLM-5.3-Flash": inside(
        "Glm5NextForConditionalGeneration", model_type="glm5_next_text",
        num_hidden_layers=45, n_routed_experts=288, hidden_size=4096,
        vocab_size=1024,
    ),
    "deepseek-ai/DeepSeek-V4.1-Flash": inside(
        "DeepseekV41ForCausalLM", model_type="deepseek_v4",
        hidden_size=5120, num_hidden_layers=43, num_attention_heads=64, num_key_value_heads=1,
        head_dim=512, n_routed_experts=384, num_experts_per_tok=6, vocab_size=129280, max_position_embeddings=1048576,
        engram_layer_ids=[1, 14],
    ),
    "google/gemma-4-E4B-it": inside(
        "Gemma4ForConditionalGeneration", model_type="gemma4_text",
        hidden_size=2560, num_hidden_layers=42, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, global_head_dim=512, vocab_size=262144, max_position_embeddings=131072,
    ),
    "MiniMaxAI/MiniMax-M3": inside(
        "MiniMaxM3SparseForConditionalGeneration", model_type="minimax_m3_vl_text",
        hidden_size=6144, num_hidden_layers=60, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, num_local_experts=128, num_experts_per_tok=4, intermediate_size=3072,
        vocab_size=200064, max_position_embeddings=524288,
    ),
    "z-lab/Qwen3.8-27B-DFlash2": dense(
        "DFlash2DraftModel", model_type="qwen3",
        hidden_size=5120, num_hidden_layers=5, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=17408, vocab_size=248320, block_size=8,
        max_position_embeddings=262144,
    ),
}  # fmt: skip
SHAPED = {
    "unsloth/Qwen3.8-27B-NVFP4": "nvidia/Qwen3.6-27B-NVFP4",
    "nvidia/Qwen3.8-27B-NVFP4": "nvidia/Qwen3.6-27B-NVFP4",
}
DENSE = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Mistral3ForConditionalGeneration", "DFlash2DraftModel")
TEN = (*list(CONFIGS)[:-1], "unsloth/Qwen3.8-27B-NVFP4")


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    return text


def tensors_of(config: Mapping[str, Any]) -> dict[str, Spec]:
    """In BF16: embedding, head and the layers of plain attention, where the model has no others."""
    text = text_of(config)
    vocabulary, hidden = text["vocab_size"], text["hidden_size"]
    if config["architectures"][0] not in DENSE:
        return {"model.embed_tokens.weight": ("BF16", (vocabulary, hidden))}
    head, heads, kv = text.get("head_dim", 128), text["num_attention_heads"], text["num_key_value_heads"]
    wide = text["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads * head, hidden), "self_attn.k_proj": (kv * head, hidden),
        "self_attn.v_proj": (kv * head, hidden), "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    made: dict[str, Spec] = {
        f"{name}.weight": ("BF16", (vocabulary, hidden)) for name in ("model.embed_tokens", "lm_head")
    }
    for layer in range(text["num_hidden_layers"]):
        made |= {f"model.layers.{layer}.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    return made


def write_model(root: Path, repo: str, config: Mapping[str, Any] | None = None, shaped: str = "") -> None:
    """`root/<repo>` with config.json and headers without their data; `hub.serve` says the size that they claim."""
    folder = root / repo
    folder.mkdir(parents=True)
    if shaped := shaped or SHAPED.get(repo, ""):
        shapes = load_shapes(PROJECT, shaped)
        assert shapes
        listing = shapes.listing("x")
        for file, header in listing.headers.items():
            (folder / file).write_bytes(header)
        (folder / CONFIG).write_bytes(listing.texts[CONFIG])
        return
    config = config or CONFIGS[repo]
    specs = [(name, dtype, shape) for name, (dtype, shape) in tensors_of(config).items()]
    (folder / "model.safetensors").write_bytes(build_header(specs, {"format": "pt"})[0])
    (folder / CONFIG).write_text(json.dumps(config))
