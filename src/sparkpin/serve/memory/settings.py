"""The flags of `vllm serve` and the environment that decide its memory, with vLLM 0.32's defaults for what is not said.

Defaults: vllm/engine/arg_utils.py (`get_batch_defaults`), vllm/config/cache.py; numbers such as `32k` and `32K`:
vllm/utils/argparse_utils.py; VLLM_CPU_KVCACHE_SPACE: vllm/platforms/cpu.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sparkpin.core.errors import ManifestError
from sparkpin.pins.nodes import NODES, TENSOR
from sparkpin.pins.vllm_command import CPU_SPACE, KV_BYTES
from sparkpin.pins.vllm_flags import KNOWN_EFFECT, NEXT, Flags
from sparkpin.serve.memory.geometry import DTYPE_BYTES, ONE_BYTE, TURBOQUANT, Geometry

Platform = Literal["cpu", "cuda"]
GIB = 1 << 30
CACHE_DTYPES = ("auto", *DTYPE_BYTES, *ONE_BYTE, *TURBOQUANT)
LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
ADDITIONAL = "--additional-config"
OVERRIDES = "--hf-overrides"
NOWHERE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Settings:
    """max_model_len: AUTO where vLLM shall find the longest that fits. cache_dtype: vLLM's word, never `auto`.

    draft_tokens: per step, 0 without speculation; draft_layers: attention layers of the drafter; draft_rows: of the LM
    head that the mod draft-vocabulary copies for it, 0 for none; draft_bits: of a weight in them, where the head has 8,
    4 or 8. drafter: a second model that drafts; draft_passes: of
    it, in a step. block_size: None where nobody asks for one. kv_bytes: an explicit size of the KV pool, instead of
    what `utilization` leaves.
    kv_from: the setting that gives kv_bytes, and its file. checkpoints: see `takes_checkpoints`. longer: whether
    max_model_len may be more than the model's positions. unread: flags whose share of the memory is not known.
    ranks: tensor-parallel, over `nodes` machines; all sizes are of one of them. yarn: positions that YaRN reaches, 0
    where --hf-overrides has none.
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
    draft_rows: int
    draft_bits: int
    prefix_caching: bool
    eager: bool
    kv_bytes: int | None
    blocks: int | None
    ranks: int
    text_only: bool
    checkpoints: bool
    kv_from: str
    longer: bool
    unread: tuple[str, ...]
    nodes: int = 1
    drafter: Geometry | None = None
    draft_passes: int = 0
    yarn: int = 0


def read_settings(
    argv: Sequence[str],
    env: Mapping[str, str],
    geometry: Geometry,
    platform: Platform,
    *,
    vllm: tuple[int, int],
    wide_state: bool,
    origin: str,
    origins: Mapping[str, str] = NOWHERE,
    drafter: Geometry | None = None,
) -> Settings:
    """Settings of a command line. drafter: the recipe's second model.

    origin: the file to name in an error; origins: flag or variable -> its own file, where that is another.
    vllm: major and minor version. wide_state: the CPU has AVX512-BF16, see `state_dtype`.

    Raises ManifestError for a value that is not what the flag takes, and for flags that change the caches in a way that
    this plan does not know.
    """
    flags = Flags(argv, origin, origins)
    flags.refuse(pipeline_parallel_size="1", decode_context_parallel_size="1", data_parallel_size="1")
    flags.refuse(kv_offloading_size="0", cpu_offload_gb="0", offload_group_size="0", kv_transfer_config="{}")
    if flags.on("--use-replayssm") or flags.last("--kv-cache-dtype-skip-layers"):
        raise ManifestError(
            origin, "command", "--use-replayssm or --kv-cache-dtype-skip-layers", KNOWN_EFFECT, next_step=NEXT
        )
    dtype = flags.text("--dtype") or "auto"
    dtype = geometry.dtype if dtype == "auto" else dtype
    if dtype not in DTYPE_BYTES:
        raise ManifestError(
            flags.origin("--dtype"), "--dtype", dtype, f"auto or one of {', '.join(DTYPE_BYTES)}", next_step=NEXT
        )
    cache_dtype = flags.text("--kv-cache-dtype") or "auto"
    if cache_dtype not in CACHE_DTYPES:
        file, expected = flags.origin("--kv-cache-dtype"), f"one of {', '.join(CACHE_DTYPES)}"
        raise ManifestError(file, "--kv-cache-dtype", cache_dtype, expected, next_step=NEXT)
    conv = flags.text("--mamba-cache-dtype") or "auto"
    conv = dtype if conv == "auto" else conv
    ssm = flags.text("--mamba-ssm-cache-dtype") or "auto"
    kv_bytes = flags.number(KV_BYTES)
    kv_from = f"{KV_BYTES} {flags.text(KV_BYTES)} of {flags.origin(KV_BYTES)}" if kv_bytes is not None else ""
    if platform == "cpu" and (space := env.get(CPU_SPACE)):
        if not space.isdecimal():
            raise ManifestError(flags.origin(CPU_SPACE), CPU_SPACE, space, "a whole number of GiB", next_step=NEXT)
        kv_bytes, kv_from = int(space) * GIB, f"{CPU_SPACE}={space} of {flags.origin(CPU_SPACE)}"
    draft_tokens, draft_layers, draft_passes = drafting(flags, geometry, drafter)
    rows, bits, unread = draft_rows(flags, geometry)
    caching = flags.on("--enable-prefix-caching", default=True)
    max_len = flags.number("--max-model-len", auto=True) or geometry.max_positions
    seqs = flags.number("--max-num-seqs") or (128 if platform == "cpu" else 1024)
    batched = flags.number("--max-num-batched-tokens")
    if batched is None:
        batched = min(2048 if platform == "cpu" else 8192, seqs * (max_len if max_len > 0 else geometry.max_positions))
    ranks = flags.number(TENSOR) or 1
    if undivided := geometry.undivided(ranks):
        raise ManifestError(
            flags.origin(TENSOR), TENSOR, ranks, f"a divisor of the model's {undivided}", next_step=NEXT
        )
    text_only = flags.on("--language-model-only") or not geometry.vision
    eager = flags.on("--enforce-eager") or platform == "cpu"
    yarn, others = yarn_positions(flags)
    # Other overrides may change the positions, so that what the config says does not decide; YaRN does not.
    overridden = any(OVERRIDES in word for word in argv) and not yarn
    longer = env.get(LONG, "").strip().lower() in ("1", "true") or overridden
    return Settings(
        platform=platform,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        utilization=flags.fraction("--gpu-memory-utilization") or 0.92,
        cache_dtype=dtype if cache_dtype == "auto" else cache_dtype,
        dtype=dtype,
        conv_dtype=conv,
        ssm_dtype=state_dtype(ssm, conv, geometry, wide_state=wide_state and platform == "cpu"),
        block_size=flags.number("--block-size"),
        draft_tokens=draft_tokens,
        draft_layers=draft_layers,
        draft_rows=rows if draft_layers else 0,
        draft_bits=bits if draft_layers else 8,
        prefix_caching=caching,
        eager=eager,
        kv_bytes=kv_bytes,
        blocks=flags.number("--num-gpu-blocks-override"),
        ranks=ranks,
        text_only=text_only,
        checkpoints=caching and platform == "cuda" and vllm >= (0, 33) and takes_checkpoints(flags, geometry),
        kv_from=kv_from,
        longer=longer,
        yarn=yarn,
        unread=(*flags.unread(), *unread, *others),
        nodes=flags.number(NODES) or 1,
        drafter=drafter if draft_passes else None,
        draft_passes=draft_passes,
    )


def state_dtype(asked: str, conv: str, geometry: Geometry, *, wide_state: bool) -> str:
    """Type of the recurrent state of linear attention.

    vLLM 0.32: the flag, else the config's mamba_ssm_dtype (model_executor/models/config.py), else that of the
    convolution (layers/mamba/mamba_utils.py), but on a CPU with AVX512-BF16 float32 (platforms/cpu.py).
    """
    chosen = geometry.ssm_dtype if asked == "auto" else asked
    if chosen is not None:
        return chosen
    return "float32" if wide_state else conv


def takes_checkpoints(flags: Flags, geometry: Geometry) -> bool:
    """Whether a prefill stores a state on its way for prefix caching, in blocks of a multiple of 64 tokens.

    vLLM 0.33, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: FlashInfer's kernel does, which is taken on
    SM12x with CUDA 13 and heads of 128. Read there, not run.
    """
    return geometry.key_dim == 128 and flags.text("--gdn-prefill-backend") in (None, "auto", "flashinfer")


AT_ONCE = ("dflash", "dspark")
"""Methods that draft all tokens in one pass: vLLM 0.32, config/speculative.py, `parallel_drafting`."""


def drafting(flags: Flags, geometry: Geometry, drafter: Geometry | None) -> tuple[int, int, int]:
    """Tokens drafted in a step, attention layers of an MTP drafter, and passes of a second model: (0, 0, 0) without
    speculation."""
    config = flags.json("--speculative-config")
    if not config:
        return 0, 0, 0
    method = str(config.get("method"))
    if drafter:
        tokens = int(config["num_speculative_tokens"])
        return tokens, 0, 1 if method in AT_ONCE or config.get("parallel_drafting") is True else tokens
    is_mtp = method == "mtp" or method.endswith("_mtp")
    if not is_mtp and method != "ngram":
        expected = "mtp, ngram or that of the recipe's drafter, whose caches this plan knows"
        raise ManifestError(
            flags.origin("--speculative-config"), "--speculative-config method", method, expected, next_step=NEXT
        )
    if is_mtp and not geometry.draft:
        expected = "a model whose config has mtp_num_hidden_layers"
        raise ManifestError(
            flags.origin("--speculative-config"), "--speculative-config method", method, expected, next_step=NEXT
        )
    layers = geometry.draft if is_mtp else 0
    tokens = config.get("num_speculative_tokens") or layers
    if not isinstance(tokens, int) or tokens < 1:
        raise ManifestError(
            flags.origin("--speculative-config"),
            "num_speculative_tokens",
            tokens,
            "a positive whole number",
            next_step=NEXT,
        )
    return tokens, layers, 0


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


def yarn_positions(flags: Flags) -> tuple[int, tuple[str, ...]]:
    """Positions that YaRN in --hf-overrides reaches, else 0; and what else the flag says, which is not known here."""
    overrides = flags.json(OVERRIDES)
    if not overrides:
        return 0, ()
    text = overrides.get("text_config", overrides)
    rope = text.get("rope_parameters") if isinstance(text, dict) else None
    if isinstance(rope, dict) and rope.get("rope_type") == "yarn" and len(overrides) == len(text) == 1:
        factor, stored = rope.get("factor"), rope.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(stored, int):
            return int(stored * factor), ()
    return 0, (f"{OVERRIDES} {json.dumps(overrides)}",)
