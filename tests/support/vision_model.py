"""The scripted network's config and tokenizer within Qwen3.5-MoE's multimodal class, with a tiny vision tower. vLLM
fills it with random weights (--load-format dummy): it sees nothing, but takes a picture the way the real one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.scripted_tiny import repositories

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 16, 2
PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def generate(folder: Path) -> None:
    repositories.generate_plain(folder, seed=7)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    text = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    assert first + len(MARKS) <= text["vocab_size"]
    marks = {mark: first + place for place, mark in enumerate(MARKS)}
    for mark, number in marks.items():
        how = {"content": mark, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        tokenizer["added_tokens"].append({"id": number, **how, "special": True})
        settings["added_tokens_decoder"][str(number)] = {**how, "special": True}
    processor: dict[str, Any] = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "size": PIXELS}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    files = {
        "config.json": config(text, marks),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "preprocessor_config.json": processor | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": processor | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, value in files.items():
        write(folder / name, json.dumps(value))
    write(folder / "chat_template.jinja", TEMPLATE)
    folder.chmod(0o755)


def write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o644)


def config(text: dict[str, Any], marks: dict[str, int]) -> dict[str, Any]:
    rope = text["rope_parameters"] | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    tower = {
        "model_type": "qwen3_5_moe",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
    }
    inner = {key: value for key, value in text.items() if key != "architectures"} | {"rope_parameters": rope}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": inner,
        "vision_config": tower,
        "vision_start_token_id": marks["<|vision_start|>"],
        "vision_end_token_id": marks["<|vision_end|>"],
        "image_token_id": marks["<|image_pad|>"],
        "video_token_id": marks["<|video_pad|>"],
    }
