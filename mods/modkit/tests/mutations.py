"""Faults that were written down for the mods' code, and the test that sees each one.

`survives` runs the test on a copy of the mod's package with the fault in it. Those of the interpreter run in
int8-lm-head/tests/interpreted, the others in test_modkit_mutations.py. A test of documents counts for none of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MODS = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """source: below mods/, holds `before` once. test: below mods/, or the reason why only a GPU can tell."""

    source: str
    before: str
    after: str
    test: str
    only_gpu: str = ""


HEAD, HYBRID, TURBO = (
    "int8-lm-head/sparkpin_int8_lm_head",
    "hybrid-int4-fp8/sparkpin_hybrid",
    "turboquant/sparkpin_turboquant",
)
ON_KERNEL = "int8-lm-head/tests/interpreted/test_int8_kernel.py"
ON_CHECK = "turboquant/tests/compiled/test_turboquant_selfcheck.py"
ON_HYBRID = "hybrid-int4-fp8/tests/test_hybrid_vllm.py"
MUTATIONS = {
    "low digit dropped": Mutation(
        f"{HEAD}/kernel.py",
        "high.to(tl.float32) * 256.0 + low.to(tl.float32)",
        "high.to(tl.float32) * 256.0",
        f"{ON_KERNEL}::test_float32_logits_are_not_rounded",
    ),
    "digit without carry": Mutation(
        f"{HEAD}/kernel.py",
        "high = (number + 128) >> 8",
        "high = number >> 8",
        f"{ON_KERNEL}::test_digits_are_naive_s",
    ),
    "upper codes with the lower columns": Mutation(
        f"{HEAD}/kernel.py",
        "tl.load(inputs + H + k,",
        "tl.load(inputs + k,",
        "int8-lm-head/tests/interpreted/test_int4_kernel.py::test_every_code_comes_out_of_either_half_of_a_byte",
    ),
    "rehearsal with the bound of old": Mutation(
        f"{HEAD}/cuda.py",
        "LARGEST_ERROR = 1e-3",
        "LARGEST_ERROR = 1e-2",
        f"{ON_KERNEL}::test_rehearsal_notices_a_kernel_that_computes_something_else",
    ),
    "rehearsal that leaves tiles out": Mutation(
        f"{HEAD}/cuda.py",
        "min(q.shape[0] // SPREAD_ROWS, *(entry.block_v for entry in tuned.values()))",
        "q.shape[0] // SPREAD_ROWS",
        f"{ON_KERNEL}::test_rehearsal_looks_at_each_tile_of_a_large_vocabulary",
    ),
    "self-check with a wide bound": Mutation(
        f"{TURBO}/selfcheck.py",
        "ROUNDED, ATTENDED = 2e-3, 0.15, 2e-3, 1e-2",
        "ROUNDED, ATTENDED = 2e-3, 0.15, 2e-3, 1e-1",
        f"{ON_CHECK}::test_a_fault_is_seen_where_it_is",
    ),
    "self-check of the mean vector": Mutation(
        f"{TURBO}/selfcheck.py",
        ".clamp(min=1e-30)).max())",
        ".clamp(min=1e-30)).mean())",
        f"{ON_CHECK}::test_one_vector_among_many_counts",
    ),
    "self-check that keeps what is wrong": Mutation(
        "modkit/sparkpin_modkit/selfcheck.py",
        "return self.error < self.bound",
        "return not self.error > self.bound",
        "modkit/tests/test_modkit_selfcheck.py::test_what_is_wrong_stops_each_start",
    ),
    "expert without scale": Mutation(
        f"{HYBRID}/count.py",
        "scale.fill_(UNSET)",
        "pass",
        f"{ON_HYBRID}::test_one_scale_of_one_expert_that_never_came_stops_each_path",
    ),
    "FP8 layer without scale": Mutation(
        f"{HYBRID}/count.py",
        "if missing := int(((scale == UNSET) | scale.isnan()).sum()):",
        "if missing := 0:",
        f"{ON_HYBRID}::test_a_scale_that_never_came_stops_each_path",
    ),
    "index of a block in 32 bits": Mutation(
        f"{TURBO}/device.cu",
        "typedef long long i64;",
        "typedef int i64;",
        "turboquant/tests/on_gpu/test_turboquant_selfcheck_on_gpu.py::test_a_cache_beyond_2_gib",
        "an offset beyond 2 GiB of cache",
    ),
    "index of weights in 32 bits": Mutation(
        f"{HEAD}/kernel.py",
        "tl.where(is_row, rows, 0).to(tl.int64)[:, None] * S",
        "tl.where(is_row, rows, 0)[:, None] * S",
        "",
        "more than 2 GiB of codes; the head of 248,320 x 3072 has 0.76 GB, so no model at hand reaches it",
    ),
    "merge without its wait": Mutation(
        f"{TURBO}/device.cu",
        'asm volatile("griddepcontrol.wait;" ::: "memory");',
        "",
        "turboquant/tests/on_gpu/test_turboquant_on_gpu.py::test_stored_read_and_attended_as_naive_does",
        "kernels that overlap; on a CPU they run one after another. Not tried with the fault in it",
    ),
}


def caught_by(where: str) -> list[str]:
    """Names of those that a test below `where` catches on a CPU."""
    return [name for name, one in MUTATIONS.items() if not one.only_gpu and one.test.startswith(where)]


def survives(name: str, folder: Path) -> str:
    """What the test says with the fault in a copy under `folder`; empty where it fails, as it should."""
    one = MUTATIONS[name]
    source = MODS / one.source
    copied = folder / source.parent.name
    shutil.copytree(source.parent, copied)
    text = source.read_text()
    assert text.count(one.before) == 1, name
    (copied / source.name).write_text(text.replace(one.before, one.after))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--confcutdir={MODS}"]
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(MODS / one.test)], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    failed = done.returncode == 1 and f"::{one.test.partition('::')[2]}" in done.stdout.partition("test summary")[2]
    return "" if failed else done.stdout[-2000:] + done.stderr[-1000:]
