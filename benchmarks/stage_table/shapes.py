"""config.json of the 122B, in the formats of the stages. Its weights are made at random where it is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.formats import PLAIN_ENTRY, fp8_entry

BODY = "model.language_model.layers"
ATTENTION_EVERY = 4
EXPERTS, BLOCK, GROUP = 256, 128, 128


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model, as `config` writes them."""

    attention: int
    linear: int
    draft: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    conv_kernel: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    max_positions: int
    dtype: str
    ssm_dtype: str


SIZES = Sizes(
    attention=12, linear=36, draft=1, hidden=3072, vocabulary=248_320, heads=32, kv_heads=2, head_dim=256,
    conv_kernel=4, key_heads=16, key_dim=128, value_heads=64, value_dim=128, experts=EXPERTS, experts_per_token=8,
    expert_width=1024, max_positions=262_144, dtype="bfloat16", ssm_dtype="float32",
)  # fmt: skip
GATED = ("gate_proj", "up_proj", "down_proj")
TINY = dataclasses.replace(
    SIZES, attention=1, linear=3, hidden=128, vocabulary=1024, heads=4, head_dim=64, key_heads=2, value_heads=4,
    experts=4, experts_per_token=2, expert_width=128,
)  # fmt: skip
"""A few megabytes, to run everything on a CPU."""


def config(*, fp8: bool, fp8_draft: bool = False, geometry: Sizes = SIZES, experts: int = EXPERTS) -> dict[str, Any]:
    """fp8: shared experts; fp8_draft: every projection of the MTP layer."""
    g = geometry
    layers = range(g.attention + g.linear)
    kinds = ["full_attention" if (i + 1) % ATTENTION_EVERY == 0 else "linear_attention" for i in layers]
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": g.dtype,
        "eos_token_id": g.vocabulary - 1,
        "full_attention_interval": ATTENTION_EVERY,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "layer_types": kinds,
        "linear_conv_kernel_dim": g.conv_kernel,
        "linear_key_head_dim": g.key_dim,
        "linear_num_key_heads": g.key_heads,
        "linear_num_value_heads": g.value_heads,
        "linear_value_head_dim": g.value_dim,
        "mamba_ssm_dtype": g.ssm_dtype,
        "max_position_embeddings": g.max_positions,
        "moe_intermediate_size": g.expert_width,
        "mtp_num_hidden_layers": g.draft,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": g.heads,
        "num_experts": experts,
        "num_experts_per_tok": g.experts_per_token,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": g.kv_heads,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": g.expert_width,
        "tie_word_embeddings": False,
        "vocab_size": g.vocabulary,
        "quantization_config": {
            "autoround_version": "0.12.0",
            "bits": 4,
            "block_name_to_quantize": BODY,
            "data_type": "int",
            "extra_config": dict(entries(kinds, fp8=fp8)) | (dict(draft_entries(experts)) if fp8_draft else {}),
            "group_size": GROUP,
            "iters": 200,
            "packing_format": "auto_round:auto_gptq",
            "quant_method": "auto-round",
            "sym": True,
        },
    }


def drafter(project: Path) -> dict[str, Any]:
    """config.json of z-lab's DFlash drafter."""
    path = project / "pins/shapes/z-lab/Qwen3.5-122B-A10B-DFlash.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
    return found | {"dflash_config": found["dflash_config"] | {"mask_token_id": found["vocab_size"] - 1}}


def entries(kinds: list[str], *, fp8: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Modules of the body that are not INT4."""
    shared = fp8_entry((BLOCK, BLOCK)) if fp8 else dict(PLAIN_ENTRY)
    for i, kind in enumerate(kinds):
        for name in ("gate", "shared_expert_gate"):
            yield f"{BODY}.{i}.mlp.{name}", dict(PLAIN_ENTRY)
        for name in GATED:
            yield f"{BODY}.{i}.mlp.shared_expert.{name}", dict(shared)
        if kind == "linear_attention":
            for name in ("in_proj_a", "in_proj_b"):
                yield f"{BODY}.{i}.linear_attn.{name}", dict(PLAIN_ENTRY)


def draft_entries(experts: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the rule `mtp.layers.*_proj`, fp8, writes into a checkpoint's config."""
    layer, entry = "mtp.layers.0", fp8_entry((BLOCK, BLOCK))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield f"{layer}.self_attn.{name}", dict(entry)
    for name in GATED:
        yield f"{layer}.mlp.shared_expert.{name}", dict(entry)
        for expert in range(experts):
            yield f"{layer}.mlp.experts.{expert}.{name}", dict(entry)
