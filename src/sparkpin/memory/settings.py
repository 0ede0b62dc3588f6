"""The flags of `vllm serve` and the environment that decide its memory, with vLLM's defaults for what is not given.

Defaults: vllm/engine/arg_utils.py (`get_batch_defaults`), vllm/config/cache.py; numbers such as `32k` and `32K`:
vllm/utils/argparse_utils.py; VLLM_CPU_KVCACHE_SPACE: vllm/platforms/cpu.py. Read in 0.32, and the same in 0.33 but for
`Settings.checkpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from sparkpin.core.errors import ManifestError
from sparkpin.memory.geometry import DTYPE_BYTES, Geometry
from sparkpin.pins.nodes import TENSOR
from sparkpin.pins.vllm_command import CPU_SPACE, KV_BYTES
from sparkpin.pins.vllm_flags import AUTO, NEXT, SPECULATION, Flags

Platform = Literal["cpu", "cuda"]
GIB = 1 << 30
PACKED = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CACHE_BITS: Mapping[str, tuple[int, int]] = {
    **{name: (8 * size, 8 * size) for name, size in DTYPE_BYTES.items()},
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), (8, 8)),
    **dict(zip(PACKED, ((8, 4), (4, 4), (3, 4), (3, 3)), strict=True)),
}
"""Of a cached key's and of a value's component: vLLM, model_executor/layers/quantization/turboquant/config.py."""
STEP_TOKENS = 2048
SEQUENCES: Mapping[Platform, int] = {"cpu": 128, "cuda": 256}
"""Tokens a step and sequences of a server by default. vLLM gives a GPU from 70 GiB on 8,192 and 1,024, and a GB10 not:
until 0.32 NVML had no memory to report of it (vllm-project/vllm#57378), 0.33 knows it by its compute capability. We
have a stack for no other GPU."""
LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
ADDITIONAL = "--additional-config"
AT_ONCE = ("dflash", "dspark")
"""Methods that draft all tokens in one pass: vLLM 0.32, config/speculative.py, `parallel_drafting`."""


@dataclass(frozen=True, slots=True)
class Settings:
    """max_model_len: AUTO where vLLM shall find the longest that fits. cache_dtype: vLLM's word, never `auto`.

    draft_tokens: per step, 0 without speculation; draft_layers: attention layers of the drafter; draft_rows: of the LM
    head that the mod draft-vocabulary copies for it, 0 for none; draft_bits: of a weight in them, where the head has 8,
    4 or 8. drafter: a second model that drafts; draft_passes: of it, in a step. int8_head: the mod int8-lm-head
    quantises the LM head.
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
    utilization: float
    cache_dtype: str
    dtype: str
    ssm_dtype: str
    block_size: int | None
    draft_tokens: int
    draft_layers: int
    draft_passes: int
    draft_rows: int
    draft_bits: int
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

    @property
    def widened(self) -> bool:
        """Whether INT4 experts and FP8 layers are expanded to 16 bits, as the mods do on a CPU."""
        return self.platform == "cpu"


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
    flags.refuse(pipeline_parallel_size="1", decode_context_parallel_size="1", data_parallel_size="1")
    flags.refuse(kv_offloading_size="0", cpu_offload_gb="0", offload_group_size="0", kv_transfer_config="{}")
    flags.refuse(kv_cache_dtype_skip_layers="", num_gpu_blocks_override="", mamba_cache_dtype="auto")
    cuda, dtype = platform == "cuda", choice(flags, "--dtype", geometry.dtype, DTYPE_BYTES)
    # Without the flag: the config's (model_executor/models/config.py), else that of the convolution
    # (layers/mamba/mamba_utils.py), but on a CPU with AVX512-BF16 float32 (platforms/cpu.py).
    state = geometry.ssm_dtype or ("float32" if wide_state and not cuda else dtype)
    kv_bytes, kv_from = pool_bytes(flags, env, platform)
    draft_tokens, draft_layers, draft_passes = drafting(flags, geometry, drafter)
    rows, bits, other_config = draft_rows(flags, geometry)
    caching = flags.on("--enable-prefix-caching", default=True)
    # FlashInfer's kernel, which is taken on SM12x with CUDA 13 and heads of 128: vLLM 0.33,
    # model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py. Read there, not run.
    stores = geometry.key_dim == 128 and flags.text("--gdn-prefill-backend") in (None, "auto", "flashinfer")
    max_len = flags.number("--max-model-len", auto=True) or geometry.max_positions
    seqs, longest = flags.number("--max-num-seqs"), geometry.max_positions if max_len == AUTO else max_len
    batched = flags.number("--max-num-batched-tokens") or min(STEP_TOKENS, (seqs or SEQUENCES[platform]) * longest)
    return Settings(
        platform=platform,
        max_model_len=max_len,
        max_num_seqs=seqs or min(SEQUENCES[platform], batched),
        max_num_batched_tokens=batched,
        utilization=flags.fraction("--gpu-memory-utilization") or 0.92,
        cache_dtype=choice(flags, "--kv-cache-dtype", dtype, CACHE_BITS),
        dtype=dtype,
        ssm_dtype=choice(flags, "--mamba-ssm-cache-dtype", state, DTYPE_BYTES),
        block_size=flags.number("--block-size"),
        draft_tokens=draft_tokens,
        draft_layers=draft_layers,
        draft_passes=draft_passes,
        draft_rows=rows if draft_layers and "draft-vocabulary" in mods else 0,
        draft_bits=bits if draft_layers else 8,
        drafter=drafter if draft_passes else None,
        prefix_caching=caching,
        checkpoints=caching and cuda and stores,
        eager=flags.on("--enforce-eager") or not cuda,
        kv_bytes=kv_bytes,
        kv_from=kv_from,
        ranks=tensor_ranks(flags, geometry),
        int8_head="int8-lm-head" in mods,
        text_only=flags.on("--language-model-only") or not geometry.vision,
        loader=flags.text("--load-format") or "auto",
        longer=env.get(LONG, "").strip().lower() in ("1", "true"),
        unread=(*flags.unread(), *other_config),
    )


def tensor_ranks(flags: Flags, geometry: Geometry) -> int:
    ranks = flags.number(TENSOR) or 1
    if undivided := geometry.undivided(ranks):
        expected = f"a divisor of the model's {undivided}"
        raise ManifestError(flags.origin(TENSOR), TENSOR, ranks, expected, next_step=NEXT)
    return ranks


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


def drafting(flags: Flags, geometry: Geometry, drafter: Geometry | None) -> tuple[int, int, int]:
    """Tokens drafted in a step, attention layers of an MTP drafter, and passes of a second model: (0, 0, 0) without
    speculation."""
    config = flags.json(SPECULATION)
    if not config:
        return 0, 0, 0
    method, tokens = str(config.get("method")), config.get("num_speculative_tokens") or geometry.draft
    is_mtp = method == "mtp" or method.endswith("_mtp")
    if not drafter and method != "ngram" and not (is_mtp and geometry.draft):
        expected = "ngram, mtp of a model with mtp_num_hidden_layers, or that of the recipe's drafter"
        raise ManifestError(flags.origin(SPECULATION), f"{SPECULATION} method", method, expected, next_step=NEXT)
    if not isinstance(tokens, int) or tokens < 1:
        key, expected = "num_speculative_tokens", "a positive whole number"
        raise ManifestError(flags.origin(SPECULATION), key, tokens, expected, next_step=NEXT)
    if drafter:
        return tokens, 0, 1 if method in AT_ONCE or config.get("parallel_drafting") is True else tokens
    return tokens, geometry.draft if is_mtp else 0, 0


def draft_rows(flags: Flags, geometry: Geometry) -> tuple[int, int, tuple[str, ...]]:
    """Rows of the LM head that mods/draft-vocabulary copies, 0 for none; bits of a weight in them; and what else
    `--additional-config` says.

    The tokens that it adds to a list, some tens, are not counted.
    """
    rest = flags.json(ADDITIONAL)
    listed, bits, rows = rest.get("draft_vocabulary"), 8, 0
    if rest.get("draft_head") == {"bits": 4}:
        bits, rows = 4, geometry.vocabulary
        del rest["draft_head"]
    if isinstance(listed, dict) and "first" in listed:
        rows = listed["first"]
        del rest["draft_vocabulary"]
    return rows, bits, (f"{ADDITIONAL} {json.dumps(rest)}",) if rest else ()
