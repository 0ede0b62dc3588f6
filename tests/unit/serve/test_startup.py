"""A start as it is read off the log of vLLM and shown: stages, percents, the last one."""

from __future__ import annotations

import pytest

from sparkpin.serve import switching
from sparkpin.smoke.startup import Startup

START = b"""(APIServer pid=1) INFO 11-22 02:30:25 [api_utils.py:347]   version 0.32.0
(EngineCore pid=26) INFO 11-22 02:30:45 [cpu_model_runner.py:68] Starting to load model /model...
Loading safetensors checkpoint shards:   0% Completed | 0/3 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  67% Completed | 2/3 [00:00<00:00, 162.20it/s]"""
REST = b"""
(EngineCore pid=26) INFO 11-22 02:30:45 [default_loader.py:501] Loading weights took 0.02 seconds
(EngineCore pid=26) INFO 11-22 02:30:46 [kv_cache_utils.py:2327] CPU KV cache size: 547,693 tokens, Maximum concurrency
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 10/20 [00:01<00:01]"""
READY = b"\n(APIServer pid=1) INFO:     Application startup complete.\n"


def test_stages_and_percents_of_a_start() -> None:
    watched = Startup()
    assert len(watched.update(START, 20.04)) == 3 and watched.text == "weights 67 % (2 of 3)"
    assert not watched.update(START, 21.0)
    assert watched.update(START + REST, 31.0) and watched.text == "graphs 50 % (10 of 20)"
    assert watched.update(START + REST + READY, 33.0) and watched.ready
    assert watched.began == {
        "start": 0.0,
        "weights": 20.0,
        "compile": 31.0,
        "cache": 31.0,
        "graphs": 31.0,
        "ready": 33.0,
    }


@pytest.mark.parametrize(
    ("readings", "seconds", "quiet"),
    [
        ([2, 1, 0], 1000, True),
        ([2, None, None, None, 1, 0], 1000, True),  # not to know does not mean that there are none
        ([1], 0, False),
        ([None], 0, False),
    ],
)
def test_requests_under_way_are_waited_for_and_not_for_ever(
    readings: list[int | None], seconds: float, quiet: bool
) -> None:
    left = iter(readings)
    assert switching.wait_quiet(lambda: next(left), seconds) is quiet
    assert list(left) == []
