"""The flags of `vllm serve` and the environment that decide its memory, with vLLM 0.32's defaults for what is not said.

Defaults: vllm/engine/arg_utils.py (`get_batch_defaults`), vllm/config/cache.py; numbers such as `32k` and `32K`:
vllm/utils/argparse_utils.py; VLLM_CPU_KVCACHE_SPACE: vllm/platforms/cpu.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparkpin.errors import ManifestError
from sparkpin.memory.geometry import DTYPE_BYTES, Geometry
from sparkpin.recipes import Flag, parse_flags

Platform = Literal["cpu", "cuda"]
GIB = 1 << 30
AUTO = -1
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
NEXT = "correct the command or the flags of recipe, stack or stage"


@dataclass(frozen=True, slots=True)
class Settings:
    """max_model_len: AUTO where vLLM shall find the longest that fits. cache_dtype: vLLM's word, never `auto`.

    draft_tokens: per step, 0 without speculation; draft_layers: attention layers of the drafter. block_size: None where
    nobody asks for one. kv_bytes: an explicit size of the KV pool, instead of what `utilization` leaves.
    checkpoints: see `takes_checkpoints`.
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
    prefix_caching: bool
    eager: bool
    kv_bytes: int | None
    blocks: int | None
    ranks: int
    text_only: bool
    checkpoints: bool


def read_settings(
    argv: Sequence[str],
    env: Mapping[str, str],
    geometry: Geometry,
    platform: Platform,
    *,
    vllm: tuple[int, int],
    wide_state: bool,
    origin: str,
) -> Settings:
    """Settings of a command line.

    vllm: major and minor version. wide_state: the CPU has AVX512-BF16, see `state_dtype`.

    Raises ManifestError for a value that is not what the flag takes, and for flags that change the caches in a way that
    this plan does not know.
    """
    flags = Flags(argv, origin)
    flags.refuse("--pipeline-parallel-size", "--decode-context-parallel-size", "--kv-offloading-size")
    if flags.on("--use-replayssm") or flags.values("--kv-cache-dtype-skip-layers"):
        raise ManifestError(
            origin, "command", "--use-replayssm or --kv-cache-dtype-skip-layers", WANTED, next_step=NEXT
        )
    dtype = flags.text("--dtype") or "auto"
    dtype = geometry.dtype if dtype == "auto" else dtype
    if dtype not in DTYPE_BYTES:
        raise ManifestError(origin, "--dtype", dtype, f"auto or one of {', '.join(DTYPE_BYTES)}", next_step=NEXT)
    cache_dtype = flags.text("--kv-cache-dtype") or "auto"
    conv = flags.text("--mamba-cache-dtype") or "auto"
    conv = dtype if conv == "auto" else conv
    ssm = flags.text("--mamba-ssm-cache-dtype") or "auto"
    kv_bytes = flags.number("--kv-cache-memory-bytes")
    if platform == "cpu" and (space := env.get(CPU_SPACE)):
        if not space.isdecimal():
            raise ManifestError(origin, CPU_SPACE, space, "a whole number of GiB", next_step=NEXT)
        kv_bytes = int(space) * GIB
    draft_tokens, draft_layers = drafting(flags, geometry, origin)
    caching = flags.on("--enable-prefix-caching", default=True)
    max_len = flags.number("--max-model-len", auto=True) or geometry.max_positions
    seqs = flags.number("--max-num-seqs") or (128 if platform == "cpu" else 1024)
    batched = flags.number("--max-num-batched-tokens")
    if batched is None:
        batched = min(2048 if platform == "cpu" else 8192, seqs * (max_len if max_len > 0 else geometry.max_positions))
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
        prefix_caching=caching,
        eager=flags.on("--enforce-eager") or platform == "cpu",
        kv_bytes=kv_bytes,
        blocks=flags.number("--num-gpu-blocks-override"),
        ranks=flags.number("--tensor-parallel-size") or 1,
        text_only=not geometry.vision or flags.on("--language-model-only"),
        checkpoints=caching and platform == "cuda" and vllm >= (0, 33) and takes_checkpoints(flags, geometry),
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


def drafting(flags: Flags, geometry: Geometry, origin: str) -> tuple[int, int]:
    """Tokens drafted in a step and attention layers of the drafter: (0, 0) without speculation."""
    config = flags.json("--speculative-config")
    if not config:
        return 0, 0
    method = str(config.get("method"))
    is_mtp = method == "mtp" or method.endswith("_mtp")
    if not is_mtp and method != "ngram":
        wanted = "mtp or ngram, whose caches this plan knows"
        raise ManifestError(origin, "--speculative-config method", method, wanted, next_step=NEXT)
    if is_mtp and not geometry.draft:
        wanted = "a model whose config has mtp_num_hidden_layers"
        raise ManifestError(origin, "--speculative-config method", method, wanted, next_step=NEXT)
    layers = geometry.draft if is_mtp else 0
    tokens = config.get("num_speculative_tokens") or layers
    if not isinstance(tokens, int) or tokens < 1:
        raise ManifestError(origin, "num_speculative_tokens", tokens, "a positive whole number", next_step=NEXT)
    return tokens, layers


WANTED = "flags whose effect on the caches this plan knows"


class Flags:
    """Typed access to a command line; of a flag that stands twice the last one counts."""

    def __init__(self, argv: Sequence[str], origin: str) -> None:
        self._flags, self._origin = parse_flags(argv)[1], origin

    def values(self, key: str) -> list[Flag]:
        return [flag for flag in self._flags if flag.key == key]

    def text(self, key: str) -> str | None:
        found = self.values(key)
        return found[-1].value if found else None

    def on(self, key: str, *, default: bool = False) -> bool:
        """Of a bare flag and its `--no-` form: Flag.key is the same for both."""
        found = self.values(key)
        return not found[-1].words[0].startswith("--no-") if found else default

    def refuse(self, *keys: str) -> None:
        for key in keys:
            if self.text(key) not in (None, "1"):
                raise ManifestError(self._origin, key, self.text(key), WANTED, next_step=NEXT)

    def number(self, key: str, *, auto: bool = False) -> int | None:
        text = self.text(key)
        if text is None:
            return None
        if auto and text in ("-1", "auto"):
            return AUTO
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
        if not found or ("." in found[1] and found[2] not in DECIMAL) or float(found[1]) == 0:
            raise ManifestError(self._origin, key, text, "a positive number such as 32768, 32k or 32K", next_step=NEXT)
        if found[2] in DECIMAL:
            return int(float(found[1]) * DECIMAL[found[2]])
        return int(found[1]) * BINARY.get(found[2], 1)

    def fraction(self, key: str) -> float | None:
        text = self.text(key)
        if text is None:
            return None
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text) or not 0 < float(text) <= 1:
            raise ManifestError(self._origin, key, text, "a number above 0 and not above 1", next_step=NEXT)
        return float(text)

    def _mapping(self, flag: Flag) -> dict[str, Any]:
        try:
            value = json.loads(flag.value or "")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ManifestError(self._origin, flag.key, flag.value, "a JSON object", next_step=NEXT)
        return value

    def json(self, key: str) -> dict[str, Any]:
        """A flag's mapping, parts of it given as `--flag.part value` included."""
        value: dict[str, Any] = {}
        for flag in self._flags:
            if flag.key == key:
                value = self._mapping(flag)
            elif flag.key.startswith(key + "."):
                part = flag.key.removeprefix(key + ".").replace("-", "_")
                value = {**value, part: int(flag.value or 0) if (flag.value or "").isdigit() else flag.value}
        return value
