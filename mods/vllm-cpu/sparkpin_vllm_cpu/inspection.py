"""Look at a model's class in the process that will load it.

vLLM asks a class for what it can do (``_ModelInfo``) in a process of its own, so that CUDA is not initialised in the
server's. Each of these repeats vLLM's imports: 7 s on two cores, twice where a drafter has a class of its own. On a CPU
there is nothing to be kept from, and the server imports the class anyway. May go with the first vLLM in which
``test_vllm_still_inspects_in_a_process_of_its_own`` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparkpin_modkit import check_signature

T = TypeVar("T")


def install() -> None:
    from vllm.model_executor.models import registry

    check_signature(registry._run_in_subprocess, "fn")
    registry._run_in_subprocess = run_here


def run_here(fn: Callable[[], T]) -> T:
    return fn()
