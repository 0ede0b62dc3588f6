"""What a server launches is what was compiled ahead: Triton specialises on more than one sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparkpin_int8_lm_head import int4, kernel
from sparkpin_int8_lm_head.ahead import warm_up
from sparkpin_int8_lm_head.cuda import FLOAT32_TOKENS, int4_linear, int8_linear
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.tuned import tuned_for
from triton import knobs

# Qwen3.5's hidden sizes, those of the scripted model, and vocabularies as vLLM pads them.
SHAPES = [(4096, 3072), (2048, 2048), (64, 128), (1088, 4096)]


@pytest.fixture
def compiled(architecture: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what Triton has to look for once more after the warm-up. Launches stop before the GPU."""
    for function in (kernel.input_digits, kernel.int8_head, kernel.int4_head):
        function.device_caches.clear()

        def run(*args: Any, grid: Any, warmup: bool, original: Any = function.run, **kwargs: Any) -> Any:
            return original(*args, grid=grid, warmup=True, **kwargs)

        monkeypatch.setattr(function, "run", run)
    warm_up()
    seen: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: seen.append(event["src"].name))
    return seen


def test_each_launch_of_a_server_was_compiled(architecture: int, compiled: list[str]) -> None:
    tuned = tuned_for(architecture)
    for rows, columns in SHAPES:
        q = lay_out(rows, columns, torch.device("cpu"))
        for dtype in (torch.bfloat16, torch.float16):
            scales = torch.ones(rows, dtype=dtype), torch.ones(columns, dtype=dtype)
            for tokens in (1, 2, 3, 16, 17, 33, 64, 128, 129, FLOAT32_TOKENS + 1):
                for column_scale in (None, scales[1]):
                    int8_linear(torch.zeros(tokens, columns, dtype=dtype), q, scales[0], column_scale, None, tuned)
    assert compiled == []


def test_each_launch_of_a_drafter_was_compiled(architecture: int, compiled: list[str]) -> None:
    tuned = tuned_for(architecture, bits=4)
    for rows, columns in SHAPES:
        packed, row_scale = int4.memory(rows, columns, torch.device("cpu")), torch.ones(rows)
        for dtype in (torch.bfloat16, torch.float16):
            for tokens in (1, 2, 3, 16, 17, 33, 64, 65, 256):
                for column_scale in (None, torch.ones(columns, dtype=dtype)):
                    x = torch.zeros(tokens, columns, dtype=dtype)
                    int4_linear(x, packed, row_scale, column_scale, tuned)
    assert compiled == []


def test_another_head_would_be_noticed(architecture: int, compiled: list[str]) -> None:
    q, scale = lay_out(63, 128, torch.device("cpu")), torch.ones(63)
    int8_linear(torch.zeros(1, 128, dtype=torch.bfloat16), q, scale, None, None, tuned_for(architecture))
    assert compiled == ["int8_head"]
