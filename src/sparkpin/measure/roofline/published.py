"""Speeds that others published of one Spark, or two, and the ceiling of each. Repositories need not be at hand.

docs/published.md has the same rows for people, which a test compares; `invoke roofline --published` shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.checkpoint.shapes import Shapes, load_shapes
from sparkpin.core.errors import WHOLE, ManifestError
from sparkpin.core.paths import project_folder
from sparkpin.measure.roofline.reads import DecodeModel, Link, Roofline, model_of, roofline
from sparkpin.serve.memory.geometry import read_geometry
from sparkpin.serve.memory.settings import read_settings
from sparkpin.serve.memory.weights import Loading

MODEL = "qwen3.5-122b-a10b"
REPO = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
ACCEPTED = 0.79
"""Published: about 80 % of two drafted tokens, 2.58 tokens a step."""
SHORT = 1000
"""Tokens in the cache, about, with the published prompts: beside the ceiling of more, their speeds say nothing."""


def mtp(tokens: int) -> tuple[str, ...]:
    return "--speculative-config", f'{{"method": "mtp", "num_speculative_tokens": {tokens}}}'


MTP1, MTP2, MTP3 = map(mtp, (1, 2, 3))
FP8_CACHE = ("--kv-cache-dtype", "fp8")


@dataclass(frozen=True, slots=True)
class Published:
    """accepted: share of the drafted tokens, as published, else the 122B's. context: tokens in the cache, about.

    above: why it may be faster than the ceiling. whole: False where drafts are of a model of its own, whose bytes
    nobody counts here, so that there is no ceiling. date: of the measurement, else of its publication.
    """

    stage: str  # of ours, "" for none that serves just that
    what: str
    tokens: float | None  # a second, one user; None where nobody published just that
    fp8: bool  # shared experts
    flags: tuple[str, ...]  # that decide the bytes of a step
    int8: bool  # LM head
    fp8_draft: bool = False  # the projections of the MTP layer
    repo: str = REPO
    accepted: float = ACCEPTED
    context: int = SHORT
    above: str = ""
    whole: bool = True
    served: str = "five prompts of 23 to 48 tokens, answers of 64 to 2,048"
    engine: str = "vLLM 0.19.1"
    date: str = "2026-04"
    source: str = "https://github.com/albond/DGX_Spark_Qwen3.5-122B-A10B-AR-INT4"

    @property
    def format(self) -> str:
        kind = next(kind for kind in ("INT4", "NVFP4", "FP8") if kind in self.repo.upper())
        return f"{kind}{' + FP8' if self.fp8 else ''}{', INT8 head' if self.int8 else ''}"

    @property
    def nodes(self) -> int:
        return int(self.flags[self.flags.index("-tp") + 1]) if "-tp" in self.flags else 1


CHAIN = (
    Published("base", "AutoRound INT4", 28.3, False, (), False),
    Published("hybrid", "+ FP8 shared experts", 30.8, True, (), False),
    Published("mtp", "+ MTP, 2 drafts", None, True, MTP2, False),
    Published("v2", "+ INT8 LM head", 51.6, True, MTP2, True, date="2026-05-09"),
    Published("v2-tq", "+ 4-bit K and V", 39.0, True, (*MTP2, "--kv-cache-dtype", "turboquant_4bit_nc"), True),
)
FORUM = "https://forums.developer.nvidia.com/t/365639"
CARDS = "https://github.com/jtchilders-ai-assistant/warpcore-benchmarks"
SWEEP = "512 tokens in, 256 out, one request at a time"
ATLAS = "https://github.com/0xBakeer/inference-atlas/pull/159"
Q36_FP8, NVFP4 = "Qwen/Qwen3.6-35B-A3B-FP8", "nvidia/Qwen3.6-35B-A3B-NVFP4"
DFLASH = "https://llmrequirements.com/news/2026-06-30-dgx-spark-122b-dflash-speculative-decoding"
CHILD = "vLLM 0.29.1rc1"
OTHERS = (
    Published("", "+ FP8 shared experts, MTP, 1 draft", 38.4, True, MTP1, False, accepted=0.95, source=FORUM),
    Published("", "AutoRound INT4, MTP, 1 draft", 36.5, False, MTP1, False, accepted=0.95, source=FORUM),
    Published("", "the same on two Sparks, by Ray", 56.0, False, (*MTP1, "-tp", "2"), False, accepted=1.0,
              served="chats; \"up to\", 85 to 100 % accepted", engine="vLLM 0.18", source=FORUM),
    Published("base", "AutoRound INT4 3045d02b, another owner", 27.18, False, (), False, served=SWEEP, engine=CHILD,
              date="2026-09-24", source=CARDS),
    Published("v2", "the v2 image, another owner", 52.0, True, MTP2, True, served="not told; \"about\"",
              date="2026-06-20", source="https://github.com/prism-hu/llens"),
    Published("v2", "all of v2 for the 35B", 112.0, True, MTP2, True, repo="Intel/Qwen3.5-35B-A3B-int4-AutoRound"),
    Published("", "dense 27B, AutoRound INT4", 13.3, False, (), False, repo="Intel/Qwen3.5-27B-int4-AutoRound",
              date="2026-04-26"),
    Published("", "DFlash, 5 drafts", 43.4, True, (), True, whole=False, engine="vLLM 0.20.1", date="2026-04-27"),
    Published("", "DFlash, 12 drafts", 59.0, True, (), True, whole=False, served="general decoding, one user",
              engine="vLLM 0.23", date="2026-06-24", source=DFLASH),
    Published("", "FP8", 47.5, False, FP8_CACHE, False, repo=Q36_FP8, served=SWEEP, engine="vLLM 0.17.1rc1",
              date="2026-08-01", source=CARDS),
    Published("", "FP8, MTP, 2 drafts", 58.6, False, (*MTP2, *FP8_CACHE), False, repo=Q36_FP8, engine="vLLM 0.26.1",
              served="256 tokens in, 256 out", date="2026-08-31", source=ATLAS),
    Published("", "NVFP4, MTP, 2 drafts", 89.7, False, (*MTP2, *FP8_CACHE), False, repo=NVFP4, engine="vLLM 0.26.1",
              served="256 tokens in, 256 out", date="2026-08-31", source=ATLAS.partition("/pull")[0]),
    Published("", "NVFP4, MTP, 3 drafts", 97.7, False, (*MTP3, *FP8_CACHE), False, repo=NVFP4, context=8200,
              served="8K tokens in, 256 out", engine="vLLM 0.28.0", date="2026-08-31",
              source="https://github.com/vllm-project/recipes/pull/918"),
)  # fmt: skip
FIGURES = (*CHAIN, *OTHERS)


def model_published(figure: Published) -> DecodeModel:
    geometry = read_geometry(shapes_of(figure.repo).config, "the published shapes")
    argv = ["vllm", "serve", "/model", *figure.flags]
    settings = read_settings(argv, {}, geometry, "cuda", vllm=(0, 33), wide_state=False, origin="a published figure")
    loading = Loading(
        draft=settings.draft_layers > 0,
        vision=True,
        int8_head=figure.int8,
        widened=False,
        draft_rows=settings.draft_rows,
        draft_bits=settings.draft_bits,
        ranks=settings.ranks,
        kv_heads=geometry.kv_heads,
    )
    found = tensors(figure.repo, fp8=figure.fp8, fp8_draft=figure.fp8_draft)
    return model_of(found, geometry, settings, loading, symmetric=True)


def ceiling_of(figure: Published, bandwidth: float, link: Link) -> tuple[Roofline, Roofline] | None:
    """With uniform routing, and as if all tokens of a step reached the same experts; None where its bytes are not
    known. bandwidth: bytes a second."""
    if not figure.whole:
        return None
    model = model_published(figure)
    made, same = (
        roofline(model, context=figure.context, bandwidth=bandwidth, accepted=figure.accepted, link=link,
                 same_experts=same)
        for same in (False, True)
    )  # fmt: skip
    return made, same


def tensors(repo: str = REPO, *, fp8: bool = False, fp8_draft: bool = False) -> Iterator[TensorInfo]:
    """Of all tensors, a layer's experts as one; only names' kinds and bytes matter."""
    found, donor = joined(shapes_of(repo)), dict[str, tuple[str, tuple[int, ...]]]()
    if fp8 or fp8_draft:
        donor = joined(shapes_of(repo.replace("Intel/", "Qwen/").replace("-int4-AutoRound", "-FP8")))
    found |= {name: spec for name, spec in donor.items() if ".shared_expert." in name and "mtp." not in name and fp8}
    found |= {name: spec for name, spec in donor.items() if name.startswith("mtp.") and fp8_draft}
    for name, (dtype, size) in found.items():
        yield TensorInfo(name, dtype, size, 0, tensor_nbytes(dtype, size))


def shapes_of(repo: str) -> Shapes:
    if found := load_shapes(project_folder(), repo):
        return found
    raise ManifestError(f"pins/shapes/{repo}.json", WHOLE, "no file", "the shapes of a published figure")


def joined(shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The experts of a layer as one tensor, for sums."""
    experts = shapes.numbers.get("expert")
    patterns = {
        pattern.replace("{expert}.", ""): (dtype, (experts, *shape) if "{expert}" in pattern else shape)
        for pattern, (dtype, shape) in shapes.tensors.items()
    }
    tensors = shapes.model_copy(update={"tensors": patterns}).all_tensors()
    return {name: (dtype, shape) for name, dtype, shape in tensors}


GEOMETRY = read_geometry(shapes_of(REPO).config, "the published shapes")
