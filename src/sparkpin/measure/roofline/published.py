"""The published chain of the 122B on one Spark; its repositories need not be at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkpin.checkpoint import published as shapes
from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.measure.roofline.reads import DecodeModel, model_of
from sparkpin.serve.memory.geometry import read_geometry
from sparkpin.serve.memory.settings import read_settings
from sparkpin.serve.memory.weights import Loading

MODEL = "qwen3.5-122b-a10b"
SHAPES = shapes.G122B
GEOMETRY = read_geometry(shapes.config_of(SHAPES, shapes.MULTIMODAL, {}), "the published shapes")
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
    Published("mtp", "+ MTP, 2 drafts", 38.4, True, MTP2, False),
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
    """Of all tensors, a layer's experts as one; only names' kinds and bytes matter."""
    found = shapes.plain_outside(SHAPES, shapes.MULTIMODAL)
    for layer in range(SHAPES.layers):
        prefix = f"{shapes.MULTIMODAL}layers.{layer}."
        found |= shapes.layer(SHAPES, prefix, full=SHAPES.is_full(layer), repository="int4", joined=True)
        for name, shape in shapes.expert_matrices(SHAPES).items() if fp8 else ():
            found |= shapes.as_fp8(f"{prefix}mlp.shared_expert.{name}", shape)
    found |= shapes.mtp(SHAPES, "fp8" if fp8_draft else "bf16", joined=True)
    for name, (dtype, size) in found.items():
        yield TensorInfo(name, dtype, size, 0, tensor_nbytes(dtype, size))
