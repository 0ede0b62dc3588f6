"""Made-up listings of Qwen3.5-MoE pairs in any geometry: those of the published models, and a small one."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkpin.checkpoint.plan import CheckpointPlan, make_plan
from sparkpin.checkpoint.repository import CONFIG, INDEX, Listing, header_of
from sparkpin.checkpoint.safetensors import build_header, tensor_nbytes
from sparkpin.checkpoint.steps import all_steps
from sparkpin.pins.schema import ModelPin

Spec = tuple[str, tuple[int, ...]]
Tensors = dict[str, Spec]

EXTRA = "model_extra_tensors.safetensors"
MULTIMODAL, TEXT = "model.language_model.", "model."
BLOCK = GROUP = 128


@dataclass(frozen=True)
class Geometry:
    """heads and kv_heads are of full attention (every fourth layer), key_heads and value_heads of linear attention.

    experts: 0 for a dense model, whose layers have one MLP of the width `intermediate`.
    """

    layers: int
    hidden: int
    experts: int
    intermediate: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    head_dim: int = 256
    linear_dim: int = 128
    vocabulary: int = 248_320
    active: int = 8
    positions: int = 262_144

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.linear_dim

    def is_full(self, layer: int) -> bool:
        return layer % 4 == 3


G122B = Geometry(48, 3072, 256, 1024, heads=32, kv_heads=2, key_heads=16, value_heads=64)
G35B = Geometry(40, 2048, 256, 512, heads=16, kv_heads=2, key_heads=16, value_heads=32)


def expert_matrices(g: Geometry) -> dict[str, tuple[int, int]]:
    return {
        "gate_proj": (g.intermediate, g.hidden),
        "up_proj": (g.intermediate, g.hidden),
        "down_proj": (g.hidden, g.intermediate),
    }


def attention_matrices(g: Geometry) -> dict[str, tuple[int, int]]:
    """[out, in]; q_proj gives a query and an output gate for each head."""
    return {
        "self_attn.q_proj": (2 * g.heads * g.head_dim, g.hidden),
        "self_attn.k_proj": (g.kv_heads * g.head_dim, g.hidden),
        "self_attn.v_proj": (g.kv_heads * g.head_dim, g.hidden),
        "self_attn.o_proj": (g.hidden, g.heads * g.head_dim),
    }


def linear_matrices(g: Geometry) -> dict[str, tuple[int, int]]:
    values = g.value_heads * g.linear_dim
    return {
        "linear_attn.in_proj_qkv": (g.channels, g.hidden),
        "linear_attn.in_proj_z": (values, g.hidden),
        "linear_attn.out_proj": (g.hidden, values),
        "linear_attn.in_proj_a": (g.value_heads, g.hidden),
        "linear_attn.in_proj_b": (g.value_heads, g.hidden),
    }


def plain_of_layer(g: Geometry, *, full: bool) -> Tensors:
    """What both repositories of a pair hold alike."""
    found: Tensors = {
        "input_layernorm.weight": ("BF16", (g.hidden,)),
        "post_attention_layernorm.weight": ("BF16", (g.hidden,)),
    }
    if g.experts:
        found["mlp.gate.weight"] = ("BF16", (g.experts, g.hidden))
        found["mlp.shared_expert_gate.weight"] = ("BF16", (1, g.hidden))
    if full:
        return found | {f"self_attn.{name}_norm.weight": ("BF16", (g.head_dim,)) for name in ("q", "k")}
    return found | {
        "linear_attn.A_log": ("F32", (g.value_heads,)),
        "linear_attn.dt_bias": ("BF16", (g.value_heads,)),
        "linear_attn.conv1d.weight": ("BF16", (g.channels, 1, 4)),
        "linear_attn.norm.weight": ("F32", (g.linear_dim,)),
    }


def plain_outside(g: Geometry, body: str) -> Tensors:
    """Embedding, last norm, LM head, and the vision tower of 27 blocks where the model has one."""
    found: Tensors = {
        f"{body}embed_tokens.weight": ("BF16", (g.vocabulary, g.hidden)),
        f"{body}norm.weight": ("BF16", (g.hidden,)),
        "lm_head.weight": ("BF16", (g.vocabulary, g.hidden)),
    }
    if body == MULTIMODAL:
        for name, *shape in vision(g):
            found[f"model.visual.{name}"] = ("BF16", tuple(shape))
    return found


def vision(g: Geometry) -> Iterator[tuple[Any, ...]]:
    width, inner = 1152, 4304
    merged = 4 * width
    yield "patch_embed.proj.weight", width, 3, 2, 16, 16
    yield "patch_embed.proj.bias", width
    yield "pos_embed.weight", 2304, width
    for block in range(27):
        for name, rows, cols in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.linear_fc1", inner, width),
            ("mlp.linear_fc2", width, inner),
        ):
            yield f"blocks.{block}.{name}.weight", rows, cols
            yield f"blocks.{block}.{name}.bias", rows
        for name in ("norm1", "norm2"):
            yield f"blocks.{block}.{name}.weight", width
            yield f"blocks.{block}.{name}.bias", width
    for name, rows, cols in (("linear_fc1", merged, merged), ("linear_fc2", g.hidden, merged)):
        yield f"merger.{name}.weight", rows, cols
        yield f"merger.{name}.bias", rows
    yield "merger.norm.weight", width
    yield "merger.norm.bias", width


def as_bf16(name: str, shape: tuple[int, int]) -> Tensors:
    return {f"{name}.weight": ("BF16", shape)}


def as_int4(name: str, shape: tuple[int, int]) -> Tensors:
    rows, cols = shape
    return {
        f"{name}.qweight": ("I32", (cols // 8, rows)),
        f"{name}.qzeros": ("I32", (cols // GROUP, rows // 8)),
        f"{name}.scales": ("F16", (cols // GROUP, rows)),
    }


def as_fp8(name: str, shape: tuple[int, int]) -> Tensors:
    scales = tuple(-(-size // BLOCK) for size in shape)
    return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale_inv": ("BF16", scales)}


def layer(g: Geometry, prefix: str, *, full: bool, repository: str) -> Tensors:
    """repository: int4, fp8, or bf16 for an MTP layer that is as it was."""
    packed = {"int4": as_int4, "fp8": as_fp8, "bf16": as_bf16}[repository]
    found = {prefix + name: spec for name, spec in plain_of_layer(g, full=full).items()}
    for name, shape in (attention_matrices(g) if full else linear_matrices(g)).items():
        plain = name.endswith(("_a", "_b")) and repository == "fp8"
        found |= (as_bf16 if plain else packed)(prefix + name, shape)
    for name, shape in expert_matrices(g).items():
        if not g.experts:
            found |= packed(f"{prefix}mlp.{name}", shape)
            continue
        shared = packed if repository == "fp8" else as_bf16
        found |= shared(f"{prefix}mlp.shared_expert.{name}", shape)
        for expert in range(g.experts):
            found |= packed(f"{prefix}mlp.experts.{expert}.{name}", shape)
    return found


def mtp(g: Geometry, repository: str) -> Tensors:
    found: Tensors = {"mtp.fc.weight": ("BF16", (g.hidden, 2 * g.hidden))}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}.weight"] = ("BF16", (g.hidden,))
    return found | layer(g, "mtp.layers.0.", full=True, repository=repository)


def int4_files(g: Geometry, *, body: str = MULTIMODAL) -> dict[str, Tensors]:
    prefixes = {i: f"{body}layers.{i}." for i in range(g.layers)}
    shards = in_shards([layer(g, p, full=g.is_full(i), repository="int4") for i, p in prefixes.items()], 14)
    shards[-1] |= plain_outside(g, body)
    return named(shards) | {EXTRA: mtp(g, "bf16")}


def int4_listing(g: Geometry, *, body: str = MULTIMODAL) -> Listing:
    files = int4_files(g, body=body)
    config = config_of(
        g,
        body,
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": f"{body}layers",
            "extra_config": {
                name.removesuffix(".weight"): {"bits": 16, "data_type": "float"}
                for file, tensors in files.items()
                if file != EXTRA
                for name in tensors
                if ".shared_expert." in name or name.endswith("mlp.gate.weight")
            },
        },
    )
    return listing("int4", files, config)


def fp8_listing(g: Geometry, *, body: str = MULTIMODAL) -> Listing:
    shards = in_shards(
        [layer(g, f"{body}layers.{i}.", full=g.is_full(i), repository="fp8") for i in range(g.layers)], 39
    )
    shards[-1] |= plain_outside(g, body) | mtp(g, "fp8")
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    return listing("fp8", named(shards), config_of(g, body, quantised))


def in_shards(layers: list[Tensors], count: int) -> list[Tensors]:
    """Layers in order, over at most `count` files."""
    count = min(count, len(layers))
    shards: list[Tensors] = [{} for _ in range(count)]
    for i, tensors in enumerate(layers):
        shards[i * count // len(layers)] |= tensors
    return shards


def named(shards: list[Tensors]) -> dict[str, Tensors]:
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": tensors for i, tensors in enumerate(shards, 1)}


def config_of(g: Geometry, body: str, quantised: Mapping[str, Any]) -> dict[str, Any]:
    kind = "qwen3_5_moe" if g.experts else "qwen3_5"
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        "hidden_size": g.hidden,
        "num_hidden_layers": g.layers,
        "layer_types": ["full_attention" if g.is_full(i) else "linear_attention" for i in range(g.layers)],
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "linear_num_key_heads": g.key_heads,
        "linear_num_value_heads": g.value_heads,
        "linear_key_head_dim": g.linear_dim,
        "linear_value_head_dim": g.linear_dim,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "vocab_size": g.vocabulary,
        "max_position_embeddings": g.positions,
        "mamba_ssm_dtype": "float32",
    }
    if g.experts:
        text |= {
            "num_experts": g.experts,
            "moe_intermediate_size": g.intermediate,
            "shared_expert_intermediate_size": g.intermediate,
            "num_experts_per_tok": g.active,
        }
    else:
        text["intermediate_size"] = g.intermediate
    name = "Qwen3_5Moe" if g.experts else "Qwen3_5"
    if body == TEXT:
        return {"architectures": [f"{name}ForCausalLM"], **text, "quantization_config": quantised}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "quantization_config": quantised,
    }


def listing(name: str, files: Mapping[str, Tensors], config: Mapping[str, Any]) -> Listing:
    headers, sizes = {}, {}
    for file, tensors in files.items():
        headers[file], _ = build_header(((tensor, *spec) for tensor, spec in tensors.items()), {"format": "pt"})
        sizes[file] = len(headers[file]) + sum(tensor_nbytes(*spec) for spec in tensors.values())
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    total = sum(tensor_nbytes(*spec) for tensors in files.values() for spec in tensors.values())
    texts = {
        INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}).encode(),
        CONFIG: json.dumps(config).encode(),
    }
    sizes |= {file: len(data) for file, data in texts.items()} | {"README.md": 2000}
    return Listing(name, f"made-up {name}", sizes, headers, texts)


TOY = Geometry(4, 256, 2, 128, heads=4, kv_heads=2, key_heads=2, value_heads=8, head_dim=64, vocabulary=1024)


@functools.cache
def listings(g: Geometry, body: str = MULTIMODAL) -> dict[str, Listing]:
    return {"int4": int4_listing(g, body=body), "fp8": fp8_listing(g, body=body)}


def plan_of(pin: ModelPin, pair: dict[str, Listing]) -> CheckpointPlan:
    return make_plan(pair, pin, all_steps(pin))


def tensors_of(listing: Listing) -> dict[str, str]:
    """name -> file"""
    return {name: file for file in listing.headers for name in header_of(listing, file).tensors}
