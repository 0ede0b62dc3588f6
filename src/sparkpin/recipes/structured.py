"""The command that sparkrun makes of `defaults` where a recipe of version 2 has none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

SHORT = {"tensor_parallel": "-tp", "pipeline_parallel": "-pp", "data_parallel": "--data-parallel-size"}
FLAGS = [
    "allowed_local_media_path", "api_key", "async_scheduling", "attention_backend", "attention_config",
    "block_size", "chat_template", "compilation_config", "data_parallel", "dcp_comm_backend",
    "decode_refill_target", "default_chat_template_kwargs", "disable_custom_all_reduce", "dtype",
    "enable_auto_tool_choice", "enable_chunked_prefill", "enable_flashinfer_autotune", "enable_force_include_usage",
    "enable_mamba_shared_prefix_checkpoint", "enable_prefix_caching", "enable_prompt_tokens_details",
    "enable_request_id_headers", "enforce_eager", "engram_config", "gdn_decode_kernel", "gdn_prefill_backend",
    "generation_config", "gpu_memory_utilization", "hf_overrides", "host", "jit_monitor_mode",
    "kda_prefill_backend", "kv_cache_dtype", "kv_cache_memory_bytes", "limit_mm_per_prompt", "linear_backend",
    "load_format", "long_prefill_token_threshold", "mamba_backend", "mamba_cache_dtype", "mamba_cache_mode",
    "mamba_ssm_cache_dtype", "max_cudagraph_capture_size", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs", "max_parallel_prefills", "media_io_kwargs", "mm_encoder_tp_mode", "mm_processor_cache_gb",
    "model_loader_extra_config", "moe_backend", "otlp_traces_endpoint", "pipeline_parallel", "port",
    "prefill_compute_half_life", "prefill_compute_share", "prefill_policy", "prefill_schedule_interval",
    "prefix_cache_retention_interval", "prefix_match_unit", "quantization", "reasoning_parser",
    "reasoning_parser_plugin", "recurrent_checkpoint_policy", "safetensors_load_strategy",
    "scheduler_reserve_full_isl", "seed", "served_model_name", "speculative_config", "tokenizer_mode",
    "tool_call_parser", "trust_remote_code", "video_pruning_rate",
]  # fmt: skip
"""Settings that become flags; other ones are left out, and nobody is told: sparkrun does so. (The order is ours. The
table is that of its runtimes/_vllm_common.py, 0.4.2.)"""
BARE = {
    "async_scheduling", "disable_custom_all_reduce", "enable_auto_tool_choice", "enable_chunked_prefill",
    "enable_flashinfer_autotune", "enable_force_include_usage", "enable_mamba_shared_prefix_checkpoint",
    "enable_prefix_caching", "enable_prompt_tokens_details", "enable_request_id_headers", "enforce_eager",
    "scheduler_reserve_full_isl", "trust_remote_code",
}  # fmt: skip
ON_BY_DEFAULT = {
    "async_scheduling", "enable_chunked_prefill", "enable_flashinfer_autotune", "enable_prefix_caching",
    "scheduler_reserve_full_isl",
}  # fmt: skip
TRUE = {"true", "yes", "1", "on", "t", "y"}


def command_of(model: str, revision: str, values: Mapping[str, Any]) -> str:
    parts = ["vllm", "serve", model]
    if revision and ":" not in model and not model.startswith("/"):
        parts += ["--revision", shlex.quote(revision)]
    if values.get("tensor_parallel"):
        parts += ["-tp", str(values["tensor_parallel"])]
    for key in FLAGS:
        value = values.get(key)
        flag = SHORT.get(key, "--" + key.replace("_", "-"))
        if value is None:
            continue
        if key not in BARE:
            parts += [flag, word(value)]
        elif str(value).lower() in TRUE:
            parts.append(flag)
        elif key in ON_BY_DEFAULT:
            parts.append("--no-" + flag.removeprefix("--"))
    return " ".join(parts)


def unread(values: Mapping[str, Any]) -> list[str]:
    """Settings that become no flag."""
    return sorted(set(values) - {*FLAGS, *SHORT, "distributed_executor_backend", "data_parallel_rpc_port"})


def word(value: Any) -> str:
    """JSON as one quoted word; other text stands in the command as it is, and bash reads it."""
    if isinstance(value, str):
        if value.lstrip()[:1] not in ("{", "["):
            return value
        try:
            return word(json.loads(value))
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict | list):
        return shlex.quote(json.dumps(value, separators=(",", ":"), default=str))
    return str(value)
