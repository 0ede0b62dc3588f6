"""Runs in a container of the release's image, beside the server: vLLM's own load generator, `vllm bench serve`.

usage: driver.py PLAN

Requests are made, sent and timed by vLLM's code. This tells it what to send, which its command line cannot say without
pandas, and keeps one process for all steps, because its imports take longer than most of them. One line of JSON for
each step goes to standard output, all else to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

KEPT = ("duration", "input_lens", "output_lens", "ttfts", "itls", "errors")
COUNTERS = ("vllm:generation_tokens_total", "vllm:spec_decode_num_")
SETTLE_SECONDS = 0.3  # the server's counters follow its answers


def fetch(url: str, body: object = None) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = reply.read().decode()
    return text


def counters(url: str) -> str:
    time.sleep(SETTLE_SECONDS)
    return "\n".join(line for line in fetch(f"{url}/metrics").splitlines() if line.startswith(COUNTERS))


def arguments(plan: dict[str, Any], step: dict[str, Any]) -> list[str]:
    """The command line of `vllm bench serve`. A text of our own comes in place of a data set that needs pandas."""
    prompt = bool(step["prompt"])
    return [
        *("--base-url", plan["url"], "--model", plan["model"], "--tokenizer", plan["tokenizer"]),
        *("--endpoint", "/v1/completions", "--backend", "openai", "--temperature", "0", "--disable-tqdm"),
        *("--ready-check-timeout-sec", "0"),  # it would ask the first prompt once more, for the prefix cache to keep
        *("--seed", str(step["seed"]), "--num-prompts", str(step["requests"])),
        *("--max-concurrency", str(step["concurrency"]), "--save-detailed"),
        *(("--dataset-name", "custom", "--skip-tokenizer-init") if prompt else ("--dataset-name", "random")),
        *("--random-input-len", str(step["input_tokens"]), "--random-output-len", str(step["output_tokens"])),
        *(("--ignore-eos",) if step["whole"] else ()),
    ]


def run(plan: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    serve: Any = importlib.import_module("vllm.benchmarks.serve")
    request: Any = importlib.import_module("vllm.benchmarks.datasets").SampleRequest
    stock = serve.get_samples
    if step["prompt"]:
        said = [{"role": "user", "content": step["prompt"]}]
        # The server's own chat template: the recipe may have set another than the model's.
        tokens = json.loads(fetch(f"{plan['url']}/tokenize", {"model": plan["model"], "messages": said}))["tokens"]
        most = min(step["output_tokens"], plan["room"] - len(tokens))
        asked = [request(tokens, len(tokens), most) for _ in range(step["requests"])]
        serve.get_samples = lambda *_, **__: asked
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    args = parser.parse_args(arguments(plan, step))
    before = counters(plan["url"])
    try:
        result = asyncio.run(asyncio.wait_for(serve.main_async(args), step["limit"]))
    finally:
        serve.get_samples = stock
    return {
        "step": step["number"],
        "result": {key: result[key] for key in KEPT},
        "before": before,
        "after": counters(plan["url"]),
    }


def forget_proxies() -> None:
    """The client's configuration of Docker may set them in each container; the server is on 127.0.0.1."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]


def main(path: str) -> int:
    forget_proxies()
    plan = json.loads(Path(path).read_text())
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its own lines to standard output
    # Before the rest: on a CPU a plugin, which vLLM loads as it looks for its platform, has to mend torchvision.
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    hello = {"platform": platform.device_type, "vllm": importlib.import_module("vllm").__version__}
    print(json.dumps(hello), file=told, flush=True)
    sys.path.append(str(Path(__file__).parent))
    listening = importlib.import_module("socket_port").listening  # the server has no network, and the tool wants a URL
    with listening(Path(plan["socket"])) as port:
        plan["url"] = f"http://127.0.0.1:{port}"
        for step in plan["steps"]:
            print(json.dumps({"begin": step["number"]}), file=told, flush=True)
            print(json.dumps(run(plan, step)), file=told, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
