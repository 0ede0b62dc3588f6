"""The flags of `vllm serve` and the environment that decide its memory, with vLLM's defaults for what is not given.

Defaults: vllm/engine/arg_utils.py (`get_batch_defaults`), vllm/config/cache.py; numbers such as `32k` and `32K`:
vllm/utils/argparse_utils.py; VLLM_CPU_KVCACHE_SPACE: vllm/platforms/cpu.py. Read in 0.32, and the same in 0.33 but for
`Settings.checkpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparkpin.core.errors import ManifestError
from sparkpin.memory.geometry import DTYPE_BYTES, RULES, Geometry
from sparkpin.pins.nodes import TENSOR
from sparkpin.pins.vllm_command import CPU_SPACE, KV_BYTES
from sparkpin.pins.vllm_flags import AUTO, NEXT, SPECULATION, Flags

Platform = Literal["cpu", "cuda"]
GIB = 1 << 30
PACKED: Mapping[str, Sequence[int]] = RULES["packed_bits"]
# Bits of a cached key's and of a value's component.
PLAIN = {name: (8 * size, 8 * size) for name, size in DTYPE_BYTES.items()}
CACHE_BITS: Mapping[str, Sequence[int]] = {**PLAIN, **dict.fromkeys(RULES["fp8"], (8, 8)), **PACKED}
LONG, ADDITIONAL = "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "--additional-config"


@dataclass(frozen=True, slots=True)
class Settings:
    """max_model_len: AUTO where vLLM shall find the longest that fits. cache_dtype: vLLM's word, never `auto`:
    of the flag, else of the checkpoint, else of the activations.

    in_flight: tokens that are scheduled and not done, at most. draft_tokens: per step, 0 without speculation;
    draft_layers: attention layers of the drafter; draft_rows: of the LM head that the mod draft-vocabulary copies for
    it, 0 for none; draft_bits: of a weight in them, where the head has 8. drafter: a second model that drafts;
    draft_passes: of it, in a step. int8_head: the mod int8-lm-head quantises the LM head.
    checkpoints: a prefill stores a state on its way for prefix caching, in blocks of a multiple of 64 tokens.
    block_size: None where nobody asks for one. kv_bytes: an explicit size of the KV pool, instead of what `utilization`
    leaves; kv_from: the setting that gives it, and its file. loader: of --load-format. longer: whether max_model_len
    may be more than the model's positions. unread: flags whose share of the memory is not known. ranks:
    tensor-parallel; all sizes are of one of them.
    """

    platform: Platform
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    in_flight: int
    utilization: float
    cache_dtype: str
    dtype: str
    ssm_dtype: str
    block_size: int | None
    drafter: Geometry | None
    prefix_caching: bool
    checkpoints: bool
    eager: bool
    kv_bytes: int | None
    kv_from: str
    ranks: int
    int8_head: bool
    text_only: bool
    loader: str
    longer: bool
    unread: tuple[str, ...]
    draft_tokens: int = 0
    draft_layers: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    draft_bits: int = 8


def read_settings(
    flags: Flags,
    env: Mapping[str, str],
    platform: Platform,
    geometry: Geometry,
    *,
    wide_state: bool = False,
    drafter: Geometry | None = None,
    mods: Collection[str] = (),
) -> Settings:
    """wide_state: the CPU has AVX512-BF16. drafter: the recipe's second model. mods: of its stages.

    Raises ManifestError for a value that is not what the flag takes, and for flags that change the caches in a way that
    this plan does not know.
    """
    flags.refuse(**RULES["refused"])
    ranks, cuda = flags.number(TENSOR) or 1, platform == "cuda"
    if size := geometry.undivided(ranks):
        raise ManifestError(flags.origin(TENSOR), TENSOR, ranks, f"a divisor of the model's {size}", next_step=NEXT)
    kv_bytes, kv_from = pool_bytes(flags, env, platform)
    drafts, other = drafting(flags, geometry, drafter), flags.json(ADDITIONAL)
    rows = draft_rows(other, geometry, cuda=cuda)
    if drafts.get("draft_layers") and "draft-vocabulary" in mods:
        drafts |= rows
    kinds = types(flags, geometry, cuda=cuda, wide_state=wide_state)  # before `unread`: it reads flags
    caching = flags.on("--enable-prefix-caching", default=True)
    # FlashInfer's kernel, which is taken on SM12x with CUDA 13 and heads of 128: vLLM 0.33,
    # model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py. Read there, not run.
    stores = geometry.key_dim == 128 and flags.text("--gdn-prefill-backend") in (None, "auto", "flashinfer")
    max_len = flags.number("--max-model-len", auto=True) or geometry.max_positions
    seqs, longest = flags.number("--max-num-seqs"), geometry.max_positions if max_len == AUTO else max_len
    most_seqs, most = RULES["sequences"][platform], RULES["tokens_a_step"]
    batched = flags.number("--max-num-batched-tokens") or min(most, (seqs or most_seqs) * longest)
    return Settings(
        platform=platform,
        max_model_len=max_len,
        max_num_seqs=seqs or min(most_seqs, batched),
        max_num_batched_tokens=batched,
        # config/vllm.py, max_concurrent_batches; platforms/cpu.py schedules one at a time.
        in_flight=batched * (2 if cuda and flags.on("--async-scheduling", default=True) else 1),
        utilization=flags.fraction("--gpu-memory-utilization") or RULES["utilization"],
        block_size=flags.number("--block-size"),
        drafter=drafter if "draft_passes" in drafts else None,
        prefix_caching=caching,
        checkpoints=caching and cuda and stores,
        eager=flags.on("--enforce-eager") or not cuda,
        kv_bytes=kv_bytes,
        kv_from=kv_from,
        ranks=ranks,
        int8_head="int8-lm-head" in mods,
        text_only=flags.on("--language-model-only") or not geometry.vision,
        loader=flags.text("--load-format") or "auto",
        longer=env.get(LONG, "").strip().lower() in ("1", "true"),
        unread=(*flags.unread(), *([f"{ADDITIONAL} {json.dumps(other)}"] if other else ())),
        **drafts,
        **kinds,
    )


def types(flags: Flags, geometry: Geometry, *, cuda: bool, wide_state: bool) -> dict[str, Any]:
    """Of Settings those of activations, states and cache."""
    dtype = choice(flags, "--dtype", geometry.dtype, DTYPE_BYTES)
    # Without the flag: the config's (model_executor/models/config.py), else that of the convolution
    # (layers/mamba/mamba_utils.py), but on a CPU with AVX512-BF16 float32 (platforms/cpu.py).
    state = geometry.architecture.ssm_dtype or ("float32" if wide_state and not cuda else dtype)
    # layers/attention/mla_attention.py, _canonicalize_sparse_mla_kv_cache_dtype, of SM12x.
    is_sparse = cuda and any(part.name == "sparse" for part in geometry.architecture.parts)
    cache = geometry.cache_dtype or ("fp8" if is_sparse else dtype)
    return {
        "dtype": dtype,
        "ssm_dtype": choice(flags, "--mamba-ssm-cache-dtype", state, DTYPE_BYTES),
        "cache_dtype": choice(flags, "--kv-cache-dtype", cache, CACHE_BITS),
    }


def choice(flags: Flags, name: str, default: str, choices: Mapping[str, object]) -> str:
    """A flag's word, `default` for `auto`."""
    word = flags.text(name) or "auto"
    if word not in ("auto", *choices):
        raise ManifestError(flags.origin(name), name, word, f"auto or one of {', '.join(choices)}", next_step=NEXT)
    return default if word == "auto" else word


def pool_bytes(flags: Flags, env: Mapping[str, str], platform: Platform) -> tuple[int | None, str]:
    """An explicit size of the KV pool, and what gives it. On a CPU the variable goes before the flag."""
    given = flags.number(KV_BYTES)
    if platform == "cpu" and (space := env.get(CPU_SPACE)):
        if not space.isdecimal():
            raise ManifestError(flags.origin(CPU_SPACE), CPU_SPACE, space, "a whole number of GiB", next_step=NEXT)
        return int(space) * GIB, f"{CPU_SPACE}={space} of {flags.origin(CPU_SPACE)}"
    return given, "" if given is None else f"{KV_BYTES} {flags.text(KV_BYTES)} of {flags.origin(KV_BYTES)}"


def drafting(flags: Flags, geometry: Geometry, drafter: Geometry | None) -> dict[str, Any]:
    """Of Settings what speculation decides: nothing without it."""
    config = flags.json(SPECULATION)
    if not config:
        return {}
    method, tokens = str(config.get("method")), config.get("num_speculative_tokens") or geometry.draft
    is_mtp = method == "mtp" or method.endswith("_mtp")
    if not drafter and method != "ngram" and not (is_mtp and geometry.draft):
        expected = "ngram, mtp of a model with mtp_num_hidden_layers, or that of the recipe's drafter"
        raise ManifestError(flags.origin(SPECULATION), f"{SPECULATION} method", method, expected, next_step=NEXT)
    if not isinstance(tokens, int) or tokens < 1:
        raise ManifestError(flags.origin(SPECULATION), "num_speculative_tokens", tokens, "1 or more", next_step=NEXT)
    if not drafter:
        return {"draft_tokens": tokens, "draft_layers": geometry.draft if is_mtp else 0}
    at_once = method in RULES["drafts_at_once"] or config.get("parallel_drafting") is True
    return {"draft_tokens": tokens, "draft_passes": 1 if at_once else tokens}


def draft_rows(additional: dict[str, Any], geometry: Geometry, *, cuda: bool) -> dict[str, int]:
    """Of Settings what mods/draft-vocabulary reads in `--additional-config`; its keys are taken out of there.

    The tokens that it adds to a list, some tens, are not counted. On a CPU its rows are as the head's, in 8 bits.
    """
    bits = 4 if additional.pop("draft_head", None) == {"bits": 4} else 8
    listed = additional.pop("draft_vocabulary", None)  # the mod refuses whatever has no `first`
    rows = listed.get("first", 0) if isinstance(listed, dict) else geometry.vocabulary if bits == 4 else 0
    return {"draft_rows": rows, "draft_bits": bits if cuda else 8}
