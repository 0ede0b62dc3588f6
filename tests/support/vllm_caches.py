"""Runs in the image, under vLLM 0.32: what vLLM's own code makes of a model's caches. Not imported by any test.

Usage: python vllm_caches.py CASES FOLDER. CASES: a list as JSON. A case: config (of the model), args (of EngineArgs),
lengths and pools; for each length and pool one line `RESULT <json>`. The engine is made as the server makes it, with
dummy weights, up to the point where the pool would be allocated. FOLDER has a tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.executor.abstract import Executor


def run(case: dict[str, Any], source: Path) -> None:
    folder = Path(tempfile.mkdtemp())
    for file in source.iterdir():
        if "safetensors" not in file.name and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    args = EngineArgs(
        model=str(folder),
        load_format="dummy",
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=max(case["lengths"]),
        **case["args"],
    )
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    core.register_all_kvcache_specs(config)
    executor = Executor.get_class(config)(config)
    specs = executor.get_kv_cache_specs()
    layers = [layer for worker in specs for layer in worker.values()]
    layout = core.resolve_kv_cache_layout(config, executor.get_supported_kv_cache_layouts(), layers)
    executor.set_kv_cache_layout(layout.name)
    for length in case["lengths"]:
        config.model_config.max_model_len = length
        for pool in case["pools"]:
            place = {"name": case["name"], "length": length, "pool": pool}
            print("RESULT", json.dumps(place | caches(config, specs, pool)), flush=True)
    executor.shutdown()
    cleanup_dist_env_and_memory()


def caches(config: Any, specs: list[Any], pool: int) -> dict[str, Any]:
    """longest: instead of all else, where vLLM refuses to start because a request of max_model_len does not fit."""
    try:
        made = kv_cache_utils.get_kv_cache_configs(config, [dict(worker) for worker in specs], [pool])
    except ValueError as error:
        found = re.search(r"estimated maximum model length is (\d+)", str(error))
        return {"longest": int(found[1]) if found else 0}
    scheduled = kv_cache_utils.generate_scheduler_kv_cache_config(made)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, scheduled)
    return {
        "block_size": config.cache_config.block_size,
        "page_bytes": scheduled.kv_cache_groups[0].kv_cache_spec.page_size_bytes,
        "groups": sorted(len(group.layer_names) for group in scheduled.kv_cache_groups),
        "blocks": scheduled.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
    }


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        run(each, Path(sys.argv[2]))
