"""The kernels against naive.py on a random head (`sparkpin_modkit.selfcheck`). A server rehearses them on its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sparkpin_modkit import kernels
from sparkpin_modkit.selfcheck import Compared

from sparkpin_int8_lm_head import MOD, cuda
from sparkpin_int8_lm_head.ahead import warm_up
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.tuned import tuned_for

ROWS, COLUMNS = 248_320, 3072
"""The 122B's head: 0.8 GB."""


@torch.inference_mode()
def check(rows: int = ROWS, columns: int = COLUMNS) -> Iterator[Compared]:
    """A random head on the current GPU: entry point of ``sparkpin.selfcheck``."""
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    random = torch.Generator(device).manual_seed(0)
    q = lay_out(rows, columns, device)
    q.random_(-127, 128, generator=random)
    row_scale = torch.rand(rows, generator=random, device=device) * 1e-3 + 1e-4
    column_scale = torch.rand(columns, generator=random, device=device) + 0.5
    dtype = torch.bfloat16
    kernels.warm(MOD, lambda: warm_up((dtype,), (True,)))
    compared = cuda.compare(q, row_scale.to(dtype), column_scale.to(dtype), None, dtype, tuned_for(10 * major + minor))
    for tokens, count, error, bound in compared:
        yield "int8 head", f"{tokens} tokens, {count} of {rows} rows", error, bound
