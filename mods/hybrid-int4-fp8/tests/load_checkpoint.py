"""Run by test_hybrid_formats.py in an image: load a checkpoint as `vllm serve` would, with MTP, and look into it.

Each FP8 linear layer of the model and of its drafter is read back with unit vectors and compared with what the
checkpoint's files say, so that weights in a wrong place show, which the scripted answers could survive. Prints one line
of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from sparkpin_hybrid.dequantise import dequantise_blocks
from sparkpin_hybrid.reference import ReferenceFp8Scheme
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
}


def saved_value(folder: Path, module: str) -> torch.Tensor:
    """``[N, K]`` of one module of the checkpoint, in bfloat16."""
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def tensor(name: str) -> torch.Tensor:
        with safe_open(folder / files[name], framework="pt") as file:
            return file.get_tensor(name)

    return dequantise_blocks(
        tensor(f"{module}.weight"), tensor(f"{module}.weight_scale_inv").float(), (128, 128), torch.bfloat16
    )


def compare(model: torch.nn.Module, folder: Path, rename: tuple[str, str]) -> dict[str, bool]:
    """layer -> whether it computes what the checkpoint holds, for each layer that is FP8."""
    seen = {}
    for name, layer in model.named_modules():
        scheme = getattr(getattr(layer, "quant_method", None), "scheme", None)
        if isinstance(scheme, ReferenceFp8Scheme):
            parent, _, last = name.replace(*rename, 1).rpartition(".")
            wanted = torch.cat([saved_value(folder, f"{parent}.{part}") for part in PARTS.get(last, (last,))])
            eye = torch.eye(wanted.shape[1], dtype=torch.bfloat16)
            seen[name] = torch.equal(layer.quant_method.apply(layer, eye).T, wanted)
    return seen


def main(folder: Path) -> None:
    llm = LLM(
        str(folder),
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        max_num_seqs=2,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    messages = [[{"role": "user", "content": text}] for text in ("Hello", "Tell me a long story.")]
    layers = compare(runner.model, folder, ("model.", "model.language_model."))
    drafter = compare(runner.drafter.model, folder, ("model.", "mtp."))
    plain = [
        name
        for name, layer in runner.model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), UnquantizedLinearMethod)
    ]
    answers = llm.chat(messages, SamplingParams(temperature=0, max_tokens=400))
    metrics = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    result = {
        "layers": layers,
        "drafter": drafter,
        "plain": plain,
        "answers": [answer.outputs[0].text for answer in answers],
        "drafted": metrics["vllm:spec_decode_num_draft_tokens"],
        "accepted": metrics["vllm:spec_decode_num_accepted_tokens"],
    }
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
