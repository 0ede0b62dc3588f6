"""What several nodes cannot share of a model, with the number that does not divide."""

from __future__ import annotations

from typing import Any

import pytest
from places import PROJECT

from benchmarks.scripted_tiny.network import FORMS, config
from benchmarks.scripted_tiny.vocabulary import vocabulary
from sparkpin.checkpoint import shapes
from sparkpin.core.errors import ManifestError
from sparkpin.memory.division import division_faults
from sparkpin.pins.schema import FormatRule

SHARED = [FormatRule(modules=["model.*.mlp.shared_expert.*_proj"], format="fp8", source="fp8", block=[128, 128])]
REPOS = ("Intel/Qwen3.5-122B-A10B-int4-AutoRound", "Intel/Qwen3.5-35B-A3B-int4-AutoRound")
LARGE, SMALL = (shapes.config_ahead(PROJECT, repo) for repo in REPOS)


def scripted(name: str) -> dict[str, Any]:
    quantised = {"quantization_config": {"bits": 4, "group_size": 128}}
    return config(vocabulary(), FORMS[name]) | quantised


PLAIN = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
         "vocab_size": 1000, "max_position_embeddings": 64, "intermediate_size": 512,
         "model_type": "llama"}  # fmt: skip


def seen(config: Any, flags: str, rules: Any = SHARED) -> list[str]:
    argv = ["vllm", "serve", "/model", *flags.split()]
    return [str(fault.got) for fault in division_faults(config, argv, rules, "recipes/r.yaml")]


@pytest.mark.parametrize(
    ("config", "flags", "wanted"),
    [
        (LARGE, "-tp 3", "KV heads (2) over 3"),
        (scripted("scripted-wide"), "-tp 4", "linear key heads (2) over 4"),
        (LARGE, "-tp 3", "vocab_size 248320, padded 248320, over 3"),
        (SMALL, "-tp 8", "mlp.experts.0.down_proj: 512 over 8, 64 for each"),
        (scripted("scripted-tiny"), "-tp 2", "mlp.shared_expert.down_proj: 128 over 2, 64 for each"),
        (LARGE, "-tp 1 -pp 2", "--pipeline-parallel-size 2"),
        (PLAIN | {"num_attention_heads": 6, "num_key_value_heads": 3}, "-tp 2", "KV heads (3) over 2"),
    ],
)
def test_what_does_not(config: Any, flags: str, wanted: str) -> None:
    assert wanted in seen(config, flags)


def test_plain_attention_may_go_by_layers() -> None:
    assert seen(PLAIN, "-tp 1 -pp 2") == seen(PLAIN, "-tp 4 -pp 2") == []


def test_blocks_count_only_where_there_are_some() -> None:
    """Halves of 64: of plain weights, of what a rule makes plain, and of modules that the quantisation leaves out."""
    narrow = PLAIN | {"intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    assert seen(narrow, "-tp 2") == []
    fp8 = {"quantization_config": {"weight_block_size": [128, 128]}}
    assert seen(narrow | fp8, "-tp 2") == ["mlp.down_proj: 128 over 2, 64 for each"]
    plain = [FormatRule(modules=["model.layers.*.mlp.*"], format="plain", source="b")]
    assert seen(narrow | fp8, "-tp 2", plain) == []
    fp8["quantization_config"]["modules_to_not_convert"] = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]  # type: ignore[assignment]
    assert seen(narrow | fp8, "-tp 2") == []


def test_a_model_that_no_plan_here_knows() -> None:
    with pytest.raises(ManifestError):
        list(division_faults({"layers": 3}, ["vllm", "serve", "/model", "-tp", "2"], (), "recipes/r.yaml"))
    with pytest.raises(ManifestError, match="brand_new"):
        seen(PLAIN | {"model_type": "brand_new"}, "-tp 2")
