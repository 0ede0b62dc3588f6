"""The bytes that a decode step of one request reads, and the speed that they allow. Pure: data in, data out.

A step checks `1 + drafted` tokens at once and then drafts as many again. docs/memory.md has the rules in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.serve.memory.cache import Cache, lay_out, slot_bytes
from sparkpin.serve.memory.geometry import Geometry
from sparkpin.serve.memory.settings import Settings
from sparkpin.serve.memory.weights import DRAFTER, HEAD, KINDS, MTP, VISION, Loading, held_bytes, kind_of, parts_of

NUMBER = re.compile(r"\.experts\.(\d+)\.")
EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Read:
    """`size` bytes are read `times` times in a step; times need not be whole."""

    what: str
    size: float
    times: float
    note: str = ""

    @property
    def bytes(self) -> float:
        return self.size * self.times


@dataclass(frozen=True, slots=True)
class DecodeStep:
    reads: tuple[Read, ...]
    drafted: int

    @property
    def bytes(self) -> float:
        return sum(read.bytes for read in self.reads)

    def ceiling(self, bandwidth: float, accepted: float = 0.0) -> float:
        """Tokens a second: the token that the model itself adds to each step, and the accepted share of the drafts.
        bandwidth: bytes a second."""
        return (1 + self.drafted * accepted) * bandwidth / self.bytes


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """What a step's bytes follow from, of one of the tensor-parallel ranks.

    dense: bytes of each kind of weights that every pass reads; routed: of all its routed experts. experts: routed ones
    in a layer. shares_head: a second model drafts with the LM head of the first.
    """

    geometry: Geometry
    settings: Settings
    loading: Loading
    dense: Mapping[str, int]
    routed: Mapping[str, int]
    experts: int
    shares_head: bool

    def step(self, context: int, *, same_experts: bool = False) -> DecodeStep:
        """context: tokens in the cache. same_experts: all tokens of the step reach the experts that one of them
        reaches, the other end of what routing can do; otherwise they are uniform and independent."""
        tokens = 1 if same_experts else 1 + self.settings.draft_tokens
        reached = distinct(self.experts, self.active, tokens)
        reads = (*self.weight_reads(reached), *self.cache_reads(lay_out(self.geometry, self.settings), context))
        return DecodeStep(reads, self.settings.draft_tokens)

    @property
    def active(self) -> int:
        return min(self.geometry.experts_per_token, self.experts)

    def weight_reads(self, reached: float) -> Iterator[Read]:
        """reached: experts of a layer in the pass that checks."""
        drafted = self.settings.draft_tokens
        for kind in KINDS:
            dense, expert = self.dense[kind], self.routed[kind] / max(self.experts, 1)
            if kind == MTP:
                if dense:
                    yield Read(MTP, dense, drafted, "once a draft")
                if expert:  # its first pass takes all tokens that were checked, each other one a single token
                    yield Read("MTP experts", expert, reached + (drafted - 1) * self.active, "of all drafts")
            elif kind == HEAD:
                yield from self.head_reads()
            elif kind == DRAFTER and dense:
                once = "all tokens of a draft at once" if self.settings.draft_passes == 1 else "once a draft"
                yield Read(DRAFTER, dense, self.settings.draft_passes, once)
            else:
                if dense:
                    yield Read(kind, dense, 1)
                if expert:
                    yield Read(kind, expert, reached, f"{reached:.3g} of {self.experts} a layer, {1 + drafted} tokens")

    def head_reads(self) -> Iterator[Read]:
        """Once to check; then once a draft, of the rows and in the form that drafting has."""
        size, settings, rows = self.dense[HEAD], self.settings, self.loading.draft_rows
        passes = settings.draft_tokens if settings.draft_layers else settings.draft_passes * self.shares_head
        if not rows:
            yield Read(HEAD, size, 1 + passes, "once to check, once a pass that drafts" if passes else "")
            return
        share, bits = min(1.0, rows / self.geometry.vocabulary), 8 if self.loading.widened else self.loading.draft_bits
        yield Read(HEAD, size, 1, "once to check")
        yield Read("LM head to draft", size * share * bits / 8, passes, f"{rows:,} rows, once a draft")

    def cache_reads(self, cache: Cache, context: int) -> Iterator[Read]:
        settings, drafted = self.settings, self.settings.draft_tokens
        if self.geometry.linear:
            note = f"read once, written {1 + drafted} times"
            yield Read("GDN states", cache.state_bytes * self.geometry.linear, 2 + drafted, note)
        yield Read("KV cache", cache.slot_bytes * self.geometry.attention, context, f"{context:,} tokens")
        if settings.draft_layers:
            size = cache.slot_bytes * settings.draft_layers
            yield Read("KV cache of the MTP layer", size, context * drafted, "once a draft")
        if drafter := settings.drafter:
            slot = drafter.shard(settings.ranks).kv_heads * slot_bytes(settings.cache_dtype, drafter.head_dim)
            for layers, window in ((drafter.attention - drafter.sliding, context), (drafter.sliding, drafter.window)):
                if layers:
                    seen = min(context, window)
                    note = f"the last {seen:,} tokens a pass"
                    yield Read("KV cache of the drafter", slot * layers, seen * settings.draft_passes, note)


def distinct(experts: int, active: int, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens are expected to reach.

    Uniform, independent routing: a token misses a given expert with probability 1 - active / experts, all of them with
    that to the power of `tokens`.
    """
    return experts * (1 - (1 - active / experts) ** tokens) if experts else 0.0


def decode_model(
    tensors: Iterable[TensorInfo], geometry: Geometry, settings: Settings, loading: Loading, *, symmetric: bool
) -> DecodeModel:
    """symmetric: the INT4 codes have no zero points of their own, so that kernels leave `qzeros` unread."""
    dense, routed = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    experts, own_head = 0, False
    for info in tensors:
        kind = kind_of(info)
        if symmetric and info.name.endswith((".qzeros", ".g_idx")):
            continue
        size = -(-held_bytes(info, kind, loading) // parts_of(info, loading))
        if kind == DRAFTER and "embed_tokens" in info.name:
            continue
        # of a second model all experts, which is too much where it has some
        if ".experts." not in info.name or kind == DRAFTER:
            dense[kind] += size
            own_head |= info.name.endswith("/lm_head.weight")
            continue
        routed[kind] += size
        found = NUMBER.search(info.name)
        experts = max(experts, int(found[1]) + 1 if found else info.shape[0])  # one tensor may hold all of a layer
    dense[HEAD] = dense[HEAD] or dense[EMBEDDINGS]  # tied: the head is the embedding matrix
    dense[EMBEDDINGS] = 0  # a row for each token
    dense[VISION] = routed[VISION] = 0  # read with an image, not by decode
    shares_head = settings.drafter is not None and not own_head
    return DecodeModel(geometry, settings, loading, dense, routed, experts, shares_head)
