"""The published chain of the 122B on one Spark, with the shapes that its bytes follow from.

The model's repositories need not be at hand: the shapes are those of docs/checkpoints.md, and a test compares them with
headers of that form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.measure.roofline.reads import DecodeModel, model_of
from sparkpin.serve.memory.geometry import Geometry
from sparkpin.serve.memory.settings import read_settings
from sparkpin.serve.memory.weights import Loading

MODEL = "qwen3.5-122b-a10b"
EXPERTS, GROUP, BLOCK = 256, 128, 128
GEOMETRY = Geometry(
    attention=12, linear=36, draft=1, hidden=3072, vocabulary=248_320, heads=32, kv_heads=2, head_dim=256,
    conv_kernel=4, key_heads=16, key_dim=128, value_heads=64, value_dim=128, experts_per_token=8, expert_width=1024,
    max_positions=262_144, dtype="bfloat16", ssm_dtype="float32", vision=True,
)  # fmt: skip
ACCEPTED = 0.79
"""Published: about 80 % of two drafted tokens, 2.58 tokens a step."""
SHORT = 1000
"""Tokens in the cache, about, with the published prompts: beside the ceiling of more, their speeds say nothing."""

MTP2 = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')


@dataclass(frozen=True, slots=True)
class Published:
    stage: str
    what: str
    tokens: float  # a second, as published for five prompts, one user
    fp8: bool  # shared experts
    flags: tuple[str, ...]
    int8: bool  # LM head
    fp8_draft: bool = False  # the projections of the MTP layer


CHAIN = (
    Published("base", "AutoRound INT4", 28.3, False, (), False),
    Published("hybrid", "+ FP8 shared experts", 30.8, True, (), False),
    Published("mtp", "+ MTP, 2 drafted tokens", 38.4, True, MTP2, False),
    Published("v2", "+ INT8 LM head", 51.0, True, MTP2, True),
    Published("v2-tq", "+ 4-bit K and V", 39.0, True, (*MTP2, "--kv-cache-dtype", "turboquant_4bit_nc"), True),
)


def model_published(figure: Published) -> DecodeModel:
    argv = ["vllm", "serve", "/model", *figure.flags]
    settings = read_settings(argv, {}, GEOMETRY, "cuda", vllm=(0, 33), wide_state=False, origin="the published chain")
    loading = Loading(
        draft=settings.draft_layers > 0,
        vision=True,
        int8_head=figure.int8,
        widened=False,
        draft_rows=settings.draft_rows,
        ranks=settings.ranks,
        kv_heads=GEOMETRY.kv_heads,
    )
    return model_of(tensors(fp8=figure.fp8, fp8_draft=figure.fp8_draft), GEOMETRY, settings, loading, symmetric=True)


def tensors(*, fp8: bool, fp8_draft: bool = False) -> Iterator[TensorInfo]:
    """Every tensor that decode reads, a layer's experts as one; only names' kinds and bytes matter."""
    g = GEOMETRY
    for layer in range(g.layers):
        prefix = f"model.language_model.layers.{layer}."
        full = (layer + 1) % 4 == 0
        yield from plain_of_layer(prefix, full=full)
        for name, rows, cols in matrices(full=full):
            yield from int4(prefix + name, 1, rows, cols)
        for name, rows, cols in gated(g.expert_width):
            yield from int4(f"{prefix}mlp.experts.{name}", EXPERTS, rows, cols)
            yield from (eight_bit if fp8 else plain)(f"{prefix}mlp.shared_expert.{name}", rows, cols)
    yield from plain("model.language_model.norm", g.hidden)
    yield from plain("lm_head", g.vocabulary, g.hidden)
    yield from mtp(fp8=fp8_draft)


def mtp(*, fp8: bool) -> Iterator[TensorInfo]:
    """One layer of full attention, all of it in 16 bits; or its projections in FP8 (docs/checkpoints.md)."""
    g, projection = GEOMETRY, eight_bit if fp8 else plain
    yield from plain("mtp.fc", g.hidden, 2 * g.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from plain(f"mtp.{name}", g.hidden)
    yield from plain_of_layer("mtp.layers.0.", full=True)
    for name, rows, cols in matrices(full=True):
        yield from projection(f"mtp.layers.0.{name}", rows, cols)
    for name, rows, cols in gated(g.expert_width):
        yield from projection(f"mtp.layers.0.mlp.experts.{name}", EXPERTS, rows, cols)
        yield from projection(f"mtp.layers.0.mlp.shared_expert.{name}", rows, cols)


def matrices(*, full: bool) -> Iterator[tuple[str, int, int]]:
    """[out, in]; q_proj gives a query and an output gate for each head."""
    g = GEOMETRY
    if full:
        yield "self_attn.q_proj", 2 * g.heads * g.head_dim, g.hidden
        yield "self_attn.k_proj", g.kv_heads * g.head_dim, g.hidden
        yield "self_attn.v_proj", g.kv_heads * g.head_dim, g.hidden
        yield "self_attn.o_proj", g.hidden, g.heads * g.head_dim
        return
    values = g.value_heads * g.value_dim
    yield "linear_attn.in_proj_qkv", g.conv_width, g.hidden
    yield "linear_attn.in_proj_z", values, g.hidden
    yield "linear_attn.out_proj", g.hidden, values
    yield "linear_attn.in_proj_a", g.value_heads, g.hidden
    yield "linear_attn.in_proj_b", g.value_heads, g.hidden


def gated(width: int) -> Iterator[tuple[str, int, int]]:
    yield "gate_proj", width, GEOMETRY.hidden
    yield "up_proj", width, GEOMETRY.hidden
    yield "down_proj", GEOMETRY.hidden, width


def plain_of_layer(prefix: str, *, full: bool) -> Iterator[TensorInfo]:
    g = GEOMETRY
    yield from plain(f"{prefix}input_layernorm", g.hidden)
    yield from plain(f"{prefix}post_attention_layernorm", g.hidden)
    yield from plain(f"{prefix}mlp.gate", EXPERTS, g.hidden)
    yield from plain(f"{prefix}mlp.shared_expert_gate", 1, g.hidden)
    if full:
        yield from plain(f"{prefix}self_attn.q_norm", g.head_dim)
        yield from plain(f"{prefix}self_attn.k_norm", g.head_dim)
        return
    yield tensor(f"{prefix}linear_attn.A_log", "F32", g.value_heads)
    yield tensor(f"{prefix}linear_attn.dt_bias", "BF16", g.value_heads)
    yield from plain(f"{prefix}linear_attn.conv1d", g.conv_width, 1, g.conv_kernel)
    yield tensor(f"{prefix}linear_attn.norm.weight", "F32", g.value_dim)


def int4(name: str, count: int, rows: int, cols: int) -> Iterator[TensorInfo]:
    """Eight codes in an int32 and a scale for each 128 weights of a row. `qzeros` are there, too, and not read."""
    yield tensor(f"{name}.qweight", "I32", count, cols // 8, rows)
    yield tensor(f"{name}.scales", "F16", count, cols // GROUP, rows)


def eight_bit(name: str, *shape: int) -> Iterator[TensorInfo]:
    *count, rows, cols = shape
    yield tensor(f"{name}.weight", "F8_E4M3", *shape)
    yield tensor(f"{name}.weight_scale_inv", "BF16", *count, -(-rows // BLOCK), -(-cols // BLOCK))


def plain(name: str, *shape: int) -> Iterator[TensorInfo]:
    yield tensor(f"{name}.weight", "BF16", *shape)


def tensor(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape))
