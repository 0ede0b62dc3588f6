"""What of vLLM's wheel the benchmarks run beside this mod, in one folder to carry: its FlashAttention 3 and its own
turboquant kernels, and nothing else of vLLM.

FlashAttention keeps only machine code for SM90, so OUT is of use on a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks/stage_table"))
import fatbin

OPS = "vllm/v1/attention/ops/"
FLASH = "vllm/vllm_flash_attn/"
FILES = (OPS + "triton_turboquant_decode.py", OPS + "triton_decode_attention.py", FLASH + "flash_attn_interface.py")
STUBS = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/attention/__init__.py": "",
    OPS + "__init__.py": "",
    FLASH + "__init__.py": "",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n",
    "vllm/platforms/__init__.py": "class current_platform:\n    is_cuda_alike = staticmethod(lambda: True)\n"
    "    is_rocm = staticmethod(lambda: False)\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", metavar="VLLM.whl", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    given = parser.parse_args()
    if not zipfile.is_zipfile(given.wheel):
        parser.error(f"{given.wheel}: wanted vLLM's wheel; pip download --no-deps vllm gets it")
    wheel, out = zipfile.ZipFile(given.wheel), given.out
    files = {name: text.encode() for name, text in STUBS.items()} | {name: wheel.read(name) for name in FILES}
    library = FLASH + "_vllm_fa3_C.abi3.so"
    files[library], kept = fatbin.slim(wheel.read(library), 90)
    print(f"{library}: {fatbin.described(kept)}")
    for name, content in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
