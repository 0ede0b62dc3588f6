"""Run by tests/e2e/build/test_mods_ranks.py in an image: a checkpoint in one process, or in two that share it.

usage: serve_ranks.py FOLDER RANKS OPTIONS, the last one JSON for vLLM's `LLM`. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams

ASKED = ("Hello", "Tell me a long story.", "Who are you?")


def main(folder: str, ranks: int, options: str) -> None:
    llm = LLM(
        folder,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=4,
        disable_log_stats=False,
        **json.loads(options),
    )
    messages = [[{"role": "user", "content": text}] for text in ASKED]
    answers = llm.chat(messages, SamplingParams(temperature=0, max_tokens=400))
    metrics = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    result = {
        "answers": [answer.outputs[0].text for answer in answers],
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"].value,
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"].value,
    }
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
