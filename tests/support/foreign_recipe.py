"""A recipe as somebody else wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

V1 = {
    "recipe_version": "1",
    "name": "A Recipe",
    "model": "acme/sample-int4",
    "container": "vllm-node-tf5",
    "build_args": ["--tf5"],
    "mods": ["mods/fix-qwen3.5-autoround", "mods/not-here"],
    "defaults": {"port": 8001, "host": "0.0.0.0", "tensor_parallel": 2, "config": '{"top_k": 20}', "unused": 1},
    "env": {"VLLM_MARLIN_USE_ATOMIC_ADD": 1, "J": '{"a": 1}'},
    "command": """vllm serve acme/sample-int4 \\
  --port {port} --host {host} -tp {tensor_parallel} --override-generation-config '{config}' \\
  --speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}' \\
  --chat-template unsloth.jinja --distributed-executor-backend ray
""",
}  # fmt: skip


def written(folder: Path, value: Any, name: str = "Some Recipe.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return str(path)
