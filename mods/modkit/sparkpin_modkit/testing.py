"""For the mods' own tests: vLLM's layers in one process, without a server; what a compiled kernel needs."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

RESERVED = 1024
"""Bytes of shared memory of each block that the driver keeps."""


class Multiprocessor(NamedTuple):
    """What blocks share, by CUDA's programming guide: table of technical specifications per compute capability."""

    registers: int
    warps: int
    blocks: int
    shared_bytes: int


MULTIPROCESSORS = {90: Multiprocessor(65_536, 64, 32, 233_472), 121: Multiprocessor(65_536, 48, 24, 102_400)}
"""By architecture. A single block may ask for all of the shared memory but what is reserved."""
SHARED_MEMORY = {architecture: of.shared_bytes - RESERVED for architecture, of in MULTIPROCESSORS.items()}
"""Architecture -> bytes that one block may ask for: 227 and 99 KiB."""


def resident_blocks(architecture: int, registers: int, threads: int, shared_bytes: int) -> int:
    """How many blocks of a kernel a multiprocessor holds at a time; 0: none can be launched.

    registers: of a thread. They are handed out to warps by 256, from one quarter of them for each of four schedulers.
    """
    has, warps = MULTIPROCESSORS[architecture], -(-threads // 32)
    by_registers = 4 * (has.registers // 4 // (-(-registers * 32 // 256) * 256)) // warps
    by_memory = has.shared_bytes // (shared_bytes + RESERVED)
    return min(by_registers, by_memory, has.warps // warps, has.blocks)


@contextmanager
def single_process_vllm() -> Iterator[Any]:
    """A default ``VllmConfig`` and a world of one process, in which vLLM's parallel layers can be built."""
    with tempfile.TemporaryDirectory() as folder, vllm_rank(0, 1, f"{folder}/world") as config:
        yield config


@contextmanager
def vllm_rank(rank: int, size: int, meeting: str) -> Iterator[Any]:
    """The same as one rank of tensor parallelism. meeting: a path, the same for all ranks."""
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    os.environ["VLLM_DIST_IDENT"] = Path(meeting).parent.name  # names the ranks' shared memory on a CPU
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=size, distributed_executor_backend="mp"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=size,
            rank=rank,
            local_rank=rank,
            distributed_init_method=f"file://{meeting}",
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(size, 1)
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def on_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2, seconds: float = 300) -> list[Any]:
    """What ``function(rank, size, meeting, *arguments)`` returns in a process of its own for each rank.

    function: of a module that a new process can import; arguments and results: what can be pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn"))
        try:
            jobs = [pool.submit(function, rank, size, f"{folder}/world", *arguments) for rank in range(size)]
            done, _ = wait(jobs, seconds, FIRST_EXCEPTION)
            for job in done:
                job.result()  # a rank that failed, before those that wait for it
            return [job.result(0) for job in jobs]
        finally:
            for process in list(pool._processes.values()):
                process.terminate()  # one may wait for another that has failed
            pool.shutdown()


def resources_of(cubin: bytes, kernel: str = "") -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL ... of a kernel in a cubin, which may have only one, by Triton's cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    [line] = re.findall(rf"Function {kernel or '.*'}:\n(.*)", done.stdout)
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", line)}


def parse_reports(text: str) -> list[dict[str, Any]]:
    """The JSON of every report line in `text` (a log, or a captured stream)."""
    import json

    from sparkpin_modkit.reports import MARKER

    return [json.loads(line.split(MARKER, 1)[1]) for line in text.splitlines() if f"{MARKER} {{" in line]
