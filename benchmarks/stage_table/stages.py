"""What is measured: the chain's stages as settings of one vLLM, and the points of the table. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ACCEPTED = 2.58
"""Tokens a step with two drafted tokens, as published; imposed, because random weights accept none."""

CONTEXTS = (1024, 32768, 131072)
BATCHES = (1, 8, 16)
MODS = ("HYBRID_INT4_FP8", "INT8_LM_HEAD", "TURBOQUANT", "DRAFT_VOCABULARY")
SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 2}
EAGER = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
COMPILED = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
GRAPHS = [1, 3, 8, 16, 24, 48]
"""Tokens in a decode step of the scripted model."""


@dataclass(frozen=True)
class Stage:
    """shape, scripted: folders of the random model and of the scripted one; mods: those that are on.

    more, speculative: arguments of vllm.LLM, and of its speculative_config, that others do not have. accepted: tokens a
    step, imposed; drafted: how many are drafted.
    """

    name: str
    what: str
    shape: str
    scripted: str
    mods: tuple[str, ...] = ()
    drafts: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    accepted: float = ACCEPTED
    drafted: int = 2

    @property
    def speculation(self) -> dict[str, Any]:
        """speculative_config of the random model."""
        imposed = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": self.accepted}
        return SPECULATIVE | imposed | {"num_speculative_tokens": self.drafted} | self.speculative

    @property
    def graphs(self) -> list[int]:
        """Tokens in a decode step of 1, 8 and 16 sequences, without and with drafted tokens."""
        return sorted({batch * more for batch in BATCHES for more in (1, 1 + self.drafted)})

    @property
    def environment(self) -> dict[str, str]:
        return {f"SPARKPIN_MOD_{mod}": str(int(mod in self.mods)) for mod in MODS}


HYBRID, HEAD, CACHE, LIST = MODS
TRITON = {"attention_backend": "TRITON_ATTN"}
TURBOQUANT = {"kv_cache_dtype": "turboquant_4bit_nc"}
PEERS = {"fp8": "fp8", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}
"""vLLM's own kinds of K and V that run on an H200 with Triton's attention."""

STATES = {"mamba_ssm_cache_dtype": "float16"}
LISTED = {"additional_config": {"draft_vocabulary": {"first": 65536}}}
FOUR_BITS = {"additional_config": {"draft_head": {"bits": 4}}}
BOTH = {"additional_config": FOUR_BITS["additional_config"] | LISTED["additional_config"]}
OWN_HEAD = {"use_local_argmax_reduction": True}
DFLASH = {"method": "dflash", "model": "drafter", "attention_backend": "FLASH_ATTN"}
"""z-lab's drafter in its true shape. Tokens a step of prose, as published: 2.3 with 12 drafted ones."""
PROSE = 2.3
STAGES = {
    stage.name: stage
    for stage in (
        Stage("base", "INT4, shared experts and head in BF16", "int4", "base"),
        Stage("hybrid", "+ shared experts in FP8", "fp8", "mtp", (HYBRID,)),
        Stage("mtp", "+ 2 drafted tokens", "fp8", "mtp", (HYBRID,), True),
        Stage("v2", "+ LM head in INT8", "fp8", "mtp", (HYBRID, HEAD), True),
        Stage("v2-tq", "+ 4-bit K and V", "fp8", "mtp", (HYBRID, HEAD, CACHE), True, TURBOQUANT),
        Stage(
            "v3", "+ MTP layer in FP8, its drafts from a 4-bit head, GDN states in float16", "fp8-draft", "mtp",
            (HYBRID, HEAD, CACHE, LIST), True, TURBOQUANT | STATES | FOUR_BITS, OWN_HEAD,
        ),
        Stage(
            "v2-vocab", "v2 + drafts from the first 65,536 tokens", "fp8", "mtp", (HYBRID, HEAD, LIST), True, LISTED,
            OWN_HEAD,
        ),
        Stage(
            "v2-draft", "v2 + MTP layer in FP8", "fp8-draft", "mtp", (HYBRID, HEAD), True,
        ),
        Stage(
            "v2-state", "v2 + GDN states in float16", "fp8", "mtp", (HYBRID, HEAD), True,
            STATES,
        ),
        Stage(
            "v3-vocab", "v3, its drafts from the first 65,536 tokens", "fp8-draft", "mtp", (HYBRID, HEAD, CACHE, LIST),
            True, TURBOQUANT | STATES | BOTH, OWN_HEAD,
        ),
        *(
            Stage(
                f"v2-drafter{name}", f"LM head in INT8, {drafted} tokens of a DFlash drafter{what}", "fp8", "mtp",
                (HYBRID, HEAD, *mods), True, more, DFLASH | speculative, PROSE, drafted,
            )
            for name, what, drafted, mods, more, speculative in (
                ("", "", 12, (), {}, {}),
                ("-states", ", GDN states in float16", 12, (), STATES, {}),
                ("-fp8", " in FP8, GDN states in float16", 12, (), STATES, {"quantization": "fp8"}),
                ("-7", "", 7, (), {}, {}),
                ("-7-states", ", GDN states in float16", 7, (), STATES, {}),
            )
        ),
        Stage("v2-triton", "v2 with Triton's attention", "fp8", "mtp", (HYBRID, HEAD), True, TRITON),
        *(
            Stage(
                f"v2-{short}", f"v2 + K and V: vLLM's {kind}", "fp8", "mtp", (HYBRID, HEAD), True,
                TRITON | {"kv_cache_dtype": kind},
            )
            for short, kind in PEERS.items()
        ),
    )
}  # fmt: skip
CHAIN = ("base", "hybrid", "mtp", "v2", "v2-tq")
CHECKED = (*CHAIN, "v2-vocab")
"""Whose answers are checked, each against the one before."""


def arguments(stage: Stage, *, compiled: bool = True) -> dict[str, Any]:
    """For vllm.LLM with the random model of full shape: room for 16 sequences of 128K in BF16."""
    speculative = {"speculative_config": stage.speculation} if stage.drafts else {}
    return {
        "model": stage.shape,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 131072 + 2048,
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 57 << 30,
        "gpu_memory_utilization": 0.95,
        "enable_prefix_caching": False,
        "gdn_prefill_backend": "triton",
        "compilation_config": (COMPILED if compiled else EAGER) | {"cudagraph_capture_sizes": stage.graphs},
        "kv_transfer_config": {
            "kv_connector": "FilledCache", "kv_connector_module_path": "filled", "kv_role": "kv_both",
        },
        "seed": 0,
        **speculative,
        **stage.more,
    }  # fmt: skip


LONGEST = 4
"""Drafted tokens at most, of those that are compared."""


def lengths(stage: Stage) -> dict[str, Any]:
    """More arguments for a server that drafts 0 to LONGEST tokens. By users, so that there are graphs of each number;
    while it runs one number is set for all (`Measured.lengths`)."""
    by_users = [(1 + at, 1 + at, LONGEST - at) for at in range(LONGEST)] + [(1 + LONGEST, max(BATCHES), 0)]
    drafts = {"num_speculative_tokens": LONGEST, "num_speculative_tokens_per_batch_size": by_users}
    sizes = sorted({batch * (1 + drafted) for batch in BATCHES for drafted in range(LONGEST + 1)})
    return {
        "speculative_config": stage.speculation | drafts,
        "compilation_config": COMPILED | {"cudagraph_capture_sizes": sizes},
    }


def conversation(match: int | None) -> dict[str, Any]:
    """More arguments for turns of a conversation: a prefix cache, which matches whole blocks or `match` tokens.

    Without the connector that fills the cache: what comes from outside is taken in whole blocks.
    """
    return {"enable_prefix_caching": True, "kv_transfer_config": None, "prefix_match_unit": match}


def scripted_checkpoints() -> dict[str, tuple[str, ...]]:
    """Folders, and the steps that make them of the scripted model's repositories."""
    return {"scripted-base": ("copy",), "scripted-mtp": ("copy", "hybrid", "mtp")}


def scripted_arguments(stage: Stage) -> dict[str, Any]:
    """For vllm.LLM with the scripted model, whose drafts are right by themselves.

    Its vocabulary is smaller than a list of 65,536: with a shorter one most of what it says is never drafted.
    """
    listed = {"additional_config": {"draft_vocabulary": {"first": 300}}} if LISTED.items() <= stage.more.items() else {}
    return {
        "model": f"scripted-{stage.scripted}",
        "max_model_len": 40960,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": True,
        "gdn_prefill_backend": "triton",
        "compilation_config": EAGER | {"cudagraph_capture_sizes": GRAPHS},
        "seed": 0,
        **({"speculative_config": SPECULATIVE | stage.speculative} if stage.drafts else {}),
        **stage.more,
        **listed,
    }
