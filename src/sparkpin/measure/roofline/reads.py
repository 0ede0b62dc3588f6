"""The bytes of one decode step of one sequence, from headers, config and flags. Pure: data in, data out.

A step checks `1 + drafted` tokens at once and then drafts as many anew. docs/roofline.md has the rules in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.serve.memory.cache import Cache, lay_out, slot_bytes
from sparkpin.serve.memory.geometry import Geometry
from sparkpin.serve.memory.settings import Settings
from sparkpin.serve.memory.weights import DRAFTER, HEAD, KINDS, MTP, VISION, Loading, held_bytes, kind_of, parts_of

NUMBER = re.compile(r"\.experts\.(\d+)\.")
EMBEDDINGS = "embeddings"
LONGEST = 16  # tokens in a draft, of those that `best_drafts` compares


@dataclass(frozen=True, slots=True)
class WeightReads:
    """Bytes of one kind of a checkpoint's weights, in the server's memory."""

    kind: str
    dense: int  # read by every pass
    experts: int  # all routed experts of all layers, of which a pass reads some


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """What a step's bytes follow from."""

    weights: tuple[WeightReads, ...]
    experts: int  # routed ones in a layer, 0 where there are none
    active: int
    cache: Cache
    attention: int
    linear: int
    drafted: int
    draft_layers: int
    draft_share: float = 1.0  # of the LM head's rows, what a draft reads
    draft_bits: int = 8  # of a weight in what a draft reads, where the head has 8
    ranks: int = 1  # tensor-parallel; all bytes are those of one
    hidden: int = 0
    vocabulary: int = 0
    draft_passes: int = 0  # of a second model
    shares_head: bool = False  # the second model with the first
    # bytes of a token in the second model's layers, tokens that they see
    draft_caches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """Between nodes. latency: seconds of one collective, whatever its size; bandwidth: bytes a second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Read:
    """`size` bytes go over the bus `times` times in a step; times need not be whole."""

    what: str
    size: float
    times: float
    note: str = ""

    @property
    def bytes(self) -> float:
        return self.size * self.times


@dataclass(frozen=True, slots=True)
class Roofline:
    reads: tuple[Read, ...]
    drafted: int
    context: int
    bandwidth: float  # bytes a second
    accepted: float  # share of the drafted tokens that the model accepts
    link_seconds: float = 0.0  # of a step, between nodes
    users: int = 1

    @property
    def step_bytes(self) -> float:
        return sum(read.bytes for read in self.reads)

    @property
    def step_seconds(self) -> float:
        return self.step_bytes / self.bandwidth + self.link_seconds

    @property
    def step_tokens(self) -> float:
        """The token that the model itself adds for each user, and the accepted ones."""
        return self.users * (1 + self.drafted * self.accepted)

    @property
    def ceiling(self) -> float:
        """Tokens a second."""
        return self.step_tokens / self.step_seconds

    def fraction(self, measured: float) -> float:
        return measured / self.ceiling

    def implied(self, measured: float) -> float:
        """The bandwidth, in bytes a second, at which `measured` tokens a second would be the ceiling."""
        left = self.step_tokens / measured - self.link_seconds
        return self.step_bytes / left if left > 0 else math.inf


def distinct(experts: int, active: int, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens are expected to reach.

    Uniform, independent routing: a token misses a given expert with probability 1 - active / experts, all of them with
    that to the power of `tokens`.
    """
    return experts * (1 - (1 - active / experts) ** tokens) if experts else 0.0


def accepted_share(chance: float, drafted: int) -> float:
    """Of all drafted tokens, those accepted, where each is with `chance` if the ones before it were: a step has
    1 + chance + chance^2 + ... tokens."""
    return sum(chance**place for place in range(1, drafted + 1)) / drafted if drafted else 0.0


def chance_of(share: float, drafted: int) -> float:
    """What `accepted_share` makes `share` of, to 1e-9."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_share(middle, drafted) < share else (low, middle)
    return high


def model_of(
    tensors: Iterable[TensorInfo], geometry: Geometry, settings: Settings, loading: Loading, *, symmetric: bool
) -> DecodeModel:
    """symmetric: the INT4 codes have no zero points of their own, so that kernels leave `qzeros` unread."""
    dense, routed = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    experts, has_head = 0, False
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
            has_head |= info.name.endswith("/lm_head.weight")
            continue
        routed[kind] += size
        found = NUMBER.search(info.name)
        experts = max(experts, int(found[1]) + 1 if found else info.shape[0])  # one tensor may hold all of a layer
    if not dense[HEAD]:
        dense[HEAD] = dense[EMBEDDINGS]  # tied: the head is the embedding matrix
    dense[EMBEDDINGS] = 0  # a row for each token
    dense[VISION] = routed[VISION] = 0  # read with an image, not by decode
    return DecodeModel(
        weights=tuple(WeightReads(kind, dense[kind], routed[kind]) for kind in KINDS if dense[kind] or routed[kind]),
        experts=experts,
        active=min(geometry.experts_per_token, experts),
        cache=lay_out(geometry, settings),
        attention=geometry.attention,
        linear=geometry.linear,
        drafted=settings.draft_tokens,
        draft_layers=settings.draft_layers,
        draft_share=min(1.0, (loading.draft_rows or geometry.vocabulary) / geometry.vocabulary),
        draft_bits=8 if loading.widened or not loading.draft_rows else loading.draft_bits,
        ranks=settings.ranks,
        hidden=geometry.hidden,
        vocabulary=geometry.vocabulary,
        draft_passes=settings.draft_passes,
        shares_head=settings.drafter is not None and not has_head,
        draft_caches=tuple(draft_caches(settings)),
    )


def with_drafts(model: DecodeModel, drafted: int) -> DecodeModel:
    """Drafting less than its flags allow. vLLM 0.33 runs a drafter once for a step without drafts, too, so that its
    cache has no gaps."""
    return replace(model, drafted=drafted, draft_passes=min(model.draft_passes, max(1, drafted)))


def draft_caches(settings: Settings) -> Iterable[tuple[int, int]]:
    if (drafter := settings.drafter) is None:
        return
    slot = drafter.shard(settings.ranks).kv_heads * slot_bytes(settings.cache_dtype, drafter.head_dim)
    for layers, window in ((drafter.attention - drafter.sliding, 0), (drafter.sliding, drafter.window)):
        if layers:
            yield slot * layers, window


def collectives(model: DecodeModel) -> list[tuple[int, float]]:
    """(times, bytes over a node's link) of what tensor-parallel ranks exchange in a step of one user, in 16 bits.

    vLLM 0.33: each layer sums its attention's and its experts' outputs, the embedding its rows; the LM head's parts of
    the logits are gathered. A draft does so, too, and gathers the output of `mtp.fc`. A ring's all-reduce sends
    2 (n - 1) / n of what it sums, gathering half as much.
    """
    if model.ranks == 1:
        return []
    checked, share = 1 + model.drafted, (model.ranks - 1) / model.ranks
    sums, logits = 2 * share * 2 * model.hidden, share * 2 * model.vocabulary
    passes = [(2 * (model.attention + model.linear) + 1, checked * sums), (1, checked * logits)]
    if model.draft_layers:
        drafts = max(1, model.drafted)
        passes += [(drafts * (2 * model.draft_layers + 1), sums), (drafts, sums / 2)]
        passes.append((model.drafted, logits * model.draft_share))
    return passes


def link_seconds(model: DecodeModel, link: Link, users: int = 1) -> float:
    return sum(times * (link.latency + users * size / link.bandwidth) for times, size in collectives(model))


def pipelined(one: Roofline, model: DecodeModel, nodes: int, link: Link) -> Roofline:
    """One user's step over parts of the layers, one after another: all bytes of one machine, and what is handed on."""
    size = (1 + model.drafted) * 2 * model.hidden
    return replace(one, link_seconds=(nodes - 1) * (link.latency + size / link.bandwidth))


def roofline(
    model: DecodeModel,
    *,
    context: int,
    bandwidth: float,
    accepted: float,
    same_experts: bool = False,
    link: Link | None = None,
    users: int = 1,
) -> Roofline:
    """context: tokens in the cache of each of the users. same_experts: all tokens of a user reach the experts that one
    of them reaches, the other end of what routing can do; otherwise they are uniform and independent.
    """
    tokens = users if same_experts else users * (1 + model.drafted)
    reads = tuple(reads_of(model, context, tokens, users, users=users))
    seconds = link_seconds(model, link, users) if link else 0.0
    return Roofline(reads, model.drafted, context, bandwidth, accepted, seconds, users)


def best_drafts(
    model: DecodeModel,
    chance: float,
    *,
    context: int,
    bandwidth: float,
    users: int,
    same_experts: bool = False,
    link: Link | None = None,
) -> Roofline:
    """With the draft length of 0 to LONGEST tokens whose ceiling is highest, of a model with an MTP layer; the shortest
    of equals. chance: see `accepted_share`; the others: see `roofline`."""
    lengths = (
        roofline(
            replace(model, drafted=drafted),
            context=context,
            bandwidth=bandwidth,
            accepted=accepted_share(chance, drafted),
            same_experts=same_experts,
            link=link,
            users=users,
        )
        for drafted in range(LONGEST + 1)
    )
    return max(lengths, key=lambda one: one.ceiling)


def reads_of(model: DecodeModel, context: int, routed_tokens: int, routed_drafts: int, *, users: int) -> Iterable[Read]:
    """routed_tokens: those that choose experts on their own in the pass that checks `1 + drafted` tokens of each user;
    routed_drafts: in a pass that drafts one more.
    """
    drafted, experts = model.drafted, model.experts
    reached = distinct(experts, model.active, routed_tokens)
    for row in model.weights:
        if row.kind == MTP:
            yield from drafting(model, row, reached, distinct(experts, model.active, routed_drafts))
            continue
        if row.kind == DRAFTER:
            once = "all tokens of a draft at once" if model.draft_passes == 1 else "once a draft"
            yield Read(DRAFTER, row.dense, model.draft_passes, once)
            continue
        if row.kind == HEAD and (model.draft_share < 1 or model.draft_bits < 8):
            yield Read(HEAD, row.dense, 1, "once to check")
            name = "LM head" + ", listed rows" * (model.draft_share < 1) + ", 4 bits" * (model.draft_bits < 8)
            yield Read(name, row.dense * model.draft_share * model.draft_bits / 8, drafted, "once a draft")
        elif row.dense:
            drafting_passes = drafted if model.draft_layers else min(drafted, model.draft_passes) * model.shares_head
            passes = drafting_passes * (row.kind == HEAD)
            yield Read(row.kind, row.dense, 1 + passes, "once to check, once a pass that drafts" if passes else "")
        if row.experts:
            yield Read(row.kind, row.experts / experts, reached, f"of {experts} a layer, {1 + drafted} tokens")
    cache = model.cache
    if model.linear:
        note = f"read once, written {1 + drafted}x"
        yield Read("GDN states", cache.state_bytes * model.linear * users, 2 + drafted, note)
    if context:
        yield Read("KV cache", cache.slot_bytes * model.attention * users, context, cache.cache_dtype)
        if model.draft_layers:
            size, seen = cache.slot_bytes * model.draft_layers * users, context * max(1, drafted)
            yield Read("KV cache of the MTP layer", size, seen, "a draft")
        for size, window in model.draft_caches:
            seen = min(context, window or context)
            yield Read(
                "KV cache of the drafter", size * users, seen * model.draft_passes, f"the last {seen:,} tokens a pass"
            )


def drafting(model: DecodeModel, row: WeightReads, reached: float, one_each: float) -> Iterable[Read]:
    """The MTP layer's passes. The first takes all tokens that were checked, the others one of each user. vLLM 0.33
    makes the first for a step that drafts nothing, too, so that the layer's cache has no gaps."""
    if not model.draft_layers:
        return
    passes = max(1, model.drafted)
    yield Read(MTP, row.dense, passes, "once a draft")
    if row.experts:
        times = reached + (passes - 1) * one_each
        yield Read("MTP experts", row.experts / model.experts, times, f"first draft {reached:.1f} of {model.experts}")
