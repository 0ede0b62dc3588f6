"""The flags of `vllm serve` and the environment that decide its memory, with vLLM's defaults for what is not given.

Defaults: vllm/engine/arg_utils.py (`get_batch_defaults`), vllm/config/cache.py; numbers such as `32k` and `32K`:
vllm/utils/argparse_utils.py; VLLM_CPU_KVCACHE_SPACE: vllm/platforms/cpu.py. Read in 0.32, and the same in 0.33 but for
`takes_checkpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sparkpin.core.errors import ManifestError
from sparkpin.memory.geometry import DTYPE_BYTES, Geometry
from sparkpin.pins.nodes import NODES, TENSOR
from sparkpin.pins.vllm_command import CPU_SPACE, KV_BYTES
from sparkpin.pins.vllm_flags import KNOWN_EFFECT, NEXT, SPECULATION, Flags

Platform = Literal["cpu", "cuda"]
GIB = 1 << 30
PACKED = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CACHE_BITS: Mapping[str, tuple[int, int]] = {
    **{name: (8 * size, 8 * size) for name, size in DTYPE_BYTES.items()},
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), (8, 8)),
    **dict(zip(PACKED, ((8, 4), (4, 4), (3, 4), (3, 3)), strict=True)),
}
"""Of a cached key's and of a value's component: vLLM, model_executor/layers/quantization/turboquant/config.py."""
BATCH_DEFAULTS: Mapping[Platform, tuple[int, int]] = {"cpu": (2048, 128), "cuda": (2048, 256)}
"""Tokens a step and sequences of a server. vLLM gives a GPU from 70 GiB on 8,192 and 1,024, and a GB10 not: until 0.32
NVML had no memory to report of it (vllm-project/vllm#57378), 0.33 knows it by its compute capability. We have a stack
for no other GPU."""
LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
ADDITIONAL, OVERRIDES = "--additional-config", "--hf-overrides"
AT_ONCE = ("dflash", "dspark")
"""Methods that draft all tokens in one pass: vLLM 0.32, config/speculative.py, `parallel_drafting`."""


@dataclass(frozen=True)
class CommandLine:
    """argv: from `vllm serve` on. origin: the file to name in an error; origins: flag or variable -> its own file,
    where that is another."""

    argv: Sequence[str]
    env: Mapping[str, str]
    origin: str
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """max_model_len: AUTO where vLLM shall find the longest that fits. cache_dtype: vLLM's word, never `auto`.

    draft_tokens: per step, 0 without speculation; draft_layers: attention layers of the drafter; draft_rows: of the LM
    head that the mod draft-vocabulary copies for it, 0 for none; draft_bits: of a weight in them, where the head has 8,
    4 or 8. drafter: a second model that drafts; draft_passes: of it, in a step. int8_head: the mod int8-lm-head
    quantises the LM head.
    block_size: None where nobody asks for one. kv_bytes: an explicit size of the KV pool, instead of what `utilization`
    leaves; kv_from: the setting that gives it, and its file. loader: of --load-format. checkpoints: see
    `takes_checkpoints`. longer: whether max_model_len may be more than the model's positions. unread: flags whose share
    of the memory is not known. ranks: tensor-parallel; all sizes are of one of them.
    """

    platform: Platform
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    cache_dtype: str
    dtype: str
    conv_dtype: str
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
    blocks: int | None
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
    command: CommandLine,
    platform: Platform,
    geometry: Geometry,
    *,
    wide_state: bool = False,
    drafter: Geometry | None = None,
    mods: Collection[str] = (),
) -> Settings:
    """wide_state: the CPU has AVX512-BF16, see `state_dtype`. drafter: the recipe's second model. mods: of its stages.

    Raises ManifestError for a value that is not what the flag takes, and for flags that change the caches in a way that
    this plan does not know.
    """
    flags, cuda = Flags(command.argv, command.origin, command.origins), platform == "cuda"
    refuse_unknown(flags)
    dtype = choice(flags, "--dtype", geometry.dtype, DTYPE_BYTES)
    conv = choice(flags, "--mamba-cache-dtype", dtype, DTYPE_BYTES)
    kv_bytes, kv_from = pool_bytes(flags, command.env, platform)
    draft_tokens, draft_layers, draft_passes = drafting(flags, geometry, drafter)
    rows, bits, other_config = draft_rows(flags, geometry)
    caching = flags.on("--enable-prefix-caching", default=True)
    max_len = flags.number("--max-model-len", auto=True) or geometry.max_positions
    batched, seqs = batch_sizes(flags, platform, max_len if max_len > 0 else geometry.max_positions)
    ranks = flags.number(TENSOR) or 1
    if undivided := geometry.undivided(ranks):
        expected = f"a divisor of the model's {undivided}"
        raise ManifestError(flags.origin(TENSOR), TENSOR, ranks, expected, next_step=NEXT)
    return Settings(
        platform=platform,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        utilization=flags.fraction("--gpu-memory-utilization") or 0.92,
        cache_dtype=choice(flags, "--kv-cache-dtype", dtype, CACHE_BITS),
        dtype=dtype,
        conv_dtype=conv,
        ssm_dtype=state_dtype(flags, geometry.ssm_dtype or ("float32" if wide_state and not cuda else conv)),
        block_size=flags.number("--block-size"),
        draft_tokens=draft_tokens,
        draft_layers=draft_layers,
        draft_passes=draft_passes,
        draft_rows=rows if draft_layers and "draft-vocabulary" in mods else 0,
        draft_bits=bits if draft_layers else 8,
        drafter=drafter if draft_passes else None,
        prefix_caching=caching,
        checkpoints=caching and cuda and takes_checkpoints(flags, geometry),
        eager=flags.on("--enforce-eager") or not cuda,
        kv_bytes=kv_bytes,
        kv_from=kv_from,
        blocks=flags.number("--num-gpu-blocks-override"),
        ranks=ranks,
        int8_head="int8-lm-head" in mods,
        text_only=flags.on("--language-model-only") or not geometry.vision,
        loader=flags.text("--load-format") or "auto",
        longer=command.env.get(LONG, "").strip().lower() in ("1", "true"),
        unread=(*flags.unread(), *other_config),
    )


def refuse_unknown(flags: Flags) -> None:
    for name in (NODES, OVERRIDES):  # by `ranks`, and in the config
        flags.last(name)
    flags.refuse(pipeline_parallel_size="1", decode_context_parallel_size="1", data_parallel_size="1")
    flags.refuse(kv_offloading_size="0", cpu_offload_gb="0", offload_group_size="0", kv_transfer_config="{}")
    for name in ("--use-replayssm", "--kv-cache-dtype-skip-layers"):
        if flags.on(name):
            raise ManifestError(flags.origin(name), "command", name, KNOWN_EFFECT, next_step=NEXT)


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


def batch_sizes(flags: Flags, platform: Platform, max_len: int) -> tuple[int, int]:
    """Tokens a step and sequences."""
    tokens, seqs = flags.number("--max-num-batched-tokens"), flags.number("--max-num-seqs")
    default_tokens, default_seqs = BATCH_DEFAULTS[platform]
    found = tokens or min(default_tokens, (seqs or default_seqs) * max_len)
    return found, seqs or min(default_seqs, found)


def state_dtype(flags: Flags, default: str) -> str:
    """Type of the recurrent state of linear attention.

    vLLM 0.32: the flag, else the config's mamba_ssm_dtype (model_executor/models/config.py), else that of the
    convolution (layers/mamba/mamba_utils.py), but on a CPU with AVX512-BF16 float32 (platforms/cpu.py).
    """
    return choice(flags, "--mamba-ssm-cache-dtype", default, DTYPE_BYTES)


def takes_checkpoints(flags: Flags, geometry: Geometry) -> bool:
    """Whether a prefill stores a state on its way for prefix caching, in blocks of a multiple of 64 tokens.

    vLLM 0.33, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: FlashInfer's kernel does, which is taken on
    SM12x with CUDA 13 and heads of 128. Read there, not run.
    """
    return geometry.key_dim == 128 and flags.text("--gdn-prefill-backend") in (None, "auto", "flashinfer")


def drafting(flags: Flags, geometry: Geometry, drafter: Geometry | None) -> tuple[int, int, int]:
    """Tokens drafted in a step, attention layers of an MTP drafter, and passes of a second model: (0, 0, 0) without
    speculation."""
    config = flags.json(SPECULATION)
    if not config:
        return 0, 0, 0
    method = str(config.get("method"))
    if drafter:
        tokens = int(config["num_speculative_tokens"])
        return tokens, 0, 1 if method in AT_ONCE or config.get("parallel_drafting") is True else tokens
    is_mtp = method == "mtp" or method.endswith("_mtp")
    tokens = config.get("num_speculative_tokens") or geometry.draft
    key, got, expected = "", object(), ""
    if not is_mtp and method != "ngram":
        key, got = f"{SPECULATION} method", method
        expected = "mtp, ngram or that of the recipe's drafter, whose caches this plan knows"
    elif is_mtp and not geometry.draft:
        key, got, expected = f"{SPECULATION} method", method, "a model whose config has mtp_num_hidden_layers"
    elif not isinstance(tokens, int) or tokens < 1:
        key, got, expected = "num_speculative_tokens", tokens, "a positive whole number"
    if key:
        raise ManifestError(flags.origin(SPECULATION), key, got, expected, next_step=NEXT)
    return tokens, geometry.draft if is_mtp else 0, 0


def draft_rows(flags: Flags, geometry: Geometry) -> tuple[int, int, tuple[str, ...]]:
    """Rows of the LM head that mods/draft-vocabulary copies, 0 for none; bits of a weight in them; and what else
    `--additional-config` says.

    The tokens that it adds to a list, some tens, are not counted.
    """
    rest = flags.json(ADDITIONAL)
    bits = 4 if rest.get("draft_head") == {"bits": 4} else 8
    if bits == 4:
        del rest["draft_head"]
    listed = rest.get("draft_vocabulary")
    rows = listed.get("first") if isinstance(listed, dict) else None
    if type(rows) is int and rows > 0:
        del rest["draft_vocabulary"]
    else:
        rows = geometry.vocabulary if bits == 4 else 0
    return rows, bits, (f"{ADDITIONAL} {json.dumps(rest)}",) if rest else ()
