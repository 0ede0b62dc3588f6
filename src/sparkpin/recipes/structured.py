"""The command that sparkrun makes of `defaults` where a recipe of version 2 has none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from sparkpin.recipes.recipe import RUNNERS

SHORT = {"tensor_parallel": "-tp", "pipeline_parallel": "-pp", "data_parallel": "--data-parallel-size"}
FLAGS: list[str] = RUNNERS["flags"]
"""Settings that become flags; other ones are left out, and nobody is told: sparkrun does so. (The order is ours.)"""
BARE, ON_BY_DEFAULT = {*RUNNERS["bare"]}, {*RUNNERS["on_by_default"]}
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
