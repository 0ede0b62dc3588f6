"""The chain's stages of the 122B on a GB10: what was published of them, and the bytes of their steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from shapes import EXPERTS, config

from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.checkpoint.shapes import load_shapes
from sparkpin.core.paths import project_folder
from sparkpin.memory.decode import DecodeModel
from sparkpin.memory.geometry import read_geometry
from sparkpin.memory.settings import read_settings
from sparkpin.memory.weights import alike, weigh
from sparkpin.pins.vllm_flags import Flags

BASE, DONOR = "Intel/Qwen3.5-122B-A10B-int4-AutoRound", "Qwen/Qwen3.5-122B-A10B-FP8"
MTP2 = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')


@dataclass(frozen=True)
class Figure:
    """tokens: a second, None where nobody published it; fp8: shared experts; int8: LM head; fp8_draft: MTP layer."""

    stage: str
    tokens: float | None = None
    flags: tuple[str, ...] = ()
    fp8: bool = True
    int8: bool = True
    fp8_draft: bool = False


CHAIN = (
    Figure("base", 28.3, fp8=False, int8=False),
    Figure("hybrid", 30.8, int8=False),
    Figure("mtp", None, MTP2, int8=False),
    Figure("v2", 51.6, MTP2),
    Figure("v2-tq", 39.0, (*MTP2, "--kv-cache-dtype", "turboquant_4bit_nc")),
)

GEOMETRY = dataclasses.replace(read_geometry(config(fp8=False), "config.json"), vision=True)


@functools.cache
def decode_of(figure: Figure) -> DecodeModel:
    argv = ["vllm", "serve", "/model", *figure.flags]
    mods = {"draft-vocabulary"} | ({"int8-lm-head"} if figure.int8 else set())
    settings = read_settings(Flags(argv, figure.stage, {}), {}, "cuda", GEOMETRY, mods=mods)
    weights = weigh(alike(tensors(figure), GEOMETRY.layers), GEOMETRY, settings, symmetric=True)
    return DecodeModel(GEOMETRY, settings, weights)


def tensors(figure: Figure) -> Iterator[TensorInfo]:
    found, donor = shapes_of(BASE), shapes_of(DONOR)
    for name, one in donor.items():
        is_draft = name.startswith("mtp.")
        if figure.fp8_draft if is_draft else figure.fp8 and ".shared_expert." in name:
            found[name] = one
    for name, (dtype, shape) in found.items():
        yield TensorInfo(name, dtype, shape, 0, tensor_nbytes(dtype, shape))


def shapes_of(repo: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The experts of a layer as one tensor: only bytes matter."""
    known = load_shapes(project_folder(), repo)
    assert known, repo
    one_each = {
        pattern.replace("{expert}.", ""): (dtype, (EXPERTS, *shape) if "{expert}" in pattern else shape)
        for pattern, (dtype, shape) in known.tensors.items()
    }
    joined = known.model_copy(update={"tensors": one_each}).all_tensors()
    return {name: (dtype, shape) for name, dtype, shape in joined}
