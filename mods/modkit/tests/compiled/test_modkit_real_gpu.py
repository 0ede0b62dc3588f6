"""On a machine with a GPU: what was compiled for an absent one is what the real driver asks for, and it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_modkit_ahead import Sample, kernels

# A server with the real driver: the last line is the answer of a launch.
START = """
import sys
from pathlib import Path
import torch
from sparkpin_modkit.kernels import warm
from sample_mod.ahead import warm_up
from sample_mod.kernel import scale

warm("sample", warm_up, Path(sys.argv[1]))
x = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
out = torch.empty_like(x)
scale[(4096 // 256,)](x, out, 4096, BLOCK=256)
assert bool((out == 2).all())
"""


def test_a_real_gpu_finds_what_was_compiled_for_an_absent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(tmp_path)
    major, minor = torch.cuda.get_device_capability()
    folder = sample.image / "sample"
    built = sample.run(
        "-m", "sparkpin_modkit.ahead", "sample", f"{major}.{minor}", str(folder), CUDA_VISIBLE_DEVICES=""
    )
    assert built.returncode == 0, built.stderr[-3000:]
    tool = "TRITON_PTXAS_BLACKWELL_PATH" if major >= 10 else "TRITON_PTXAS_PATH"
    if major < 10:
        sample.broken.write_text(sample.broken.read_text().replace("ptxas-blackwell", "ptxas"))
    done = sample.run("-c", START, str(sample.image), **{tool: str(sample.broken)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert sample.reports(done) == [kernels(image=4)]
