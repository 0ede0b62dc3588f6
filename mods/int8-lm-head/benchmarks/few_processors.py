"""What one multiprocessor gets through, to tell whether a GPU with few of them is limited by memory or by arithmetic.

    python mods/int8-lm-head/benchmarks/few_processors.py --out few.json

A DGX Spark has 48 multiprocessors for 273 GB/s: 5.7 GB/s for each. This runs the tiles that tuned.json has for SM121
on the GPU at hand, as that GPU's architecture compiles them and as PTX for SM80, whose matrix instruction (mma.sync) is
the one of SM121, with one block on each of 48 multiprocessors, so that memory is no limit. More blocks than one fit on
a multiprocessor, so what a multiprocessor can do is at least this.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton
from sparkpin_int8_lm_head.ahead import compile_head
from sparkpin_int8_lm_head.kernel import launch_head
from sparkpin_int8_lm_head.tuned import Tuned, tuned_for
from sparkpin_modkit.ahead import AbsentGpu
from timing import microseconds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

PROCESSORS = 48
COLUMNS = 131_072
SPARK = 121
DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Ptx:
    """A kernel as PTX, which the GPU's driver compiles for the GPU at hand."""

    def __init__(self, tuned: Tuned) -> None:
        real = driver.active
        driver.set_active(AbsentGpu(GPUTarget("cuda", 80, 32)))
        try:
            self.compiled = compile_head(tuned, torch.bfloat16, False)
        finally:
            driver.set_active(real)
        self.tuned = tuned
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(self.compiled.asm["ptx"].encode()))
        name = ctypes.c_char_p(self.compiled.metadata.name.encode())
        self.call("cuModuleGetFunction", ctypes.byref(self.function), module, name)
        self.call(
            "cuFuncSetAttribute", self.function, DYNAMIC_SHARED_MEMORY, ctypes.c_int(self.compiled.metadata.shared)
        )
        self.parameters = self.compiled.asm["ptx"].split(".visible .entry", 1)[1].split(")", 1)[0].count(".param")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA driver error {code}")

    def launch(self, out, digits, scale, q, row_scale) -> None:
        pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (out, digits, scale, q, row_scale)]
        numbers = [ctypes.c_int32(number) for number in (out.shape[0], out.shape[1], digits.shape[2])]
        unused = [ctypes.c_uint64(0)] * (self.parameters - len(pointers) - len(numbers))  # Triton's scratch memory
        values = [*pointers, *numbers, *unused]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        tiles = triton.cdiv(out.shape[1], self.tuned.block_v) * triton.cdiv(out.shape[0], self.tuned.block_b)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shared = self.compiled.metadata.shared
        self.call(
            "cuLaunchKernel", self.function, tiles, 1, 1, 32 * self.tuned.warps, 1, 1, shared, stream, array, None
        )


def measure(tuned: Tuned) -> dict[str, object]:
    tokens, rows = tuned.block_b, PROCESSORS * tuned.block_v
    q = torch.randint(-127, 128, (rows, COLUMNS), dtype=torch.int8, device="cuda")
    digits = torch.randint(-127, 128, (tokens, 2, COLUMNS), dtype=torch.int8, device="cuda")
    scale, row_scale = torch.ones(tokens, device="cuda"), torch.ones(rows, device="cuda", dtype=torch.bfloat16)
    out = torch.full((tokens, rows), torch.nan, device="cuda")
    own = microseconds([partial(launch_head, out, digits, scale, q, row_scale, None, tuned)] * 2, replays=7)
    wanted = out.clone()
    ptx = Ptx(tuned)
    other = torch.full_like(out, torch.nan)
    as_sm80 = microseconds([partial(ptx.launch, other, digits, scale, q, row_scale)] * 2, replays=7)
    assert torch.equal(other, wanted) and not bool(wanted.isnan().any())
    rate = q.nbytes / 1e3 / PROCESSORS
    return {**asdict(tuned), "GBps_each": rate / own, "GBps_each_as_sm80": rate / as_sm80}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out_file = parser.parse_args().out
    torch.manual_seed(0)
    result = []
    for tuned in tuned_for(SPARK).values():
        result.append(measure(tuned))
        print(json.dumps(result[-1]), flush=True)
    out_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
