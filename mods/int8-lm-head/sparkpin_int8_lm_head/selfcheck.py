"""The kernels against naive.py on a random head (`sparkpin_modkit.selfcheck`). A server rehearses them on its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sparkpin_modkit import kernels
from sparkpin_modkit.selfcheck import Compared

from sparkpin_int8_lm_head import MOD, cuda, int4
from sparkpin_int8_lm_head.ahead import warm_up
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.tuned import tuned_for

ROWS, COLUMNS = 248_320, 3072
"""The 122B's head: 0.8 GB."""


@torch.inference_mode()
def check(rows: int = ROWS, columns: int = COLUMNS) -> Iterator[Compared]:
    """Random heads of both forms on the current GPU, one after another: entry point of ``sparkpin.selfcheck``."""
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    random = torch.Generator(device).manual_seed(0)
    row_scale = torch.rand(rows, generator=random, device=device) * 1e-3 + 1e-4
    column_scale = torch.rand(columns, generator=random, device=device) + 0.5
    dtype, architecture = torch.bfloat16, 10 * major + minor
    kernels.warm(MOD, lambda: warm_up((dtype,), (True,)))
    q = lay_out(rows, columns, device).random_(-127, 128, generator=random)
    scales = row_scale.to(dtype), column_scale.to(dtype)
    for tokens, count, error, bound in cuda.compare(q, *scales, None, dtype, tuned_for(architecture)):
        yield "int8 head", f"{tokens} tokens, {count} of {rows} rows", error, bound
    del q
    packed = int4.memory(rows, columns, device).random_(-128, 128, generator=random)
    scales = row_scale, column_scale.to(dtype)
    for tokens, count, error, bound in cuda.compare_int4(packed, *scales, dtype, tuned_for(architecture, bits=4)):
        yield "int4 head", f"{tokens} tokens, {count} of {rows} rows", error, bound
