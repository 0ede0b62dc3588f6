"""The servers of all calls: what each one serves, with which flags. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

HYBRID, HEAD, CACHE, LIST = MODS = ("HYBRID_INT4_FP8", "INT8_LM_HEAD", "TURBOQUANT", "DRAFT_VOCABULARY")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 3, 4, 6, 8, 16, 24, 48]}
MTP = {"--speculative-config": json.dumps({"method": "mtp", "num_speculative_tokens": 2})}
LISTED = {
    "--speculative-config": json.dumps(
        {"method": "mtp", "num_speculative_tokens": 2, "use_local_argmax_reduction": True}
    ),
    "--additional-config": json.dumps({"draft_vocabulary": {"first": 1024}}),
}
BLOCKS = {"--block-size": "256"}  # a multiple of 32, which the smallest one for BF16 may not be
MATCH = {"--prefix-match-unit": "32"}
CHUNKS = {"--max-num-batched-tokens": "512"}  # prompts have 512 tokens and more
DENSE = {"--prefix-cache-retention-interval": "256"}  # states of all blocks stay, those that decoding wrote, too
STATES = {"--mamba-ssm-cache-dtype": "bfloat16"}  # as without the flag: the config has no mamba_ssm_dtype
FLOATS = {"--mamba-ssm-cache-dtype": "float32"}
HALVES = {"--mamba-ssm-cache-dtype": "float16"}
TRITON = {"--attention-backend": "TRITON_ATTN"}  # FlashAttention's FP8 kernels are not carried


def kv(name: str) -> dict[str, str]:
    return {"--kv-cache-dtype": name}


TQ = kv("turboquant_4bit_nc")
TQ_CHUNKS = {"--max-num-batched-tokens": "1280"}  # blocks have 640 tokens, and steps end at blocks


@dataclass(frozen=True)
class Setup:
    """weights: a folder of the models'; mods: those that are on; job: what is done with it; against: the setup that
    its figures are compared with, beside `reference`; mib: of its KV cache; more: environment."""

    name: str
    what: str
    weights: str
    mods: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    job: str = "ledger"
    against: str = "bf16"
    mib: int = 1024
    reference: str = "bf16"
    more: dict[str, str] = field(default_factory=dict)

    @property
    def crosses(self) -> bool:
        """Whether drafts are refused while a block is filled, so that turns must end just before a block does."""
        return self.job == "prove" and "--speculative-config" in self.flags

    @property
    def environment(self) -> dict[str, str]:
        return {f"SPARKPIN_MOD_{mod}": str(int(mod in self.mods)) for mod in MODS} | self.more


Mods = tuple[str, ...]


def prove(
    name: str, what: str, weights: str, mods: Mods, *flags: dict[str, str], job: str = "prove", against: str = "",
    **more: str,
) -> Setup:  # fmt: skip
    """A small cache, which is soon full. against: the server without drafts; more: environment."""
    merged = {key: value for one in flags for key, value in one.items()}
    return Setup(name, what, weights, mods, merged, job, against, mib=384, more=more)


RANDOM = (
    prove("r-control-mtp", "MTP-2, with planted faults", "random", (), MTP, job="control"),
    prove("r-control", "with planted faults", "random", (), job="control"),
    prove("r-mtp", "MTP-2", "random", (), MTP),
    prove("r-tq-mtp", "4-bit K and V, MTP-2", "random", (CACHE,), MTP, TQ),
    prove("r-mtp-match", "MTP-2, matches of 32", "random", (), MTP, BLOCKS, MATCH),
    prove("r-mtp-dense", "MTP-2, states of all blocks are kept", "random", (), MTP, BLOCKS, DENSE),
    prove("r-mtp-chunks", "MTP-2, steps of 512 tokens", "random", (), MTP, BLOCKS, CHUNKS),
    prove("r-match-chunks", "matches of 32, steps of 512", "random", (), BLOCKS, MATCH, CHUNKS),
    prove("r-tq", "4-bit K and V", "random", (CACHE,), TQ),
    prove("r-tq-mtp-match-chunks", "4-bit K and V, MTP-2, matches of 32, steps of 1280", "random", (CACHE,), MTP, TQ,
          MATCH, TQ_CHUNKS),
    prove("r-plain", "none of these", "random", ()),
)  # fmt: skip
"""Each pair of features meets. The next call repeats the main ones with trained weights."""

TRAINED = (
    prove("t-control-mtp", "MTP-2, with planted faults", "bf16", (), MTP, job="control"),
    prove("t-mtp", "BF16, MTP-2", "bf16", (), MTP),
    prove("t-mtp-dense", "BF16, MTP-2, states of all blocks are kept", "bf16", (), MTP, BLOCKS, DENSE),
    prove("t-v2-tq-mtp", "v2-tq: MTP-2, 4-bit K and V", "mtp", (HYBRID, HEAD, CACHE), MTP, TQ),
    prove("t-v2-mtp-chunks", "v2: MTP-2, steps of 512", "mtp", (HYBRID, HEAD), MTP, BLOCKS, CHUNKS),
    prove("t-v2-match", "v2 without MTP, matches of 32", "mtp", (HYBRID, HEAD), BLOCKS, MATCH),
    prove("t-v2-tq-match-chunks", "v2-tq without MTP, matches of 32, steps of 1280", "mtp", (HYBRID, HEAD, CACHE), TQ,
          MATCH, TQ_CHUNKS),
    prove("t-tq-mtp-match", "BF16, MTP-2, 4-bit K and V, matches of 32", "bf16", (CACHE,), MTP, TQ, MATCH),
)  # fmt: skip


def cached(name: str, kind: str, what: str, *, ours: bool = False, flags: dict[str, str] | None = None) -> Setup:
    return Setup(name, what, "bf16", (CACHE,) if ours else (), kv(kind) | (flags or {}))


CACHES = (
    cached("tq-4bit", "turboquant_4bit_nc", "K and V: our 4 bits", ours=True),
    cached("tq-k8v4", "turboquant_k8v4", "K and V: our k8v4", ours=True),
    cached("fp8-kv", "fp8", "K and V: FP8, Triton's attention", flags=TRITON),
    cached("own-4bit", "turboquant_4bit_nc", "K and V: vLLM's turboquant_4bit_nc"),
    cached("own-int4", "int4_per_token_head", "K and V: vLLM's int4_per_token_head", flags=TRITON),
    Setup("triton", "Triton's attention, K and V in BF16", "bf16", (), TRITON),
    cached("own-k8v4", "turboquant_k8v4", "K and V: vLLM's turboquant_k8v4"),
    cached("own-3bit", "turboquant_3bit_nc", "K and V: vLLM's turboquant_3bit_nc"),
    cached("own-int8", "int8_per_token_head", "K and V: vLLM's int8_per_token_head", flags=TRITON),
    cached("own-fp8", "fp8_per_token_head", "K and V: vLLM's fp8_per_token_head", flags=TRITON),
    cached("nvfp4", "nvfp4", "K and V: nvfp4"),
    cached("ultraquant", "ultraquant_4bit", "K and V: vLLM's ultraquant_4bit"),
    cached("octave", "octave_k3v4", "K and V: vLLM's octave_k3v4"),
)
V2, V2_TQ, V3 = (
    Setup("v2-mtp", "v2 with MTP-2, the drafter in BF16", "mtp", (HYBRID, HEAD), MTP, against="v2"),
    Setup("v2-tq", "v2-tq: + 4-bit K and V, MTP-2", "mtp", (HYBRID, HEAD, CACHE), MTP | TQ, against="v2-mtp"),
    Setup("v3", "v3: v2-tq, MTP layer in FP8, GDN states in float16", "draft", (HYBRID, HEAD, CACHE), MTP | TQ | HALVES,
          against="v2-tq"),
)  # fmt: skip
LEDGER = (
    Setup("bf16", "as trained, K and V in BF16", "bf16"),
    Setup("base", "INT4 weights", "base"),
    Setup("hybrid", "+ shared experts in FP8", "mtp", (HYBRID,), against="base"),
    Setup("v2", "+ LM head in INT8", "mtp", (HYBRID, HEAD), against="hybrid"),
    Setup("mtp", "BF16 with its drafter, MTP-2", "bf16", (), MTP),
    *CACHES[:5],
    V2,
    V2_TQ,
    Setup("head", "LM head in INT8 alone", "bf16", (HEAD,)),
    Setup("v2-draft", "v2 with MTP-2, the drafter in FP8", "draft", (HYBRID, HEAD), MTP, against="v2-mtp"),
    Setup("v2-list", "v2, drafts from 1,024 of 4,096 tokens", "mtp", (HYBRID, HEAD, LIST), LISTED, against="v2-mtp"),
    Setup("again", "as trained, a second server: noise", "bf16"),
    *CACHES[5:],
)
BOOTED = tuple(
    Setup(f"b-{one.name}", one.what, "random", one.mods, one.flags, job="boot") for one in (*CACHES, LEDGER[0])
)
"""In the first call, with random weights: does it start, and what does it say if not. It fills Triton's cache, too."""

UNITS = (
    prove("x-control-mtp", "MTP-2, with planted faults", "random", (), MTP, job="control"),
    prove("x-whole", "blocks of 256", "random", (), BLOCKS),
    prove("x-32", "matches of 32", "random", (), BLOCKS, MATCH),
    prove("x-64", "matches of 64", "random", (), BLOCKS, {"--prefix-match-unit": "64"}),
    prove("x-128", "matches of 128", "random", (), BLOCKS, {"--prefix-match-unit": "128"}),
    prove("x-mtp-64", "MTP-2, matches of 64", "random", (), BLOCKS, MTP, {"--prefix-match-unit": "64"}),
    prove("x-mtp-32", "MTP-2, matches of 32", "random", (), BLOCKS, MTP, MATCH),
    prove("x-mtp", "MTP-2, blocks of 256", "random", (), BLOCKS, MTP),
)
"""What of it is wrong: a hit inside a block. 229 s in all, with cold caches."""

DRAFTED = {
    "--speculative-config": json.dumps(
        {"method": "draft_model", "model": "/tmp/models/drafter", "num_speculative_tokens": 3}
    )
}
AGAIN = (
    LEDGER[0],
    *(one for one in CACHES if one.name in ("own-4bit", "own-k8v4", "own-3bit")),
    cached("own-k3v4", "turboquant_k3v4_nc", "K and V: vLLM's turboquant_k3v4_nc"),
    V3,
    V2_TQ,
    next(one for one in LEDGER if one.name == "v2"),
    V2,
    Setup("v2-draft4", "v2 with MTP-2, the drafter in INT4", "draft4", (HYBRID, HEAD), MTP, against="v2-mtp"),
    Setup("v2-draft", "v2 with MTP-2, the drafter in FP8", "draft", (HYBRID, HEAD), MTP, against="v2-mtp"),
    Setup("v2-state", "v2 with MTP-2, GDN states in BF16", "mtp", (HYBRID, HEAD), MTP | STATES, against="v2-mtp"),
    Setup("v2-float", "v2 with MTP-2, GDN states in float32", "mtp", (HYBRID, HEAD), MTP | FLOATS, against="v2-state"),
    Setup("float", "BF16, GDN states in float32", "bf16", (), FLOATS),
    CACHES[0],
    Setup("d-v1", "draft_model, scripted: drafts are right by construction", "drafted", (), DRAFTED, job="boot",
          more={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    Setup("d-own", "draft_model, scripted, vLLM's choice of runner", "drafted", (), DRAFTED, job="boot"),
    Setup("d-plain", "draft_model, scripted, no prefix cache", "drafted", (),
          DRAFTED | {"--no-enable-prefix-caching": ""}, job="boot"),
)  # fmt: skip
"""The fourth call: what needs FlashAttention 2, stage v3, a drafter in INT4, and a drafter of its own."""


def smol(name: str, what: str, *flags: dict[str, str], mods: tuple[str, ...] = ()) -> Setup:
    merged = {key: value for one in flags for key, value in one.items()}
    return Setup(name, what, "smollm2", mods, merged, against="s-bf16", reference="s-bf16", mib=2048)


SMOLLM2 = (
    smol("s-bf16", "as published, K and V in BF16"),
    smol("s-head", "LM head in INT8", mods=(HEAD,)),
    *(
        smol(f"s-{who}-{short}", f"K and V: {'our' if mods else 'own'} {kind}", kv(kind), mods=mods)
        for who, mods in (("tq", (CACHE,)), ("own", ()))
        for short, kind in (("4bit", "turboquant_4bit_nc"), ("k8v4", "turboquant_k8v4"))
    ),
    smol("s-triton", "Triton's attention, K and V in BF16", TRITON),
    smol("s-fp8", "K and V: FP8, Triton's attention", kv("fp8"), TRITON),
    smol("s-int4", "K and V: int4_per_token_head", kv("int4_per_token_head"), TRITON),
    smol("s-int8", "K and V: int8_per_token_head", kv("int8_per_token_head"), TRITON),
    smol("s-again", "a second server: noise"),
    smol("s-nvfp4", "K and V: nvfp4", kv("nvfp4")),
)  # fmt: skip
"""The fifth: SmolLM2-135M-Instruct."""

NGRAM = {
    "--speculative-config": json.dumps(
        {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    )
}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
DENSE_MODEL = (
    prove("i-dense", "dense", "dense", (), BLOCKS),
    prove("i-invariant", "dense, VLLM_BATCH_INVARIANT=1", "dense", (), BLOCKS, **INVARIANT),
    prove("i-drafts", "dense, drafts from the prompt", "dense", (), BLOCKS, NGRAM, against="i-dense"),
    prove("i-invariant-drafts", "dense, drafts from the prompt, VLLM_BATCH_INVARIANT=1", "dense", (), BLOCKS, NGRAM,
          against="i-invariant", **INVARIANT),
)  # fmt: skip
HARDER = (
    prove("h-mtp", "BF16, MTP-2", "bf16", (), MTP, BLOCKS, against="h-bf16"),
    prove("h-v2-mtp", "v2, MTP-2", "mtp", (HYBRID, HEAD), MTP, BLOCKS, against="h-v2"),
    prove("h-v2-tq-mtp", "v2-tq, MTP-2", "mtp", (HYBRID, HEAD, CACHE), MTP, TQ, against="h-v2-tq"),
    prove("h-v3", "v3: MTP layer in FP8, GDN states in float16", "draft", (HYBRID, HEAD, CACHE), MTP, TQ, HALVES,
          against="h-v3-serial"),
    prove("h-bf16", "BF16", "bf16", (), BLOCKS),
    prove("h-v2", "v2 without MTP", "mtp", (HYBRID, HEAD), BLOCKS),
    prove("h-v2-tq", "v2-tq without MTP", "mtp", (HYBRID, HEAD, CACHE), TQ),
    prove("h-v3-serial", "v3 without MTP", "draft", (HYBRID, HEAD, CACHE), TQ, HALVES),
)  # fmt: skip
"""drafted = serial = concurrent = resumed? Of a dense model bit by bit, where vLLM's kernels promise that; of ours
within the noise. And the stages' figures again, with what their intervals are made of."""
NAMED = ("bf16", "mtp", "base", "hybrid", "v2", "v2-mtp", "v2-tq")
STAGES = (*(one for one in LEDGER if one.name in NAMED), V3)

CALLS = {"1": (*RANDOM, *BOOTED), "3": UNITS, "2": (*LEDGER[:10], *TRAINED, *LEDGER[10:]), "4": AGAIN, "5": SMOLLM2,
         "6": (RANDOM[0], *DENSE_MODEL), "7": (TRAINED[0], *HARDER, *STAGES)}  # fmt: skip
BY_NAME = {setup.name: setup for setups in CALLS.values() for setup in setups}
